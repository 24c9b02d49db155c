"""Labels of files: what they are, what is refused with its rows, and what the user is told."""

from __future__ import annotations

import unicodedata
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrot.simulations.data.labels import label_columns, labelled
from fedrot.simulations.data.read import DataError, Source
from fedrot.simulations.data.texts import load_texts
from tests.simulations.data.files import ROWS, TEXTS, chosen, classes, repeated, write

SINGLE, SCORES = {"label_kind": "single"}, {"label_kind": "regression"}
TEXT_FILES, TYPED_FILES = (".csv", ".tsv"), (".jsonl", ".json", ".parquet")
#: Labels, options, and what they are: names of classes, kind, or a word of the error.
Case = tuple[list[Any], dict[str, Any], Any]
EVERYWHERE: dict[str, Case] = {
    "texts": ([" a", "b ", "a"], {}, ("a", "b")),
    "words for booleans": (["True", "False"], {}, ("False", "True")),
    "words for nothing": (
        ["NA", "None", "null", "nan", "<NA>"],
        {},
        ("<NA>", "NA", "None", "nan", "null"),
    ),
    "leading zeros": (["00012", "12"], {}, ("00012", "12")),
    "versions": (["1.10", "1.1"], {}, ("1.1", "1.10")),
    "signs and underlines": (["+1", "1_0", "-0"], {}, ("+1", "-0", "1_0")),
    "long numbers in text": (["12345678901234567891", "2"], {}, ("2", "12345678901234567891")),
    "numbers": ([10, 9, -1, 100], {}, ("-1", "9", "10", "100")),
    "large numbers": ([7, 2**62], {}, ("7", str(2**62))),
    "composed and decomposed": (["caf\u00e9", "cafe\u0301"], {}, ("caf\u00e9",)),
    "spaces of any kind around": (["\u3000a\u00a0", "a"], {}, ("a",)),
    "numbers as scores": ([1, 5, 3], SCORES, "regression"),
    "numbers with a point as scores": ([-1.5, 1e3, 3], SCORES, "regression"),
    "words as scores": (["1", "2", "no"], SCORES, r"'no'.* in 13 of 40 rows: row\(s\) 3, 6,"),
    "underlines as scores": (["1", "1_0"], SCORES, r"'1_0'"),
    "scores beyond float32": (["1", "1e39"], SCORES, r"row\(s\) 2, 4,"),
    "one column as several": (
        ["yes", "no"],
        {"label_kind": "multi"},
        "of the kind single and not multi",
    ),
    "nothing": (["a", None, "b"], {}, r"no value in 13 of 40 rows: row\(s\) 2, 5,.* delete these rows"),
    "nothing among numbers": ([1, 0, None], {}, r"no value in 13 .*row\(s\) 3, 6,"),
    "spaces alone": (["a", " \t"], {}, r"row\(s\) 2, 4,"),
    "an unseen character alone": (["a", "\u200b"], {}, r"row\(s\) 2, 4,"),
}
TEXT_ONLY: dict[str, Case] = {
    "numbers and texts": ([1, "x"], {}, ("1", "x")),
    "whole scores": ([1.0, 0.0], {}, ("0.0", "1.0")),
    "not finite": ([0.5, "inf"], SCORES, "row"),
}
TYPED_ONLY: dict[str, Case] = {
    "scores": ([0.5, 1.5], {}, "regression"),
    "whole scores": ([1.0, 0.0], {}, "regression"),
    "whole scores as classes": ([10.0, 9.0, -1.0], SINGLE, ("-1", "9", "10")),
    "scores as classes": ([0.5, 1.0], SINGLE, r"or a whole number.* row\(s\) 1, 3,"),
    "booleans": ([True, False], {}, ("False", "True")),
    "not a number": ([0.5, float("nan")], {}, r"no value in 20 of 40 rows: row\(s\) 2, 4,"),
    "not finite": ([0.5, float("inf")], {}, r"row\(s\) 2, 4,"),
    "not finite as classes": ([1.0, float("inf")], SINGLE, r"row\(s\) 2, 4,"),
    "several in a row": ([["a"], ["b"]], {}, "give texts, integers or scores, or one boolean"),
}
CASES = [
    pytest.param(case, suffix, id=f"{name}{suffix}")
    for table, suffixes in (
        (EVERYWHERE, TEXT_FILES + TYPED_FILES),
        (TEXT_ONLY, TEXT_FILES),
        (TYPED_ONLY, TYPED_FILES),
    )
    for name, case in table.items()
    for suffix in suffixes
]


