"""Labels of files: missing ones, classes, scores, and what the user is told and can set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedrot.simulations.data.labels import label_columns, labels_of
from fedrot.simulations.data.partition import histogram, key_names, partition_keys
from fedrot.simulations.data.sources import DataError, Source
from fedrot.simulations.data.texts import TextData, load_tag_data, load_text_data
from tests.simulations.commands import invoke, options_of

ROWS = 40
TEXTS = [f"story number {row}" for row in range(ROWS)]


def save(path: Path, labels: list[Any], **columns: list[Any]) -> str:
    """Write the labels, repeated, beside ``TEXTS``; None is an empty cell."""
    repeated = [labels[row % len(labels)] for row in range(ROWS)]
    names, *rows = zip(*{"text": TEXTS, "label": repeated, **columns}.items(), strict=True)
    rows = list(zip(*rows[0], strict=True))
    if path.suffix == ".parquet":
        pq.write_table(pa.table(dict(zip(names, zip(*rows, strict=True), strict=True))), path)
    elif path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        lines = [mark.join("" if value is None else str(value) for value in row) for row in rows]
        path.write_text("\n".join([mark.join(names), *lines]) + "\n")
    else:
        objects = [dict(zip(names, row, strict=True)) for row in rows]
        as_lines = "\n".join(map(json.dumps, objects))
        path.write_text(as_lines if path.suffix == ".jsonl" else json.dumps(objects))
    return str(path)


def divided(train: pa.Table, test: pa.Table, task: str = "it", **names: tuple[str, ...]) -> Source:
    return Source(task, {"train": train, "test": test}, names)


def classes(data: TextData) -> dict[str, str]:
    """Return the name of each text's class."""
    return {
        text: data.label_names[label]
        for split in (data.train, data.test)
        for text, label in zip(split.texts, split.labels, strict=True)
    }


#: Labels, options, and what they are: names of classes, kind, or a word of the error.
CASES: dict[str, tuple[list[Any], dict[str, Any], Any]] = {
    "texts": ([" a", "b ", "a"], {}, ("a", "b")),
    "words for booleans": (["True", "False"], {}, ("False", "True")),
    "words for nothing": (["none", "some"], {}, ("none", "some")),
    "numbers and texts": (["1", "x"], {}, ("1", "x")),
    "numbers": ([3, 5, 12], {}, ("3", "5", "12")),
    "large numbers": ([7, 2**62], {}, ("7", str(2**62))),
    "whole scores": ([1.0, 0.0], {}, "regression"),
    "whole scores as classes": ([1.0, 0.0], {"label_kind": "single"}, ("0", "1")),
    "numbers as scores": ([1, 5, 3], {"label_kind": "regression"}, "regression"),
    "scores as classes": ([0.5, 1.5], {"label_kind": "single"}, "not whole"),
    "words as scores": (["yes", "no"], {"label_kind": "regression"}, "no numbers"),
    "one column as several": (["yes", "no"], {"label_kind": "multi"}, "one label for a row"),
    "negative": ([-1, 1], {}, r"20 negative.* row\(s\) 1, 3,"),
    "negative, dropped": ([-1, 0, 1], {"missing": "drop"}, ("0", "1")),
    "negative, kept": ([-1, 1], {"missing": "keep"}, ("-1", "1")),
    "negative with a point": ([-1.0, 1.0], {"label_kind": "single"}, r"\(-1.0\) in row\(s\) 1, 3,"),
    "negative with a point, dropped": (
        [-1.0, 0.0, 1.0],
        {"label_kind": "single", "missing": "drop"},
        ("0", "1"),
    ),
    "negative with a point, kept": (
        [-1.0, 1.0],
        {"label_kind": "single", "missing": "keep"},
        ("-1", "1"),
    ),
    "negative scores": ([-1.5, 1.0], {}, "regression"),
    "negative numbers as scores": ([-1, 1], {"label_kind": "regression"}, "regression"),
    **{
        f"missing {label!r}{', dropped' if options else ''}": (["glad", "sad", label], options, found)
        for label in (None, "", " ", "NA", "N/A", "nan", "NaN", "null", "NULL", "None", "<NA>")
        for options, found in (
            ({}, r"13 missing.* row\(s\) 3, 6,"),
            ({"missing": "drop"}, ("glad", "sad")),
        )
    },
    "NA, kept": (["NA", "left"], {"missing": "keep"}, ("NA", "left")),
    "nothing, kept": ([1.5, None, 0.5], {"missing": "keep"}, "missing values"),
    **{
        f"{name} among scores{', dropped' if options else ''}": ([0.5, value, 2.5], options, found)
        for name, value in (("nothing", None), ("NaN", float("nan")), ("infinity", float("inf")))
        for options, found in (
            ({}, r"missing values.* row\(s\) 2, 5,"),
            ({"missing": "drop"}, "regression"),
        )
    },
    "nothing among numbers": ([1, 0, None], {}, r"missing values.* row\(s\) 3, 6,"),
}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("name", CASES)
def test_labels(name: str, suffix: str, tmp_path: Path) -> None:
    labels, options, expected = CASES[name]
    path = save(tmp_path / f"mine{suffix}", labels)
    if isinstance(expected, str) and expected != "regression":
        with pytest.raises(DataError, match=expected):
            load_text_data(path, **options)
        return
    data = load_text_data(path, **options)
    if expected == "regression":
        assert (data.kind, data.train.labels.dtype) == ("regression", np.float32)
        given = {text: labels[row % len(labels)] for row, text in enumerate(TEXTS)}
        read = {t: v for s in (data.train, data.test) for t, v in zip(s.texts, s.labels, strict=True)}
        assert read == {text: v for text, v in given.items() if v is not None and np.isfinite(v)}
        return
    assert (data.kind, data.label_names) == ("single", expected)
    shown = [str(label).strip().removesuffix(".0") for label in labels]
    given = {text: shown[row % len(shown)] for row, text in enumerate(TEXTS)}
    assert classes(data) == {text: label for text, label in given.items() if label in expected}


