"""Texts, pairs and tagged words: their columns, their rows, and their tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fedrot.simulations.data import encode
from fedrot.simulations.data.encode import (
    IGNORED,
    bundled_tokenizer,
    encode_tags,
    encode_texts,
)
from fedrot.simulations.data.labels import Split, label_columns
from fedrot.simulations.data.read import DataError, Source
from fedrot.simulations.data.texts import TEXT, load_tags, load_texts
from tests.simulations.data.files import TEXTS, bounded, chosen, repeated, shared_data, write
from tests.simulations.data.wordpiece import SPECIAL_TOKENS, train_wordpiece

MOODS = repeated(["glad", "sad"])


@pytest.mark.parametrize(
    ("name", "kind", "metrics", "classes", "train", "test", "pairs"),
    [
        ("cola", "single", "matthews", 2, 8541, 1043, False),
        ("sst2", "single", "accuracy", 2, 66983, 872, False),
        ("mrpc", "single", "accuracy", 2, 3668, 408, True),
        ("rte", "single", "accuracy", 2, 2488, 277, True),
        ("stsb", "regression", "pearson", 1, 5709, 1500, True),
        ("qnli", "single", "accuracy", 2, 9998, 5463, True),
        ("qqp", "single", "accuracy", 2, 17447, 5000, True),
        ("mnli", "single", "accuracy", 3, 9999, 9815, True),
        ("dair_emotion", "single", "accuracy", 6, 15923, 2000, False),
        ("isear", "single", "accuracy", 7, 5975, 747, False),
        ("crowdflower", "single", "accuracy", 8, 31564, 3946, False),
        ("dailydialog", "single", "accuracy", 7, 81153, 7740, False),
        ("goemotions", "multi", "macro_f1", 7, 43112, 5427, False),
        ("affectivetext", "multi", "macro_f1", 6, 250, 1000, False),
        ("ssec", "multi", "macro_f1", 8, 2912, 1956, False),
        ("embedded/sst2", "single", "accuracy", 2, 4000, 872, False),
    ],
)
def test_every_shared_corpus_loads(
    name: str, kind: str, metrics: str, classes: int, train: int, test: int, pairs: bool
) -> None:
    data = load_texts(chosen(name, shared_data()))
    assert (data.kind, data.metrics[0], len(data.label_names)) == (kind, metrics, classes)
    assert (len(data.train), len(data.test)) == (train, test)
    assert (data.train.second is not None) == pairs
    assert data.train.labels.shape == ((train, classes) if kind == "multi" else (train,))
    assert data.train.labels.dtype == (np.int64 if kind == "single" else np.float32)
    assert all(len(values) == train for values in data.train.columns.values())
    if name == "stsb":
        assert set(data.train.columns["genre"]) == {"main-captions", "main-news", "main-forum"}


def test_columns_have_usual_names_in_the_order_of_preference() -> None:
    texts = ("text", "sentence", "content", "review", "comment", "tweet", "utterance")
    labels = ("label", "labels", "target", "class")
    for number, name in enumerate(texts):
        table = pa.table({other: ["a"] for other in reversed(texts[number:])})
        assert Source("it", {"here": table}).column(TEXT, None) == name
    for number, name in enumerate(labels):
        table = pa.table({other: ["a"] for other in reversed(labels[number:])})
        assert label_columns(Source("it", {"here": table}), chosen("it")) == (name,)
    # A column has to be in both tables.
    tables = {"here": pa.table({"text": ["a"], "review": ["b"]}), "there": pa.table({"review": ["c"]})}
    assert Source("it", tables).column(TEXT, None) == "review"
    with pytest.raises(
        DataError, match=r"here and there: no text column 'text'; columns are review; .* --text"
    ):
        Source("it", tables).column(TEXT, " text ")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_are_chosen(suffix: str, tmp_path: Path) -> None:
    columns = {
        "body": TEXTS,
        "other": [text[::-1] for text in TEXTS],
        "mood": MOODS,
        "label": [*range(40)],
    }
    path = write(tmp_path / f"mine{suffix}", **columns)
    data = load_texts(chosen(path, text_column="body", label_column=" mood"))
    assert (data.label_names, [*data.train.columns]) == (("glad", "sad"), ["other", "label"])
    # The chosen labels divide a file.
    assert "one in 5 of each class" in data.note
    pair = load_texts(chosen(path, text_column="other, body", label_column="mood"))
    assert pair.train.second == data.train.inputs
    assert [*pair.train.columns] == ["label"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sentence1", "sentence2"),
        ("question1", "question2"),
        ("premise", "hypothesis"),
        ("question", "sentence"),
    ],
)
def test_pairs_have_usual_names(first: str, second: str, tmp_path: Path) -> None:
    columns = {second: [text[::-1] for text in TEXTS], first: TEXTS, "label": MOODS}
    data = load_texts(chosen(write(tmp_path / "pairs.csv", **columns)))
    assert data.train.second == tuple(text[::-1] for text in data.train.inputs)
    assert ({*data.train.inputs, *data.test.inputs}, data.train.columns) == ({*TEXTS}, {})


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"text": TEXTS, "label": MOODS},
            {"text_column": "body"},
            "no text column 'body'; columns are text, label",
        ),
        ({"text": TEXTS, "label": MOODS}, {"label_column": "mood"}, "no label column 'mood'"),
        (
            {"text": TEXTS, "label": MOODS},
            {"text_column": "text,label,text"},
            "3 columns; give one or two",
        ),
        ({"body": TEXTS, "label": MOODS}, {}, "no text column 'text' or .* are body, label;"),
        (
            {"text": TEXTS, "mood": MOODS},
            {},
            "no label column 'label' or .* are text, mood; .* label_kind multi",
        ),
        (
            {"text": [*TEXTS[:-1], None], "label": MOODS},
            {},
            r"mine.parquet: text column 'text' has no value.*row\(s\) 40,",
        ),
        ({"text": ["", *TEXTS[1:]], "label": MOODS}, {}, r"no value in 1 of 40 rows: row\(s\) 1,"),
        ({"text": [0.5, float("nan")], "label": ["a", "b"]}, {}, r"row\(s\) 2,"),
        (
            {"text": [[text] for text in TEXTS], "label": MOODS},
            {},
            "holds list.*; give one text per row",
        ),
        ({"text": [{"a": text} for text in TEXTS], "label": MOODS}, {}, "give one text per row"),
        ({"text": [b"text"] * 40, "label": MOODS}, {}, "give one text per row"),
    ],
)
def test_wrong_columns_are_named(columns: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_texts(chosen(write(tmp_path / "mine.parquet", **columns), **options))


def test_rows_of_splits_are_counted_in_their_file(tmp_path: Path) -> None:
    for split, label in (("train", ["a", "b", "c"]), ("test", ["a", "b", None])):
        write(tmp_path / "mine" / f"{split}.csv", text=["t"] * 3, label=label)
    with pytest.raises(DataError, match=r"mine/test.csv: label column 'label' .* row\(s\) 3,"):
        load_texts(chosen("mine", tmp_path, test_limit=1))
    write(tmp_path / "mine" / "test.csv", text=[], label=[])
    with pytest.raises(DataError, match=r"mine/test.csv has no rows"):
        load_texts(chosen("mine", tmp_path))


def test_metrics_of_known_tasks_are_for_classes(tmp_path: Path) -> None:
    for task, metrics in (("cola", "matthews"), ("mrpc", "f1"), ("qqp", "f1"), ("other", "")):
        path = write(tmp_path / f"{task}.csv", text=TEXTS, label=repeated([0, 1]))
        found = load_texts(chosen(path)).metrics
        assert [name for name in found if name not in ("accuracy", "macro_f1")] == [
            *filter(None, [metrics])
        ]
        assert load_texts(chosen(path, label_kind="regression")).metrics == ("pearson", "spearman")


def test_labels_that_are_optional_are_read_and_not_spoken_of(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", text=TEXTS, label=MOODS)
    data = load_texts(chosen(path, task="mlm"))
    assert (data.label_names, data.said) == (("glad", "sad"), "")
    assert load_texts(chosen(path)).said == "Labels: 2 classes in the column 'label': glad, sad."
    path = write(tmp_path / "alone.csv", text=["NA", "null", *TEXTS])
    assert load_texts(chosen(path, task="mlm")).label_names == ("all",)


TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
WORDS, MARKS = (
    [["Anna", "Smith", "is"], ["in", "Rome"], []],
    [["B-PER", "I-PER", "O"], ["O", "B-LOC"], []],
)
SPLIT = ["train", "train", "test"]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_tags_become_numbers_and_rows_are_labelled_by_what_occurs(kind: Any, tmp_path: Path) -> None:
    words, tags = pa.array(WORDS, kind(pa.string())), pa.array(MARKS, kind(pa.string()))
    write(
        tmp_path / "ner" / "mine.parquet", tokens=words, ner_tags=tags, split=SPLIT, site=["x", "y", "z"]
    )
    data = load_tags(chosen("mine", tmp_path))
    assert (data.tags, data.label_names, data.kind) == (TAGS, ("LOC", "PER"), "multi")
    assert data.metrics == ("f1", "precision", "recall")
    assert (data.train.inputs, data.test.inputs) == ([tuple(row) for row in WORDS[:2]], [()])
    assert [tags.tolist() for tags in data.train.second] == [[3, 4, 0], [0, 1]]
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([[0, 1], [1, 0]], [[0, 0]])
    assert (data.train.columns, data.note) == ({"site": ["x", "y"]}, "")
    renamed = pq.read_table(tmp_path / "ner" / "mine.parquet").rename_columns(
        ["parts", "marks", "split", "site"]
    )
    pq.write_table(renamed, tmp_path / "ner" / "mine.parquet")
    again = load_tags(chosen("mine", tmp_path, text_column="parts", label_column="marks"))
    assert again.train.inputs == data.train.inputs


def test_tags_are_trimmed_and_composed_and_rows_divided(tmp_path: Path) -> None:
    marks = [[" B-caf\u00e9"], ["B-cafe\u0301 "]] * 10
    path = write(tmp_path / "mine.jsonl", words=[[str(row)] for row in range(20)], tags=marks)
    data = load_tags(chosen(path, train_limit=5, test_limit=3))
    assert (data.label_names, len(data.train), len(data.test)) == (("caf\u00e9",), 5, 3)
    assert "of 20 rows 4 are held out" in data.note


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"tokens": None}, {}, "no word column 'tokens' or 'words'; columns are ner_tags, split"),
        ({"ner_tags": None}, {}, "no tag column 'ner_tags' or 'tags'"),
        ({}, {"label_column": "fine"}, "no tag column 'fine'.*with --label-column"),
        ({"tokens": ["Anna", "is", "a"]}, {}, "column 'tokens' holds string; give a list for each row"),
        ({"tokens": [None, ["is"], []]}, {}, r"column 'tokens' has no value in 1 .*row\(s\) 1,"),
        ({"ner_tags": [["O", "O", None], ["O", "O"], []]}, {}, r"'ner_tags' has no value .*row\(s\) 1,"),
        (
            {"ner_tags": [["B-X", "O", "O"], ["O"], []]},
            {},
            "parquet, row 2: 2 words in 'tokens' and 1 tags",
        ),
        (
            {"ner_tags": [["O", "O", "O"], ["O", "O"], ["O"]]},
            {},
            "parquet, row 3: 0 words in 'tokens' and 1",
        ),
        ({"ner_tags": [[3, 0, 0], [0, 0], []]}, {}, "row 1: tag '3' in column 'ner_tags' is not BIO"),
        ({"ner_tags": [["O"] * 3, ["O"] * 2, []]}, {}, "every tag is 'O'"),
        *(
            ({"ner_tags": [["B-X", "O", "O"], ["O", tag], []]}, {}, f"row 2: tag '{tag}'")
            for tag in ("U-PER", "B-", "I", "BPER", "o", "")
        ),
    ],
)
def test_what_is_no_tagged_text_is_refused(
    columns: Any, options: Any, message: str, tmp_path: Path
) -> None:
    table = {"tokens": WORDS, "ner_tags": MARKS, "split": SPLIT, **columns}
    path = write(tmp_path / "mine.parquet", **{key: values for key, values in table.items() if values})
    with pytest.raises(DataError, match=message):
        load_tags(chosen(path, **options))


def test_the_shared_corpora_of_tags_load() -> None:
    data = load_tags(chosen("ewt", shared_data()))
    assert (len(data.train), len(data.test)) == (12543, 2077)
    assert data.tags == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER")
    assert set(data.train.columns["domain"]) == {"answers", "email", "newsgroup", "reviews", "weblog"}
    assert (
        "corporation"
        in load_tags(chosen("wnut17", shared_data(), label_column="original_tags")).label_names
    )


def test_the_bundled_tokenizer_is_a_bert_tokenizer() -> None:
    tokenizer = bundled_tokenizer()
    assert tokenizer.get_vocab_size() == 6000
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    pair = tokenizer.encode("So HAPPY!", "thanks")
    assert pair.tokens == ["[CLS]", "so", "happy", "!", "[SEP]", "thanks", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 0, 0, 1, 1]
    texts = load_texts(chosen("goemotions_ekman")).test.inputs
    ids = [i for encoding in tokenizer.encode_batch(list(texts)) for i in encoding.ids]
    assert ids.count(1) / len(ids) < 0.001
    assert bundled_tokenizer() is tokenizer


def test_the_shipped_tokenizer_can_be_rebuilt() -> None:
    table = pq.read_table(shared_data() / "emotion" / "goemotions.parquet", columns=["text", "split"])
    rows = zip(table["text"].to_pylist(), table["split"].to_pylist(), strict=True)
    rebuilt = train_wordpiece(text for text, split in rows if split == "train")
    assert rebuilt.to_str() == bundled_tokenizer().to_str()
    with pytest.raises(ValueError, match="choose a larger vocabulary"):
        train_wordpiece(TEXTS, 10)


def test_texts_are_cut_and_padded_to_the_longest_of_a_batch_alone() -> None:
    tokenizer = copy.deepcopy(bundled_tokenizer())
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(3)
    split = Split(np.array([1, 0]), {"domain": [7, 8]}, ("so happy", "so " * 50), None)
    encoded = encode_texts(split, tokenizer, 8, pad_id=9)
    assert encoded.lengths(np.array([1, 0, 1])).tolist() == [8, 4, 8]
    assert (encoded.domains, len(encoded)) == (("7", "8"), 2)
    batch = encoded.batch(np.array([0, 1]))
    so, happy = map(tokenizer.token_to_id, ("so", "happy"))
    assert batch["input_ids"].tolist() == [[2, so, happy, 3, 9, 9, 9, 9], [2, *[so] * 6, 3]]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 8]
    assert encoded.batch(np.array([0]))["input_ids"].shape == (1, 4)
    assert encoded.targets(np.array([1, 0])).tolist() == [0, 1]
    pairs = encode_texts(Split(np.zeros(1), {}, ("so " * 9,), ("happy",)), tokenizer, 8, 9)
    assert pairs.batch(np.array([0]))["token_type_ids"].tolist() == [[0] * 6 + [1] * 2]
    # The tokenizers are as they were.
    assert len(tokenizer.encode("so").ids) == 32
    assert (bundled_tokenizer().truncation, bundled_tokenizer().padding) == (None, None)


@pytest.mark.parametrize("pairs", [False, True])
def test_long_texts_are_cut_before_they_are_tokenised(pairs: bool) -> None:
    texts = ("word " * (5 << 20),)
    with bounded():
        encoded = encode_texts(
            Split(np.zeros(1), {}, texts, texts if pairs else None), bundled_tokenizer(), 9, 0
        )
    assert len(encoded.ids[0]) == 9
    texts = tuple(word * 1000 for word in ("some words ", "averylongword", " " * 9 + "x"))
    found = encode_texts(Split(np.zeros(3), {}, texts, None), bundled_tokenizer(), 5, 0).ids
    whole = [bundled_tokenizer().encode(text).ids for text in texts]
    assert [[*ids[:-1]] for ids in found] == [ids[: min(5, len(ids)) - 1] for ids in whole]


def tagged(text: str, tags: str) -> Split:
    numbers = np.array([TAGS.index(tag) for tag in tags.split()], dtype=np.int64)
    return Split(np.zeros((1, 2)), {}, [tuple(text.split())], [numbers])


def test_only_the_first_piece_of_a_word_bears_its_tag() -> None:
    tokenizer = bundled_tokenizer()
    # A word of several pieces, one that the tokenizer cuts at its hyphen, and one without a piece.
    encoded = encode_tags(
        tagged("zzyzx well-known \u200d Rome", "B-PER O I-PER B-LOC"), tokenizer, 32, 0
    )
    pieces = [tokenizer.id_to_token(i) for i in encoded.ids[0]]
    assert (pieces[0], pieces[-1], len(pieces) > 7) == ("[CLS]", "[SEP]", True)
    at = [i for i, tag in enumerate(encoded.tags[0]) if tag != IGNORED]
    assert encoded.tags[0][at].tolist() == [3, 0, 1]
    assert encoded.places[0].tolist() == [0, 1, 3]
    assert (at[0], pieces[at[1]][0]) == (1, "w")
    assert not any(pieces[i].startswith("##") for i in at)


def test_words_beyond_the_cut_have_no_place() -> None:
    encoded = encode_tags(tagged("a b c d e", "O O O B-LOC I-LOC"), bundled_tokenizer(), 5, 0)
    assert (encoded.places[0].tolist(), encoded.words[0].tolist()) == ([0, 1, 2], [0, 0, 0, 1, 2])
    assert encoded.tags[0].tolist() == [IGNORED, 0, 0, 0, IGNORED]
    assert encoded.targets(np.array([0])).tolist() == [encoded.tags[0].tolist()]


def test_byte_level_words_are_encoded_with_a_space_before() -> None:
    vocabulary = {"\u0120a": 0, "a": 1, "b": 2, "\u0120b": 3, "\u0120": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u0120", "a"), ("\u0120", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoded = encode_tags(tagged("a b", "O B-LOC"), tokenizer, 8, 0)
    assert encoded.ids[0].tolist() == [0, 3]
    assert tokenizer.encode("a").ids == [1], "the tokenizer that was given stays as it is"


@pytest.mark.parametrize(
    ("task", "reader"), [("classification", "TextData"), ("mlm", "TextData"), ("ner", "TagData")]
)
def test_an_experiment_is_read_and_encoded_for_its_model(
    task: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "settings_of", lambda experiment, data: SimpleNamespace(pad_token_id=7))
    tags = [[["B-X"], ["O"]][row % 2] for row in range(20)]
    columns = {"tokens": [["so"]] * 20, "ner_tags": tags} if task == "ner" else {"text": ["so"] * 20}
    columns |= {"label": ["a", "b"] * 10} if task == "classification" else {}
    path = write(tmp_path / "mine.parquet", **columns)
    data, train, test = encode.read_encoded(chosen(path, task=task))
    assert (len(train), len(test), train.pad_id) == (16, 4, 7)
    assert np.array_equal(train.labels, data.train.labels)
    assert [ids.tolist() for ids in train.ids[:1]] == [bundled_tokenizer().encode("so").ids]
