"""Texts, pairs and tagged words: their columns, their rows, and their tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fedrot.simulations.data import IGNORED
from fedrot.simulations.data.encode import encode
from fedrot.simulations.data.labels import LABEL, Split
from fedrot.simulations.data.read import DataError, Source
from fedrot.simulations.data.texts import (
    PAIRS,
    TEXT,
    load_domains,
    load_tags,
    load_texts,
)
from fedrot.simulations.data.tokenizers import bundled_tokenizer
from fedrot.simulations.tasks.task_registry import TASKS
from tests.simulations.data.files import TEXTS, chosen, repeated, shared_data, write
from tests.simulations.data.wordpiece import SPECIAL_TOKENS, train_wordpiece

MOODS = repeated(["glad", "sad"])


def test_columns_have_usual_names_in_the_order_of_preference():
    for content in (TEXT, LABEL):
        for number, name in enumerate(content[1]):
            table = pa.table({other: ["a"] for other in reversed(content[1][number:])})
            assert Source({"here": table}).column(content, None) == name
    # A column has to be in both tables.
    tables = {
        "here": pa.table({"text": ["a"], "review": ["b"]}),
        "there": pa.table({"review": ["c"]}),
    }
    assert Source(tables).column(TEXT, None) == "review"
    with pytest.raises(
        DataError, match=r"here and there: no text column .* review; .* --text"
    ):
        Source(tables).column(TEXT, " text ")


@pytest.mark.parametrize("pair", PAIRS)
def test_columns_of_texts_pairs_and_labels_are_found_or_chosen(pair, tmp_path):
    first, second = pair.split(",")
    columns = {second: [text[::-1] for text in TEXTS], first: TEXTS, "mood": MOODS}
    path = write(tmp_path / "pairs.csv", **columns, label=[*range(40)])
    for options in ({}, {"text_column": f"{first}, {second}"}):
        data = load_texts(chosen(path, label_column=" mood", **options))
        assert data.train.second == tuple(text[::-1] for text in data.train.inputs)
        assert {*data.train.inputs, *data.test.inputs} == {*TEXTS}
        assert [*data.train.columns] == ["label"]
        assert "one in 5 of each class" in data.remarks  # of the chosen labels
    one = load_texts(chosen(path, label_column="mood", text_column=second))
    assert (one.train.second, [*one.train.columns]) == ((), [first, "label"])


def test_rows_of_splits_are_counted_in_their_file(tmp_path):
    for split, label in (("train", ["a", "b", "c"]), ("test", ["a", "b", None])):
        write(tmp_path / "mine" / f"{split}.csv", text=["t"] * 3, label=label)
    with pytest.raises(
        DataError, match=r"mine/test.csv: label column 'label' .* row\(s\) 3,"
    ):
        load_texts(chosen("mine", tmp_path, test_limit=1))
    write(tmp_path / "mine" / "test.csv", text=[], label=[])
    with pytest.raises(DataError, match=r"mine/test.csv has no rows"):
        load_texts(chosen("mine", tmp_path))


def test_labels_that_are_optional_are_read_and_not_spoken_of(tmp_path):
    path = write(tmp_path / "mine.csv", text=TEXTS, label=MOODS)
    data = load_texts(chosen(path, task="mlm"))
    assert (data.label_names, "Labels" in data.remarks) == (("glad", "sad"), False)
    path = write(tmp_path / "alone.csv", text=["NA", "null", *TEXTS])
    assert load_texts(chosen(path, task="mlm")).label_names == ("all",)


TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
WORDS = [["Anna", "Smith", "is"], ["in", "Rome"], []]
MARKS = [["B-PER", "I-PER", "O"], [" O", "B-LOC "], []]
SPLIT = ["train", "train", "test"]


def test_tags_become_numbers_and_rows_are_labelled_by_what_occurs(
    tmp_path,
):
    words, tags = (
        pa.array(rows, pa.large_list(pa.string())) for rows in (WORDS, MARKS)
    )
    columns = {"split": SPLIT, "site": ["x", "y", "z"]}
    write(tmp_path / "ner" / "mine.parquet", tokens=words, ner_tags=tags, **columns)
    other = write(tmp_path / "other.parquet", parts=words, marks=tags, **columns)
    for data in (
        load_tags(chosen("mine", tmp_path)),
        load_tags(chosen(other, text_column="parts", label_column="marks")),
    ):
        assert (data.tags, data.label_names) == (TAGS, ("LOC", "PER"))
        assert (data.kind, data.metrics) == ("multi", ("f1", "precision", "recall"))
        assert [*data.train.inputs, *data.test.inputs] == [*map(tuple, WORDS)]
        assert [*map(list, data.train.second)] == [[3, 4, 0], [0, 1]]
        assert data.train.labels.tolist() == [[0, 1], [1, 0]]
        assert data.test.labels.tolist() == [[0, 0]]
        assert data.train.columns == {"site": ["x", "y"]}


def test_the_bundled_tokenizer_is_a_bert_tokenizer():
    tokenizer = bundled_tokenizer()
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    pair = tokenizer.encode("So HAPPY!", "thanks")
    assert pair.tokens == ["[CLS]", "so", "happy", "!", "[SEP]", "thanks", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 0, 0, 1, 1]
    assert bundled_tokenizer() is tokenizer


@pytest.mark.long
def test_the_bundled_tokenizer_can_be_rebuilt():
    table = pq.read_table(
        shared_data() / "emotion" / "goemotions.parquet", columns=["text", "split"]
    )
    rows = zip(table["text"].to_pylist(), table["split"].to_pylist(), strict=True)
    rebuilt = train_wordpiece(text for text, split in rows if split == "train")
    assert rebuilt.to_str() == bundled_tokenizer().to_str()


def test_texts_are_cut_and_padded_to_the_longest_of_a_batch_alone():
    tokenizer = copy.deepcopy(bundled_tokenizer())
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(3)
    split = Split(np.array([1, 0]), {"domain": [7, 8]}, ("so happy", "so " * 50), None)
    encoded = encode(split, tokenizer, 8, 9, False)
    first, both = np.arange(1), np.arange(2)
    assert encoded.lengths(both[::-1]).tolist() == [8, 4]
    assert (encoded.domains, len(encoded)) == (("7", "8"), 2)
    batch = encoded.batch(both)
    so, happy = map(tokenizer.token_to_id, ("so", "happy"))
    short = [2, so, happy, 3]
    assert batch["input_ids"].tolist() == [short + [9] * 4, [2, *[so] * 6, 3]]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 8]
    assert encoded.batch(first)["input_ids"].tolist() == [short]
    assert encoded.targets(both).tolist() == [1, 0]
    split = Split(np.zeros(1), {}, ("so " * 9,), ("happy",))
    pairs = encode(split, tokenizer, 8, 9, False)
    assert pairs.batch(first)["token_type_ids"].tolist() == [[0] * 6 + [1] * 2]
    # The tokenizers are as they were.
    assert len(tokenizer.encode("so").ids) == 32
    bundled = bundled_tokenizer()
    assert (bundled.truncation, bundled.padding) == (None, None)


def tagged(text: str, tags: str, tokenizer: Tokenizer, length: int = 32) -> Any:
    numbers = np.array([TAGS.index(tag) for tag in tags.split()], dtype=np.int64)
    split = Split(np.zeros((1, 2)), {}, [tuple(text.split())], [numbers])
    return encode(split, tokenizer, length, 0, True)


def test_only_the_first_piece_of_a_word_bears_its_tag():
    tokenizer = bundled_tokenizer()
    # A word of several pieces, one that the tokenizer cuts at its hyphen, and one
    # without a piece.
    encoded = tagged("zzyzx well-known \u200d Rome", "B-PER O I-PER B-LOC", tokenizer)
    pieces = [tokenizer.id_to_token(i) for i in encoded.ids[0]]
    assert (pieces[0], pieces[-1], len(pieces) > 7) == ("[CLS]", "[SEP]", True)
    at = [i for i, tag in enumerate(encoded.tags[0]) if tag != IGNORED]
    assert encoded.tags[0][at].tolist() == [3, 0, 1]
    assert (at[0], pieces[at[1]][0]) == (1, "w")
    assert not any(pieces[i].startswith("##") for i in at)
    # Words beyond the cut have none.
    encoded = tagged("a b c d e", "O O O B-LOC I-LOC", tokenizer, 5)
    assert encoded.targets(np.array([0])).tolist() == [[IGNORED, 0, 0, 0, IGNORED]]


def test_byte_level_words_are_encoded_with_a_space_before():
    vocabulary = {"\u0120a": 0, "a": 1, "b": 2, "\u0120b": 3, "\u0120": 4}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("\u0120", "a"), ("\u0120", "b")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tagged("a b", "O B-LOC", tokenizer).ids[0].tolist() == [0, 3]
    # The tokenizer stays as it is.
    assert tokenizer.encode("a").ids == [1]


@pytest.mark.parametrize("task", ["classification", "mlm", "ner"])
def test_an_experiment_is_read_and_encoded_for_its_model(task, tmp_path):
    path = write(
        tmp_path / "mine.parquet",
        text=["so"] * 20,
        tokens=[["so"]] * 20,
        ner_tags=[["B-X"], ["O"]] * 10,
        label=["a", "b"] * 10,
    )
    data, train, test = TASKS[task].read(chosen(path, task=task, architecture="bert"))
    assert (len(train), len(test), train.pad_id) == (16, 4, 0)
    assert bool(train.tags) == (task == "ner")
    assert np.array_equal(train.labels, data.train.labels)
    assert train.ids[0].tolist() == bundled_tokenizer().encode("so").ids


def corpus(path: Path, *labels: str) -> None:
    """Write 60 rows whose words tell their labels; every label occurs in both
    splits.
    """
    which = np.random.default_rng(len(path.stem)).permutation(
        np.arange(60) % len(labels)
    )
    texts = [f"{labels[w]} day {i} of {path.stem}" for i, w in enumerate(which)]
    columns = {
        label: [bool(w == place) for w in which] for place, label in enumerate(labels)
    }
    write(path, text=texts, **columns, split=["train"] * 45 + ["test"] * 15)


@pytest.fixture
def folder(tmp_path):
    corpus(tmp_path / "news.parquet", "sunny", "gloomy")
    corpus(tmp_path / "talk.parquet", "gloomy", "furious", "shy")
    return tmp_path


def load(names, folder, **fields):
    return load_domains(chosen(names, folder, **fields))


def test_labels_are_united_by_name_and_unknown_where_a_domain_has_none(folder):
    data = load(" news, talk ,", folder)
    assert data.name == "news,talk"
    assert data.label_names == ("sunny", "gloomy", "furious", "shy")
    assert (data.domains, len(data.train), len(data.test)) == (("news", "talk"), 90, 30)
    for split in (data.train, data.test):
        for row, domain in enumerate(split.columns["domain"]):
            known = {"news": [0, 1], "talk": [1, 2, 3]}[str(domain)]
            labels = split.labels[row]
            assert np.flatnonzero(~np.isnan(labels)).tolist() == known
            label, *_, name = split.inputs[row].split()
            assert (data.label_names[np.nanargmax(labels)], domain) == (label, name)
    assert data.metrics == ("macro_f1", "f1_news", "f1_talk")
    data = load("news", folder)
    assert (data.kind, data.domains) == ("single", ())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("news,talk,talk", "the same name among news, talk, talk"),
        ("news,sub/news.parquet", "two data sets have the same name"),
        *(
            (f"news,{wrong}", f"'{wrong}' has scores, pairs")
            for wrong in ("scores", "pairs", "n.csv")
        ),
    ],
)
def test_what_is_no_domain_is_named(names, message, folder):
    write(folder / "scores.parquet", text=["a"] * 10, label=[i / 3 for i in range(10)])
    pairs = {"sentence1": ["a"] * 10, "sentence2": ["b"] * 10}
    write(folder / "pairs.parquet", **pairs, label=["x", "y"] * 5)
    write(folder / "n.csv", text=["a"] * 10, label=[0, -1] * 5)
    corpus(folder / "sub" / "news.parquet", "sunny", "gloomy")
    with pytest.raises(DataError, match=message):
        load(names, folder)


def test_domains_may_have_any_number_of_labels_and_their_own_limits(
    tmp_path,
):
    glad = [True, True, False] * 4
    sad = [True, False, False] * 4
    columns = {"glad": glad, "sad": sad, "split": ["train"] * 8 + ["test"] * 4}
    write(tmp_path / "many.parquet", text=[*map(str, range(12))], **columns)
    lines = [f"line {row}" for row in range(20)]
    write(tmp_path / "files" / "other.csv", text=lines, label=["sad", "1"] * 10)
    names = ["many", "files/other.csv"]
    limits = {"train_limit": 6, "test_limit": 3}
    data = load(",".join(names), tmp_path, **limits)
    assert data.label_names == ("glad", "sad", "1")
    assert data.train.columns["domain"][::6] == names
    assert data.test.columns["domain"][::3] == names
    for text, labels in zip(data.train.inputs[:6], data.train.labels, strict=False):
        assert labels[:2].tolist() == [glad[int(text)], sad[int(text)]]
        assert np.isnan(labels[2])
    assert data.metrics[1:] == ("f1_many", "f1_other")
    # The file was divided, the table was not.
    divided = [f"{name} has no splits" in data.remarks for name in names]
    assert divided == [False, True]