def test_rows_are_divided_as_if_incomplete_ones_had_never_been_there(tmp_path: Path) -> None:
    path = save(tmp_path / "mine.csv", ["glad", "sad", "sad", None])
    kept = [line for line in Path(path).read_text().splitlines() if not line.endswith(",")]
    (tmp_path / "without.csv").write_text("\n".join(kept) + "\n")
    dropped, without = (
        load_text_data(path, missing="drop"),
        load_text_data(str(tmp_path / "without.csv")),
    )
    assert dropped.test.texts == without.test.texts
    assert f"10 of {ROWS} rows of {path} lack 'label'" in dropped.said


def test_rows_of_splits_are_counted_in_their_file(tmp_path: Path) -> None:
    for split, label in (("train", [0, 1, 0]), ("test", [0, 1, None])):
        (tmp_path / "mine").mkdir(exist_ok=True)
        pq.write_table(
            pa.table({"text": list("abc"), "label": label}), tmp_path / "mine" / f"{split}.parquet"
        )
    with pytest.raises(DataError, match=r"mine/test.parquet: label column 'label' .* in row\(s\) 3,"):
        load_text_data("mine", tmp_path, test_limit=1)
    assert len(load_text_data("mine", tmp_path, missing="drop").test) == 2


def test_missing_texts_and_values_of_split_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("text,label\n" + "a,x\n,y\nb,x\nc,y\n" * 5)
    with pytest.raises(DataError, match=r"text column 'text' has 5 missing values in row\(s\) 2, 6,"):
        load_text_data(str(tmp_path / "mine.csv"))
    assert len(load_text_data(str(tmp_path / "mine.csv"), missing="drop").train) == 12
    path = save(tmp_path / "split.csv", ["a", "b"], split=["train", " test", None, "test"] * 10)
    with pytest.raises(DataError, match="no value in row 3, counted from 1"):
        load_text_data(path)
    path = save(tmp_path / "split.csv", ["a", "b"], split=["train", " test", "train ", "test"] * 10)
    assert len(load_text_data(path).train) == 20


def test_words_and_tags_may_lack_a_part(tmp_path: Path) -> None:
    tags = [["O", None], ["O", "B-X"], ["B-X", "O"]] * 5
    path = tmp_path / "mine.parquet"
    table = pa.table({"tokens": [["a", "b"]] * 15, "ner_tags": tags})
    pq.write_table(table, path, row_group_size=2)  # read in several chunks
    with pytest.raises(DataError, match=r"'ner_tags' has missing values in row\(s\) 1, 4,"):
        load_tag_data(str(path))
    data = load_tag_data(str(path), missing="drop")
    assert len(data.train) + len(data.test) == 10
    assert "5 of 15 rows" in data.said


def test_a_limit_changes_no_classes(tmp_path: Path) -> None:
    path = save(tmp_path / "mine.csv", [3, 5, 9, 12])
    whole, part = load_text_data(path), load_text_data(path, train_limit=2, test_limit=1)
    assert part.label_names == whole.label_names == ("3", "5", "9", "12")
    assert classes(part).items() <= classes(whole).items()


