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

from fedrot.simulations.data.encode import IGNORED, bundled_tokenizer, encode, read_encoded
from fedrot.simulations.data.labels import LABEL, Split
from fedrot.simulations.data.read import DataError, Source
from fedrot.simulations.data.texts import PAIRS, TEXT, load_tags, load_texts
from tests.simulations.data.files import TEXTS, chosen, repeated, shared_data, write
from tests.simulations.data.wordpiece import SPECIAL_TOKENS, train_wordpiece

MOODS = repeated(["glad", "sad"])
#: Name, kind, classes, training and held-out rows; "*": of pairs.
SHARED = """
cola single 2 8541 1043, sst2 single 2 66983 872, mrpc* single 2 3668 408, rte* single 2 2488 277,
stsb* regression 1 5709 1500, qnli* single 2 9998 5463, qqp* single 2 17447 5000,
mnli* single 3 9999 9815, dair_emotion single 6 15923 2000,
isear single 7 5975 747, crowdflower single 8 31564 3946,
dailydialog single 7 81153 7740, goemotions multi 7 43112 5427, affectivetext multi 6 250 1000,
ssec multi 8 2912 1956
"""


@pytest.mark.parametrize("row", SHARED.split(","))
def test_every_shared_corpus_loads(row: str) -> None:
    name, kind, classes, train, test = row.split()
    data = load_texts(chosen(name.strip("*"), shared_data()))
    assert (data.kind, len(data.label_names)) == (kind, int(classes))
    assert (len(data.train), len(data.test)) == (int(train), int(test))
    assert (data.train.second is not None) == ("*" in name)
    assert data.train.labels.dtype == (np.int64 if kind == "single" else np.float32)
    assert all(len(values) == int(train) for values in data.train.columns.values())


def test_the_shared_corpora_of_tags_load() -> None:
    data = load_tags(chosen("ewt", shared_data()))
    assert (len(data.train), len(data.test)) == (12543, 2077)
    assert data.tags == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER")


def test_columns_have_usual_names_in_the_order_of_preference() -> None:
    for content in (TEXT, LABEL):
        for number, name in enumerate(content[1]):
            table = pa.table({other: ["a"] for other in reversed(content[1][number:])})
            assert Source({"here": table}).column(content, None) == name
    # A column has to be in both tables.
    tables = {"here": pa.table({"text": ["a"], "review": ["b"]}), "there": pa.table({"review": ["c"]})}
    assert Source(tables).column(TEXT, None) == "review"
    with pytest.raises(
        DataError, match=r"here and there: no text column 'text' among review; .* --text"
    ):
        Source(tables).column(TEXT, " text ")