@pytest.mark.parametrize(("case", "suffix"), CASES)
def test_labels(case: Case, suffix: str, tmp_path: Path) -> None:
    labels, options, expected = case
    rows = repeated(labels)
    path = write(tmp_path / f"mine{suffix}", text=TEXTS, label=rows)
    if isinstance(expected, str) and expected != "regression":
        with pytest.raises(DataError, match=expected) as caught:
            load_texts(chosen(path, **options))
        assert str(path) in str(caught.value) or "row(s)" not in str(caught.value)
        return
    data = load_texts(chosen(path, **options))
    if expected == "regression":
        assert (data.kind, data.metrics, data.train.labels.dtype) == (
            "regression",
            ("pearson", "spearman"),
            np.float32,
        )
        read = {t: v for s in (data.train, data.test) for t, v in zip(s.inputs, s.labels, strict=True)}
        assert read == dict(zip(TEXTS, map(float, rows), strict=True))
        return
    assert (data.kind, data.label_names) == ("single", expected)
    whole = options and suffix in TYPED_FILES
    names = [unicodedata.normalize("NFC", str(int(v) if whole else v)).strip() for v in rows]
    assert classes(data) == dict(zip(TEXTS, names, strict=True))


#: Types of Parquet, and the classes or the kind.
TYPES = {
    "uint64": (pa.array([2**64 - 1, 2**64 - 2], pa.uint64()), (str(2**64 - 2), str(2**64 - 1))),
    "decimals": (pa.array([Decimal(10**20), Decimal(10**20 + 1)]), (str(10**20), str(10**20 + 1))),
    "prices": (pa.array([Decimal("1.50"), Decimal("2.00")]), "regression"),
    "bytes": (pa.array([b"neg", "süß".encode()]), ("neg", "süß")),
    "views of bytes": (pa.array([b"neg", b"pos"], pa.binary_view()), ("neg", "pos")),
    "bytes of one length": (pa.array([b"neg", b"pos"], pa.binary(3)), ("neg", "pos")),
    "categories": (pa.array(["b", "a"]).dictionary_encode(), ("a", "b")),
    "numbered categories": (pa.array([10, 9]).dictionary_encode(), ("9", "10")),
    "large texts": (pa.array(["b", "a"], pa.large_string()), ("a", "b")),
    "views": (pa.array(["b", "a"], pa.string_view()), ("a", "b")),
    "days": (pa.array([2, 1], pa.date32()), ("1970-01-02", "1970-01-03")),
    "half precision": (pa.array([0.5, 1.5], pa.float16()), "regression"),
    "bytes of no text": (pa.array([b"neg", b"\xff"]), r"no class .*UTF-8.* in 20 .*row\(s\) 2, 4,"),
    "nothing at all": (pa.nulls(2), "no value in 40 of 40 rows"),
}