def test_declared_classes_stay_though_they_do_not_occur() -> None:
    few = pa.table({"label": [0, 2]})
    named = divided(few, few, label=("a", "b", "c", "d"))
    found = labels_of(named, ("label",))
    assert (found.names, found.train.tolist()) == (("a", "b", "c", "d"), [0, 2])
    entailment = labels_of(divided(few, few, "mnli"), ("label",))
    assert (len(entailment.names), entailment.train.tolist()) == (3, [0, 2])
    # Names that do not fit are those of another data set.
    other = pa.table({"label": [0, 7], "label_name": ["x", "y"]})
    found = labels_of(divided(other, other, "mnli"), ("label",))
    assert (found.names, found.train.tolist()) == (("x", "y"), [0, 1])


def test_training_rows_name_the_classes_that_held_out_rows_name_otherwise() -> None:
    train = pa.table({"label": [0, 1], "label_name": ["cold", "warm"]})
    test = pa.table({"label": [0, 2], "label_name": ["kalt", "hot"]})
    found = labels_of(Source("it", {"train": train, "test": test}), ("label",))
    assert found.names == ("cold", "warm", "hot")


def test_metrics_of_a_known_task_are_for_classes_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "cola.csv", [0, 1])
    assert load_text_data(path).metrics == ("matthews", "accuracy", "macro_f1")
    assert load_text_data(path, label_kind="regression").metrics == ("pearson", "spearman")


def test_boolean_columns_are_of_the_kind_that_is_set() -> None:
    one = pa.table({"x": [True, False], "y": [False, True]})
    source = divided(one, one)
    assert labels_of(source, label_columns(source, None)).kind == "single"
    assert labels_of(source, ("x", "y"), "multi").train.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(DataError, match="no scores"):
        labels_of(source, ("x", "y"), "regression")
    several = divided(one, pa.table({"x": [True], "y": [True]}))
    with pytest.raises(DataError, match="needs one in each row"):
        labels_of(several, ("x", "y"), "single")


def test_labels_of_both_splits_have_one_type() -> None:
    numbers, texts = pa.table({"label": [0, 1]}), pa.table({"label": ["0", "1"]})
    with pytest.raises(DataError, match="holds int64 in training rows and string in held-out rows"):
        labels_of(divided(numbers, texts), ("label",))
    floats = pa.table({"label": [1.0, 0.0]})
    assert labels_of(divided(numbers, floats), ("label",)).test.tolist() == [1, 0]


def test_categories_and_decimals_are_read_as_what_they_hold() -> None:
    moods = pa.table({"label": pa.array(["b", "a"]).dictionary_encode()})
    assert labels_of(divided(moods, moods), ("label",)).names == ("a", "b")
    prices = pa.table({"label": pa.array([1, 2]).cast(pa.decimal128(21, 2))})
    assert labels_of(divided(prices, prices), ("label",)).kind == "regression"