@pytest.mark.parametrize("pair", PAIRS)
def test_columns_of_texts_pairs_and_labels_are_found_or_chosen(pair: str, tmp_path: Path) -> None:
    first, second = pair.split(",")
    columns = {
        second: [text[::-1] for text in TEXTS],
        first: TEXTS,
        "mood": MOODS,
        "label": [*range(40)],
    }
    path = write(tmp_path / "pairs.csv", **columns)
    for options in ({}, {"text_column": f"{first}, {second}"}):
        data = load_texts(chosen(path, label_column=" mood", **options))
        assert data.train.second == tuple(text[::-1] for text in data.train.inputs)
        assert ({*data.train.inputs, *data.test.inputs}, [*data.train.columns]) == ({*TEXTS}, ["label"])
        assert "one in 5 of each class" in data.said  # of the chosen labels
    one = load_texts(chosen(path, label_column="mood", text_column=second))
    assert (one.train.second, [*one.train.columns]) == (None, [first, "label"])


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {"text_column": "body"}, "no text column 'body' among text, label"),
        ({}, {"text_column": "text,"}, "no text column ''"),
        ({}, {"label_column": "mood"}, "no label column 'mood'"),
        ({}, {"text_column": "text,label,text"}, "3 columns; give one or two"),
        ({"text": [*TEXTS[:-1], None]}, {}, r"mine.parquet: text column 'text' has no .*row\(s\) 40,"),
        ({"text": ["", *TEXTS[1:]]}, {}, r"no value in 1 of 40 rows: row\(s\) 1,"),
        ({"text": [0.5, float("nan")] * 20}, {}, r"row\(s\) 2, 4"),
        ({"text": [[text] for text in TEXTS]}, {}, "holds list.*, no texts"),
        ({"text": [{"a": text} for text in TEXTS]}, {}, "no texts"),
        ({"text": [b"text"] * 40}, {}, "no texts"),
    ],
)
def test_wrong_columns_are_named(columns: Any, options: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.parquet", **{"text": TEXTS, "label": MOODS, **columns})
    with pytest.raises(DataError, match=message):
        load_texts(chosen(path, **options))


def test_rows_of_splits_are_counted_in_their_file(tmp_path: Path) -> None:
    for split, label in (("train", ["a", "b", "c"]), ("test", ["a", "b", None])):
        write(tmp_path / "mine" / f"{split}.csv", text=["t"] * 3, label=label)
    with pytest.raises(DataError, match=r"mine/test.csv: label column 'label' .* row\(s\) 3,"):
        load_texts(chosen("mine", tmp_path, test_limit=1))
    write(tmp_path / "mine" / "test.csv", text=[], label=[])
    with pytest.raises(DataError, match=r"mine/test.csv has no rows"):
        load_texts(chosen("mine", tmp_path))


def test_labels_that_are_optional_are_read_and_not_spoken_of(tmp_path: Path) -> None:
    data = load_texts(chosen(write(tmp_path / "mine.csv", text=TEXTS, label=MOODS), task="mlm"))
    assert (data.label_names, "Labels" in data.said) == (("glad", "sad"), False)
    path = write(tmp_path / "alone.csv", text=["NA", "null", *TEXTS])
    assert load_texts(chosen(path, task="mlm")).label_names == ("all",)


TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
WORDS = [["Anna", "Smith", "is"], ["in", "Rome"], []]
MARKS = [["B-PER", "I-PER", "O"], [" O", "B-LOC "], []]
SPLIT = ["train", "train", "test"]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_tags_become_numbers_and_rows_are_labelled_by_what_occurs(kind: Any, tmp_path: Path) -> None:
    words, tags = pa.array(WORDS, kind(pa.string())), pa.array(MARKS, kind(pa.string()))
    columns = {"split": SPLIT, "site": ["x", "y", "z"]}
    write(tmp_path / "ner" / "mine.parquet", tokens=words, ner_tags=tags, **columns)
    other = write(tmp_path / "other.parquet", parts=words, marks=tags, **columns)
    for data in (
        load_tags(chosen("mine", tmp_path)),
        load_tags(chosen(other, text_column="parts", label_column="marks")),
    ):
        assert (data.tags, data.label_names, data.kind) == (TAGS, ("LOC", "PER"), "multi")
        assert data.metrics == ("f1", "precision", "recall")
        assert (data.train.inputs, data.test.inputs) == ([tuple(row) for row in WORDS[:2]], [()])
        assert [tags.tolist() for tags in data.train.second] == [[3, 4, 0], [0, 1]]
        assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([[0, 1], [1, 0]], [[0, 0]])
        assert data.train.columns == {"site": ["x", "y"]}


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"tokens": None}, {}, "no word list column 'tokens' or 'words' among ner_tags, split"),
        ({}, {"label_column": "fine"}, "no tag list column 'fine'.* --label-column"),
        ({"tokens": ["Anna", "is", "a"]}, {}, "column 'tokens' holds string, no word lists"),
        ({"tokens": [None, ["is"], []]}, {}, r"column 'tokens' has no value in 1 .*row\(s\) 1,"),
        ({"ner_tags": [["O", "O", None], ["O", "O"], []]}, {}, r"'ner_tags' has no value .*row\(s\) 1,"),
        (
            {"ner_tags": [["B-X", "O", "O"], ["O"], []]},
            {},
            "row 2 has 2 words in 'tokens', and in .* O;",
        ),
        ({"ner_tags": [["O"] * 3, ["O"] * 2, ["O"]]}, {}, "parquet, row 3 has 0 words"),
        ({"ner_tags": [[3, 0, 0], [0, 0], []]}, {}, "row 1 has .*'ner_tags' 3, 0, 0; each word needs"),
        ({"ner_tags": [["O"] * 3, ["O"] * 2, []]}, {}, "every tag is 'O'"),
        *(
            ({"ner_tags": [["B-X", "O", "O"], ["O", tag], []]}, {}, f"row 2 has .* O, {tag};")
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


def test_the_bundled_tokenizer_is_a_bert_tokenizer_and_can_be_rebuilt() -> None:
    tokenizer = bundled_tokenizer()
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    pair = tokenizer.encode("So HAPPY!", "thanks")
    assert pair.tokens == ["[CLS]", "so", "happy", "!", "[SEP]", "thanks", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 0, 0, 1, 1]
    assert bundled_tokenizer() is tokenizer
    table = pq.read_table(shared_data() / "emotion" / "goemotions.parquet", columns=["text", "split"])
    rows = zip(table["text"].to_pylist(), table["split"].to_pylist(), strict=True)
    rebuilt = train_wordpiece(text for text, split in rows if split == "train")
    assert rebuilt.to_str() == tokenizer.to_str()


def test_texts_are_cut_and_padded_to_the_longest_of_a_batch_alone() -> None:
    tokenizer = copy.deepcopy(bundled_tokenizer())
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(3)
    split = Split(np.array([1, 0]), {"domain": [7, 8]}, ("so happy", "so " * 50), None)
    encoded = encode(split, tokenizer, 8, 9, False)
    assert encoded.lengths(np.array([1, 0, 1])).tolist() == [8, 4, 8]
    assert (encoded.domains, len(encoded)) == (("7", "8"), 2)
    batch = encoded.batch(np.array([0, 1]))
    so, happy = map(tokenizer.token_to_id, ("so", "happy"))
    assert batch["input_ids"].tolist() == [[2, so, happy, 3, 9, 9, 9, 9], [2, *[so] * 6, 3]]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 8]
    assert encoded.batch(np.array([0]))["input_ids"].shape == (1, 4)
    assert encoded.targets(np.array([1, 0])).tolist() == [0, 1]
    pairs = encode(Split(np.zeros(1), {}, ("so " * 9,), ("happy",)), tokenizer, 8, 9, False)
    assert pairs.batch(np.array([0]))["token_type_ids"].tolist() == [[0] * 6 + [1] * 2]
    # The tokenizers are as they were.
    assert len(tokenizer.encode("so").ids) == 32
    assert (bundled_tokenizer().truncation, bundled_tokenizer().padding) == (None, None)