@pytest.mark.parametrize("name", TYPES)
def test_types_of_parquet(name: str, tmp_path: Path) -> None:
    values, expected = TYPES[name]
    label = pa.concat_arrays([values] * (ROWS // 2))
    path = write(tmp_path / "mine.parquet", text=TEXTS, label=label)
    if isinstance(expected, str) and expected != "regression":
        with pytest.raises(DataError, match=expected):
            load_texts(chosen(path))
        return
    data = load_texts(chosen(path))
    assert (data.kind if expected == "regression" else data.label_names) == expected


def test_integers_of_json_beyond_64_bits_are_exact(tmp_path: Path) -> None:
    for suffix in (".json", ".jsonl"):
        path = write(
            tmp_path / f"mine{suffix}", text=TEXTS, label=repeated([10**20, 10**20 + 1, -(2**63)])
        )
        names = (str(-(2**63)), str(10**20), str(10**20 + 1))
        assert load_texts(chosen(path)).label_names == names
        assert load_texts(chosen(path, **SCORES)).kind == "regression"


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",))), min_size=1, max_size=8))
def test_classes_are_the_trimmed_composed_texts(values: list[str]) -> None:
    names = [unicodedata.normalize("NFC", value).strip() for value in values]
    table = pa.table({"label": values})
    try:
        found = read(table, table)
    except DataError:
        unseen = "\ufe00\ufe0f\u034f\u115f\u1160\u3164\uffa0"
        assert any(
            all(
                unicodedata.category(c)[0] in "CZ" or c in unseen or "\ufe00" <= c <= "\ufe0f"
                for c in name
            )
            for name in names
        )
        return
    assert [found.label_names[label] for label in found.train.labels] == names
    numbers = all(
        name.lstrip("-").isdecimal() and name.isascii() and str(int(name)) == name for name in names
    )
    assert list(found.label_names) == sorted(set(names), key=int if numbers else None)


@given(st.lists(st.integers(), min_size=1, max_size=8))
def test_texts_of_integers_are_classes_in_the_order_of_numbers(values: list[int]) -> None:
    table = pa.table({"label": list(map(str, values))})
    assert read(table, table).label_names == tuple(map(str, sorted(set(values))))


def read(
    train: pa.Table,
    test: pa.Table,
    task: str = "it",
    names: dict[str, tuple[str, ...]] | None = None,
    **fields: Any,
) -> Any:
    source, experiment = (
        Source(task, {"train": train, "test": test}, names or {}),
        chosen("it", **fields),
    )
    return labelled(source, experiment, label_columns(source, experiment), [], lambda _: [[]])


@pytest.mark.parametrize(
    ("labels", "alike"),
    [
        (["Good", "good", "bad"], "'Good', 'good'"),
        (["not good", "notgood", "bad"], "'not good', 'notgood'"),
        (["a\u200bb", "ab"], "ab"),
        (["\u2764\ufe0f", "\u2764"], "\u2764"),
        (["STRASSE", "straße"], "'STRASSE', 'straße'"),
        (["a", "b", "a b"], ""),
        (["1", "01"], ""),
    ],
)
def test_classes_that_look_alike_are_named(labels: list[str], alike: str) -> None:
    table = pa.table({"label": labels})
    said = read(table, table).said
    assert ("differ only in case, spaces" in said) == bool(alike)
    assert alike in said


def test_declared_classes_stay_though_they_do_not_occur() -> None:
    for values in ([0, 2], ["0", "2"]):
        few = pa.table({"label": values})
        found = read(few, few, names={"label": ("a", "b", "c", "d")})
        assert (found.label_names, found.train.labels.tolist()) == (("a", "b", "c", "d"), [0, 2])
    other = pa.table({"label": [0, 7], "label_name": ["x", "cafe\u0301 "]})
    assert read(other, other).label_names == ("x", "caf\u00e9")
    # A name in the training rows goes before another one in held-out rows.
    train = pa.table({"label": [0, 1], "label_name": ["cold", "warm"]})
    test = pa.table({"label": [0, 2], "label_name": ["kalt", "hot"]})
    assert read(train, test).label_names == ("cold", "warm", "hot")
    # Names in one split alone are not used.
    assert read(train, test.select(["label"])).label_names == ("0", "1", "2")


def test_numbers_without_names_may_be_scores_and_the_other_way_round() -> None:
    numbers, named = pa.table({"label": [0, 1]}), pa.table({"label": [0, 1], "label_name": ["x", "y"]})
    told = [read(t, t).said.count("give label_kind regression") for t in (numbers, named)]
    assert told == [1, 0]
    whole, parts = pa.table({"label": [0.0, 2.0]}), pa.table({"label": [0.5, -1.0]})
    assert read(whole, whole).said.endswith("if they are classes, give label_kind single.")
    assert read(whole, whole, **SCORES).said == "Labels: scores from 0 to 2 (regression)."
    assert read(whole, parts).said == "Labels: scores from -1 to 2 (regression)."


def test_classes_are_those_of_both_splits() -> None:
    one, other = pa.table({"label": ["a", "b"]}), pa.table({"label": ["b", "c"]})
    found = read(one, other)
    assert (found.label_names, found.test.labels.tolist()) == (("a", "b", "c"), [1, 2])
    assert "3 classes in the column 'label': a, b, c." in found.said
    assert "Only held-out rows have c: clients have no such" in found.said
    # Numbers are classes of one name whatever their type.
    assert read(pa.table({"label": [0, 1]}), pa.table({"label": [1.0, 0.0]})).test.labels.tolist() == [
        1,
        0,
    ]
    with pytest.raises(DataError, match="'x'"):
        read(pa.table({"label": [0.5]}), pa.table({"label": ["x"]}))


def test_more_values_than_classes_can_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedrot.simulations.data.labels.MOST_CLASSES", 3)
    train, test = pa.table({"label": [1, 2]}), pa.table({"label": [2, 3]})
    assert read(train, test).label_names == ("1", "2", "3")
    with pytest.raises(DataError, match="has 4 classes, above the maximum of 3"):
        read(train, pa.table({"label": [3, 4]}))


TRUE, FALSE = [True, False], [False, True]
#: Columns of training rows, of held-out rows, options, and kind with training labels, or an error.
SEVERAL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]] = {
    "exactly one": ({"x": TRUE, "y": FALSE}, {"x": TRUE, "y": FALSE}, {}, ("single", [0, 1])),
    "two in training rows": (
        {"x": TRUE, "y": TRUE},
        {"x": TRUE, "y": FALSE},
        {},
        ("multi", [[1, 1], [0, 0]]),
    ),
    "two in test rows": (
        {"x": TRUE, "y": FALSE},
        {"x": TRUE, "y": TRUE},
        {},
        ("multi", [[1, 0], [0, 1]]),
    ),
    "asked for": (
        {"x": TRUE, "y": FALSE},
        {"x": TRUE, "y": FALSE},
        {"label_kind": "multi"},
        ("multi", [[1, 0], [0, 1]]),
    ),
    "none, one asked for": (
        {"x": TRUE, "y": TRUE},
        {"x": TRUE, "y": TRUE},
        SINGLE,
        "kind multi and not single; single needs one",
    ),
    "scores asked for": (
        {"x": TRUE, "y": FALSE},
        {"x": TRUE, "y": FALSE},
        SCORES,
        "kind single and not regression",
    ),
    "texts and numbers": (
        {"x": ["1", "0"], "y": ["True", "false"], "z": [1, 0], "n": ["a", "1"], "w": [[1], [0]]},
        {"x": ["1", "0"], "y": ["True", "false"], "z": [1, 0], "n": ["a", "1"], "w": [[1], [0]]},
        {"label_kind": "multi"},
        ("multi", [[1, 1, 1], [0, 0, 0]]),
    ),
    "an empty cell": (
        {"x": [True, None], "y": TRUE},
        {"x": TRUE, "y": TRUE},
        {},
        r"'x' has no value in 1 .*row\(s\) 2,",
    ),
    "one column": ({"x": TRUE}, {"x": TRUE}, {}, "no label column 'label' or .*; columns are x;"),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_boolean_columns(name: str) -> None:
    train, test, options, expected = SEVERAL[name]
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            read(pa.table(train), pa.table(test), **options)
        return
    found = read(pa.table(train), pa.table(test), **options)
    assert (found.kind, found.train.labels.tolist()) == expected
    assert "".join(found.label_names) in "xyz"


def divided(tmp_path: Path, **columns: Any) -> Any:
    return load_texts(chosen(write(tmp_path / "mine.parquet", **columns)))


def test_a_file_is_divided_by_class_and_always_alike(tmp_path: Path) -> None:
    uneven = repeated(["a", "a", "a", "b"])
    found = {}
    for suffix in (*TEXT_FILES, *TYPED_FILES):
        path = write(tmp_path / f"mine{suffix}", text=TEXTS, label=uneven, number=list(range(ROWS)))
        data = load_texts(chosen(path))
        assert np.bincount(data.test.labels).tolist() == [6, 2]
        assert f"{path} has no splits: of 40 rows 8 are held out, one in 5 of each class" in data.note
        assert classes(data) == dict(zip(TEXTS, uneven, strict=True))
        found[data.test.inputs, data.train.inputs] = suffix
        assert [TEXTS[int(n)] for n in data.test.columns["number"]] == [*data.test.inputs]  # type: ignore[call-overload]
    assert len(found) == 1


@pytest.mark.parametrize(
    "labels", [[i / 7 for i in range(ROWS)], [f"row {i}" for i in range(ROWS)], ["one"] * ROWS]
)
def test_without_classes_one_row_in_five_is_held_out(labels: list[Any], tmp_path: Path) -> None:
    data = divided(tmp_path, text=TEXTS, label=labels)
    assert (len(data.train), len(data.test)) == (32, 8)
    assert "one in 5, drawn" in data.note


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary("int8", pa.string())]
)
def test_a_column_split_of_any_type_divides_a_file(kind: pa.DataType, tmp_path: Path) -> None:
    for names, test in (
        (["train", " test", "train ", "validation"], "test"),
        (["train", "validation"], "validation"),
    ):
        splits = pa.array(repeated(names))
        splits = splits.dictionary_encode() if pa.types.is_dictionary(kind) else splits.cast(kind)
        data = divided(tmp_path, text=TEXTS, label=repeated([0, 1]), split=splits)
        wanted = [
            text for text, name in zip(TEXTS, repeated(names), strict=True) if name.strip() == test
        ]
        assert (len(data.train), [*data.test.inputs], data.note) == (20, wanted, "")


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            ["train", None, "test"],
            r"'split' column of .*mine.parquet has no value in 1 of 3 rows: row\(s\) 2,",
        ),
        (["train", "train", "dev"], "has dev, train; it needs 'train' and"),
        (["test", "test", "validation"], "it needs 'train'"),
    ],
)
def test_wrong_splits_are_refused(splits: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        divided(tmp_path, text=list("abc"), label=[0, 1, 1], split=splits)


def test_a_limit_takes_the_same_rows_and_changes_no_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", text=TEXTS, label=repeated([3, 5, 9, 12]))
    whole, part, more = (load_texts(chosen(path, train_limit=n, test_limit=n)) for n in (None, 2, 4))
    assert part.label_names == whole.label_names == ("3", "5", "9", "12")
    assert (part.train.inputs, part.test.inputs) == (more.train.inputs[:2], more.test.inputs[:2])
    assert (len(part.train), len(part.test)) == (2, 2)
    assert classes(part).items() <= classes(whole).items()
    assert len(load_texts(chosen(path, train_limit=10**6)).train) == len(whole.train)


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mine.parquet has 1 rows, too few to hold one in 5 out"):
        divided(tmp_path, text=["a"], label=[0])
    with pytest.raises(DataError, match=r"too few to hold one in 5 of each class out"):
        divided(tmp_path, text=list("abc"), label=[0, 1, 1])