BAD_FILES = {
    "semicolons": ("mine.csv", "text;label\na;1\n", "columns are separated by semicolons; .* by commas"),
    "commas beside semicolons": ("mine.csv", "text;label\na, b;1\n", "separated by semicolons"),
    "tabs": ("mine.csv", "text\tlabel\na\t1\n", "separated by tabs"),
    "commas": ("mine.tsv", "text,label\na,1\n", "separated by commas; separate them by tabs"),
    "UTF-16": ("mine.csv", "text,label\na,1\n".encode("utf-16"), "in UTF-16; save it in UTF-8"),
    "names but for spaces": ("mine.csv", "text,label,label \na,1,2\n", "two columns have equal names"),
    "numbers": ("mine.json", "[1, 2]", "items that are not objects"),
    "Latin-1": ("mine.csv", b"text,label\ncaf\xe9,a\n", "the column 'text' is not UTF-8"),
    "JSON in Latin-1": ("mine.jsonl", b'{"text": "caf\xe9", "label": 1}\n', "[Uu][Tt][Ff]-?8"),
    "text in Latin-1": ("mine.txt", b"caf\xe9\n", "mine.txt cannot be read .*not UTF-8"),
    "a long row": (
        "mine.csv",
        "a,b\n1,2,3\n",
        "as CSV .*Expected 2 columns, got 3.*; save it again, or",
    ),
    "no text": ("mine.csv", "body,label\na,1\n", "no text column 'text' or .* are body, label;"),
    "no label": ("mine.jsonl", '{"text": "a", "mood": 1}', "no label column 'label' .* are text, mood;"),
    "a missing label": ("mine.csv", "text,label\n" + "a,1\nb,\n" * 10, "missing values"),
    "half a row": ("mine.jsonl", "{half", "mine.jsonl cannot be read as JSON lines"),
    "no Parquet": ("mine.parquet", "text", "mine.parquet cannot be read as Parquet"),
    "a short row": ("mine.csv", "text,label\na,1\nb\n", "Expected 2 columns, got 1"),
    "two types": ("mine.jsonl", '{"text": "a"}\n{"text": 1}\n', "mine.jsonl cannot be .* to "),
    "empty": ("mine.csv", "", "Empty CSV file"),
    "header only": ("mine.csv", "text,label\n", "has 0 rows, too few"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_no_table_is_refused_with_the_cause(case: str, tmp_path: Path) -> None:
    name, content, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=f"(?s){message}"):
        load_text_data(str(tmp_path / name))


def test_spaces_around_names_of_columns_do_not_count(tmp_path: Path) -> None:
    rows = "".join(f"{text}, {'ab'[row % 2]}\n" for row, text in enumerate(TEXTS))
    for name, head in (("mine.CSV", " body , mood \n"), ("bom.csv", "\ufeffbody, mood\n")):
        (tmp_path / name).write_text(head + rows, "utf-8")
        data = load_text_data(str(tmp_path / name), text_column="body", label_column=" mood")
        assert data.label_names == ("a", "b")


SMALL = ("--clients", 2, *options_of({"layers": 1, "width": 32, "heads": 2, "seeds": 1}), "--dry-run")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["glad"], "every row is of one class, 'glad', so there is nothing to learn"),
        ([2.5], "every score is 2.5, so there is nothing to learn"),
    ],
)
def test_labels_that_are_all_one_are_refused(labels: list[Any], message: str, tmp_path: Path) -> None:
    path = save(tmp_path / "mine.csv", labels)
    code, output = invoke("simulate", "--data", path, "--out", tmp_path / "o", *SMALL)
    assert (code, message in output) == (2, True), output
    # Language models learn from the texts alone.
    code, output = invoke("simulate", "--data", path, "--task", "mlm", "--out", tmp_path / "o", *SMALL)
    assert code == 0, output


def test_classes_of_held_out_rows_are_those_of_training_rows(tmp_path: Path) -> None:
    split = ["train", "train", "test", "test"] * 10
    other = save(tmp_path / "other.csv", ["a", "b", "c", "d"], split=split)
    code, output = invoke("simulate", "--data", other, "--out", tmp_path / "o", *SMALL)
    assert (code, "classes a, b, and held-out rows only others (c, d)" in output) == (2, True), output
    partly = save(tmp_path / "partly.csv", ["a", "b", "a", "d"], split=split)
    code, output = invoke("simulate", "--data", partly, "--out", tmp_path / "o", *SMALL)
    assert code == 0, output
    assert "3 classes in the column 'label': a, b, d. Only held-out rows have d" in output


def test_commands_take_the_kind_of_labels_and_what_is_missing(tmp_path: Path) -> None:
    path = save(tmp_path / "mine.csv", ["1.0", "0.0", None])
    command = ("simulate", "--data", path, "--out", tmp_path / "o", *SMALL)
    code, output = invoke(*command)
    assert (code, "row(s) 3, 6," in output, "--missing drop" in output) == (2, True, True), output
    code, output = invoke(*command, "--missing", "drop", "--label-kind", "single")
    assert code == 0, output
    assert "Labels: 2 classes in the column 'label': 0, 1." in output
    assert "lack 'label': left out" in output
    for option in ("--missing", "--label-kind"):
        code, output = invoke(*command, option, "other")
        assert (code, f"Error in {option}" in output) == (2, True), output


def test_scores_of_a_wide_range_are_counted_in_intervals() -> None:
    scores = np.array([0, 1e12, 5e11, 2e20], dtype=np.float32)
    assert partition_keys(scores).tolist() == [0, 0, 0, 9]
    names = key_names(scores, ("score",))
    assert (len(names), names[0], names[-1]) == (10, "0 to 2e+19", "1.8e+20 to 2e+20")
    assert histogram(scores, [np.array([0, 1]), np.array([3])], 10).sum(axis=1).tolist() == [2, 1]
    below = np.array([-5000, -4000], dtype=np.float32)
    assert partition_keys(below).tolist() == [0, 2]
    far = np.linspace(5_000, 7_000, 50)
    assert partition_keys(far).min() == 0
    assert len(set(partition_keys(far))) == partition_keys(far).max() + 1 == 10