def tagged(text: str, tags: str, tokenizer: Tokenizer, length: int = 32) -> Any:
    numbers = np.array([TAGS.index(tag) for tag in tags.split()], dtype=np.int64)
    split = Split(np.zeros((1, 2)), {}, [tuple(text.split())], [numbers])
    return encode(split, tokenizer, length, 0, True)


def test_only_the_first_piece_of_a_word_bears_its_tag() -> None:
    tokenizer = bundled_tokenizer()
    # A word of several pieces, one that the tokenizer cuts at its hyphen, and one without a piece.
    encoded = tagged("zzyzx well-known \u200d Rome", "B-PER O I-PER B-LOC", tokenizer)
    pieces = [tokenizer.id_to_token(i) for i in encoded.ids[0]]
    assert (pieces[0], pieces[-1], len(pieces) > 7) == ("[CLS]", "[SEP]", True)
    at = [i for i, tag in enumerate(encoded.tags[0]) if tag != IGNORED]
    assert encoded.tags[0][at].tolist() == [3, 0, 1]
    assert (at[0], pieces[at[1]][0]) == (1, "w")
    assert not any(pieces[i].startswith("##") for i in at)


def test_words_beyond_the_cut_have_no_tag() -> None:
    encoded = tagged("a b c d e", "O O O B-LOC I-LOC", bundled_tokenizer(), 5)
    assert encoded.targets(np.array([0])).tolist() == [[IGNORED, 0, 0, 0, IGNORED]]


def test_byte_level_words_are_encoded_with_a_space_before() -> None:
    vocabulary = {"\u0120a": 0, "a": 1, "b": 2, "\u0120b": 3, "\u0120": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u0120", "a"), ("\u0120", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tagged("a b", "O B-LOC", tokenizer).ids[0].tolist() == [0, 3]
    assert tokenizer.encode("a").ids == [1], "the tokenizer that was given stays as it is"


@pytest.mark.parametrize("task", ["classification", "mlm", "ner"])
def test_an_experiment_is_read_and_encoded_for_its_model(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimpleNamespace(pad_token_id=7)
    monkeypatch.setattr("fedrot.simulations.data.encode.settings_of", lambda *_: settings)
    columns = {"text": ["so"] * 20, "tokens": [["so"]] * 20, "ner_tags": [["B-X"], ["O"]] * 10}
    path = write(tmp_path / "mine.parquet", **columns, label=["a", "b"] * 10)
    data, train, test = read_encoded(chosen(path, task=task))
    assert (len(train), len(test), train.pad_id, bool(train.tags)) == (16, 4, 7, task == "ner")
    assert np.array_equal(train.labels, data.train.labels)
    assert train.ids[0].tolist() == bundled_tokenizer().encode("so").ids