def test_rows_that_are_left_out_are_said_of_every_table_or_none_is_left(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    tables = {
        "train": {"text": ["a", None, "c"], "label": [0, 1, None]},
        "test": {"text": ["a", "b"], "label": [None, 1]},
    }
    for split, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / "mine" / f"{split}.parquet")
    data = load_text_data("mine", tmp_path, missing="drop")
    assert (data.train.texts, data.test.texts) == (("a",), ("b",))
    assert "2 of 3 rows of" in data.said
    assert "train.parquet lack 'text', 'label': left out." in data.said
    assert "1 of 2 rows of" in data.said
    assert "test.parquet lack 'label': left out." in data.said
    # Nothing can stand for a text or a label that is not there.
    with pytest.raises(DataError, match=r"text column 'text' has 1 missing values in row\(s\) 2,"):
        load_text_data("mine", tmp_path, missing="keep")
    pq.write_table(pa.table({"text": ["a", None], "label": [None, 1]}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none.parquet: no row is complete; choose other"):
        load_text_data("none", tmp_path, missing="drop")


def test_scores_are_said_with_their_range_and_are_numbers_of_32_bits() -> None:
    source = divided(pa.table({"label": [0.0, 2.0]}), pa.table({"label": [-1.0, 5.0]}))
    found, given = labels_of(source, ("label",)), labels_of(source, ("label",), "regression")
    assert found.said.startswith("Labels: scores from -1 to 5 (regression). All are whole")
    # Who asked for scores is not asked whether they are classes.
    assert given.said == "Labels: scores from -1 to 5 (regression)."
    parts = divided(pa.table({"label": [0.5]}), pa.table({"label": [1.0]}))
    assert labels_of(parts, ("label",)).said == "Labels: scores from 0.5 to 1 (regression)."
    large = divided(pa.table({"label": [0.0, 1e39]}), pa.table({"label": [1.0]}))
    with pytest.raises(DataError, match="'label' has scores beyond the range of float32"):
        labels_of(large, ("label",))


def test_names_of_a_task_are_for_numbers_of_its_classes() -> None:
    for values, names in (
        ([0, 2], ("entailment", "neutral", "contradiction")),
        ([0, 3], ("0", "3")),
        ([-1, 1], ("-1", "1")),
        ([False, True], ("False", "True")),
        (["0", "1"], ("0", "1")),
    ):
        table = pa.table({"label": values})
        assert labels_of(divided(table, table, "mnli"), ("label",)).names == names


def test_numbers_without_names_may_be_scores() -> None:
    numbers = pa.table({"label": [0, 1]})
    named = pa.table({"label": [0, 1], "label_name": ["x", "y"]})
    hint = "If these numbers are scores, give --label-kind regression."
    for source, told in (
        (divided(numbers, numbers), True),
        (divided(numbers, numbers, label=("x", "y")), False),
        (divided(named, named), False),
        # Names in one split alone are not used.
        (divided(named, numbers), True),
    ):
        found = labels_of(source, ("label",))
        assert (hint in found.said) == told
        assert (found.names == ("0", "1")) == told
    one = pa.table({"label": ["x", "x"], "label_name": ["other", "other"]})
    found = labels_of(divided(one, one), ("label",))
    assert (found.names, found.said) == (("x",), "Labels: 1 class in the column 'label': x.")


def test_how_boolean_columns_were_read_is_said() -> None:
    one = pa.table({"x": [True, False], "y": [False, True]})
    assert labels_of(divided(one, one), ("x", "y")).said == (
        "Labels: 2 classes in the columns x, y, exactly one in each row."
    )
    assert labels_of(divided(one, one), ("x", "y"), "multi").said == (
        "Labels: any number of 2 in each row, in the columns x, y."
    )


def test_more_values_than_classes_can_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedrot.simulations.data.labels.MOST_CLASSES", 3)
    train, test = pa.table({"label": [1, 2]}), pa.table({"label": [2, 3]})
    assert labels_of(divided(train, test), ("label",)).names == ("1", "2", "3")
    with pytest.raises(DataError, match="has 4 classes, above the maximum of 3"):
        labels_of(divided(train, pa.table({"label": [3, 4]})), ("label",))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary("int8", pa.string())])
def test_missing_labels_are_found_in_every_type_of_text(kind: pa.DataType, tmp_path: Path) -> None:
    labels = pa.array(["x", "NA", " ", "NA", "y", *"xy" * 5]).cast(kind)
    pq.write_table(pa.table({"text": ["a"] * 15, "label": labels}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"3 missing values .*row\(s\) 2, 3, 4,"):
        load_text_data("a", tmp_path)
    assert load_text_data("a", tmp_path, missing="drop").label_names == ("x", "y")
