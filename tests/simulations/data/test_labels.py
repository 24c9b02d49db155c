"""Labels of files: what they are, what is refused with its rows, and what the user is
told.
"""

import re
import unicodedata
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedrot.simulations.data.class_remarks import class_remarks
from fedrot.simulations.data.labels import SPLITS, label_columns, labelled
from fedrot.simulations.data.read import DataError, Source
from fedrot.simulations.data.texts import load_tags, load_texts
from tests.simulations.data.files import (
    ROWS,
    TEXTS,
    by_text,
    chosen,
    classes,
    repeated,
    write,
)

SINGLE, SCORES, MULTI = (
    {"label_kind": kind} for kind in ("single", "regression", "multi")
)
TEXT_FILES = (".csv",)
TYPED_FILES = (".jsonl", ".parquet")
#: Labels, options, and what they are: names of classes, "regression", or a word of the
#: error.
EVERYWHERE = {
    "texts": ([" a", "b ", "a"], {}, ("a", "b")),
    "leading zeros": (["00012", "12"], {}, ("00012", "12")),
    "signs and underlines": (["+1", "1_0", "-0"], {}, ("+1", "-0", "1_0")),
    "numbers": ([10, 9, -1, 100], {}, ("-1", "9", "10", "100")),
    "numbers as scores": ([1, 5, 3], SCORES, "regression"),
    "words as scores": (
        ["1", "2", "no"],
        SCORES,
        r"float32 in 13 of 40 rows: row\(s\) 3, 6,",
    ),
    "scores beyond float32": (["1", "1e39"], SCORES, r"row\(s\) 2, 4,"),
    "one column as several": (
        ["yes", "no"],
        MULTI,
        "of the kind single, no multi; single needs one",
    ),
    "nothing": (
        ["a", None, "b"],
        {},
        r"no value in 13 of 40 rows: row\(s\) 2, 5,.* delete these rows",
    ),
    "spaces alone": (["a", " \t"], {}, r"row\(s\) 2, 4,"),
    "an unseen character alone": (["a", "\u200b"], {}, r"row\(s\) 2, 4,"),
}
TEXT_ONLY = {
    "numbers and texts": ([1, "x"], {}, ("1", "x")),
    "whole scores": ([1.0, 0.0], {}, ("0.0", "1.0")),
    "not finite": ([0.5, "inf"], SCORES, r"row\(s\) 2, 4,"),
}
TYPED_ONLY = {
    "scores": ([0.5, 1.5], {}, "regression"),
    "whole scores": ([1.0, 0.0], {}, "regression"),
    "whole scores as classes": ([10.0, 9.0, -1.0], SINGLE, ("-1", "9", "10")),
    "scores as classes": ([0.5, 1.0], SINGLE, r"or a whole number.* row\(s\) 1, 3,"),
    "booleans": ([True, False], {}, ("False", "True")),
    "not a number": (
        [0.5, float("nan")],
        {},
        r"no value in 20 of 40 rows: row\(s\) 2, 4,",
    ),
    "not finite": ([0.5, float("inf")], {}, r"row\(s\) 2, 4,"),
    "several in a row": (
        [["a"], ["b"]],
        {},
        "holds list.*, no labels; choose another column",
    ),
}
#: Types of Parquet.
PARQUET_ONLY = {
    "uint64": (
        pa.array([2**64 - 1, 2**64 - 2], pa.uint64()),
        {},
        (str(2**64 - 2), str(2**64 - 1)),
    ),
    "decimals": (
        pa.array([Decimal(10**20), Decimal(10**20 + 1)]),
        {},
        (str(10**20), str(10**20 + 1)),
    ),
    "prices": (pa.array([Decimal("1.50"), Decimal("2.00")]), {}, "regression"),
    "bytes": (pa.array([b"neg", "süß".encode()]), {}, ("neg", "süß")),
    "views": (pa.array([b"neg", b"pos"], pa.binary_view()), {}, ("neg", "pos")),
    "views of texts": (pa.array(["neg", "pos"], pa.string_view()), {}, ("neg", "pos")),
    "bytes of no text": (
        pa.array([b"neg", b"\xff"]),
        {},
        r"no class .*UTF-8.* in 20 .*row\(s\) 2, 4,",
    ),
    "nothing at all": (pa.nulls(2), {}, "no value in 40 of 40 rows"),
}
CASES = [
    pytest.param(case, suffix, id=f"{name}{suffix}")
    for table, suffixes in (
        (EVERYWHERE, TEXT_FILES + TYPED_FILES),
        (TEXT_ONLY, TEXT_FILES),
        (TYPED_ONLY, TYPED_FILES),
        (PARQUET_ONLY, (".parquet",)),
    )
    for name, case in table.items()
    for suffix in suffixes
]


@pytest.mark.parametrize(("case", "suffix"), CASES)
def test_labels(case, suffix, tmp_path):
    labels, options, expected = case
    typed = isinstance(labels, pa.Array)
    rows = pa.concat_arrays([labels] * (ROWS // 2)) if typed else repeated(labels)
    values = rows.to_pylist() if typed else rows
    path = write(tmp_path / f"mine{suffix}", text=TEXTS, label=rows)
    if isinstance(expected, str) and expected != "regression":
        with pytest.raises(DataError, match=expected) as caught:
            load_texts(chosen(path, **options))
        assert str(path) in str(caught.value) or "row(s)" not in str(caught.value)
        return
    data = load_texts(chosen(path, **options))
    if expected == "regression":
        assert (data.kind, data.metrics) == ("regression", ("pearson", "spearman"))
        assert "Labels: regression, score (--set label_kind: single" in data.remarks
        assert data.train.labels.dtype == np.float32
        assert by_text(data) == dict(zip(TEXTS, map(float, values), strict=True))
        return
    assert (data.kind, data.label_names) == ("single", expected)
    if options and suffix in TYPED_FILES:
        values = map(int, values)
    texts = (v.decode() if isinstance(v, bytes) else str(v) for v in values)
    names = [unicodedata.normalize("NFC", text).strip() for text in texts]
    assert classes(data) == dict(zip(TEXTS, names, strict=True))


def read(train, test, names=None, **fields):
    source = Source({"train": train, "test": test}, names or {})
    experiment = chosen("it", **fields)
    return labelled(
        source, experiment, label_columns(source, experiment), [], lambda _: [[]]
    )


letters = st.text(st.characters(exclude_categories=("Cs",)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(letters, min_size=1, max_size=8)
    | st.lists(st.integers().map(str), min_size=1)
)
def test_classes_are_the_trimmed_composed_texts(values):
    names = [unicodedata.normalize("NFC", value).strip() for value in values]
    shapeless = {*map(chr, range(0xFE00, 0xFE10)), *"\u034f\u115f\u1160\u3164\uffa0"}
    table = pa.table({"label": values})
    try:
        found = read(table, table)
    except DataError:
        seen = [
            {c for c in name if unicodedata.category(c)[0] not in "CZ"}
            for name in names
        ]
        assert any(shape <= shapeless for shape in seen)
        return
    assert [found.label_names[label] for label in found.train.labels] == names
    ascii_numbers = (
        n.lstrip("-").isdecimal() and n.isascii() and str(int(n)) == n for n in names
    )
    assert list(found.label_names) == sorted(
        set(names), key=int if all(ascii_numbers) else None
    )


@pytest.mark.parametrize(
    ("labels", "alike"),
    [
        (["Good", "good", "bad"], "'Good', 'good'"),
        (["a\u200bb", "ab"], "ab"),
        (["STRASSE", "straße"], "'STRASSE', 'straße'"),
        (["very good", "very-good", "Very_Good"], "'very-good'"),
        (["\uff4aoy", "joy"], "'joy', '\uff4aoy'"),
        (["-0", "+0", "00", "0e9"], "'+0', '-0', '00', '0e9'"),
        (["True", "1", "x"], "'1', 'True'"),
        (["no", "0", "FALSE", "x"], "'0', 'FALSE', 'no'"),
        (["low-risk", "low\u2013risk", "low\u2212risk"], "'low\u2013risk'"),
        (["a\u203fb", "a_b", "x"], "'a_b', 'a\u203fb'"),
        (["don't", "don\u2019t", "don\xb4t"], "\"don't\", 'don\xb4t'"),
        (["\u201egut\u201c", '"Gut"', "\xabgut\xbb"], "'\"Gut\"', '\xabgut\xbb'"),
        (["\u0663", "3", "x"], "'3', '\u0663'"),
        (["\u22121", "-1", "1"], "'-1', '\u22121'"),
        (["\xbd", "1/2", "12"], "'1/2', '\xbd'"),
        (["'", "_", "x"], ""),
        (["a", "b", "a b"], ""),
        (["-1", "1", "1.5", "+", "-"], ""),
        ([str(10**20), str(10**20 + 1)], ""),
    ],
)
def test_classes_that_look_alike_are_named(labels, alike):
    for columns in (
        {"label": labels},
        {name: [True, name == labels[0]] for name in labels},
    ):
        table = pa.table(columns)
        said = " ".join(class_remarks(read(table, table)))
        assert ("differ only in case, spaces" in said) == bool(alike)
        for name in alike.split(", "):
            assert name in said


#: Labels of training rows, of held-out rows, and parts of what is said.
UNKNOWN = [
    (["a", "b"], ["a", "b"], ()),
    (["a", "b"], ["a", "c"], ("1 of 3 classes have no training row, .*: 'c'", "'b'")),
    (
        ["0.0", "1.0", "x"],
        ["0", "1", "x"],
        ("2 of 5 .* training .*: '0', '1'.", "2 of"),
    ),
    ([0.5, 1.5], [2.5, 3.5], ()),
    (["a", "-1"], ["a", "-1"], ("1 of 2 classes .* stands for no label.*: '-1'.",)),
    ([1, -100], [1, -100], ("1 of 2 classes .* stands for no label.*: '-100'.",)),
    (["NA", "<NA>", "None", "b"], ["b"] * 4, ("3 of 4 .* stands for no label",)),
]


@pytest.mark.parametrize(("train", "test", "parts"), UNKNOWN)
def test_classes_that_no_model_or_no_score_can_know_are_named(train, test, parts):
    said = [*class_remarks(read(pa.table({"label": train}), pa.table({"label": test})))]
    if not parts:
        assert said == []
    for part in parts:
        assert re.search(part, " ".join(said))


def test_unknown_labels_are_named_in_every_task(tmp_path):
    """Of several labels, tags and pictures, also of rows that a limit leaves."""
    flags = {"x": [True, False], "y": [True, False], "z": [False, False]}
    other = {**flags, "z": [True, True]}
    data = read(pa.table(flags), pa.table(other))
    assert "1 of 3 classes have no training row" in next(class_remarks(data))
    path = write(
        tmp_path / "tags.parquet",
        ner_tags=[["B-LOC"], ["B-Loc"]],
        tokens=[["Rome"]] * 2,
        split=["train", "test"],
    )
    first, second, alike = class_remarks(load_tags(chosen(path)))
    assert "1 of 2 classes have no training row, but test rows" in first
    assert ("'Loc'" in first, "'LOC'" in second) == (True, True)
    assert "'LOC', 'Loc' differ only" in alike
    path = write(tmp_path / "many.csv", text=TEXTS, label=repeated([*"abcdefgh"]))
    whole, few = (
        [*class_remarks(load_texts(chosen(path, train_limit=n)))] for n in (None, 4)
    )
    assert (whole, len(few)) == ([], 1)
    assert "no training row" in few[0]


#: Columns of training rows, of held-out rows, the hub's names; names and held-out
#: labels.
NAMED = [
    (
        {"label": ["0", "1"]},
        {"label": ["2", "0"]},
        ("b", "a", "c"),
        (("b", "a", "c"), [2, 0]),
    ),
    # A name in the training rows goes before another one in held-out rows.
    (
        {"label": [7, 0], "label_name": ["cold", "cafe\u0301 "]},
        {"label": [0, 8], "label_name": ["kalt", "hot"]},
        (),
        (("caf\u00e9", "cold", "hot"), [0, 2]),
    ),
    ({"label": [0], "label_name": ["cold"]}, {"label": [1]}, (), (("0", "1"), [1])),
    # Numbers are classes of one name whatever their type.
    ({"label": [0, 1]}, {"label": [1.0, 0.0]}, (), (("0", "1"), [1, 0])),
]


@pytest.mark.parametrize(("train", "test", "names", "expected"), NAMED)
def test_names_of_classes(train, test, names, expected):
    found = read(pa.table(train), pa.table(test), {"label": names} if names else {})
    assert (found.label_names, found.test.labels.tolist()) == expected


TRUE, FALSE, MIXED = [True, False], [False, True], ["True", "false"]
#: Columns of training rows, of held-out rows, options, and kind with training labels,
#: or an error.
SEVERAL = [
    ({"x": TRUE, "y": FALSE}, {}, {}, ("single", [0, 1])),
    ({"x": TRUE, "y": TRUE}, {"y": FALSE}, {}, ("multi", [[1, 1], [0, 0]])),
    ({"x": TRUE, "y": FALSE}, {"y": TRUE}, {}, ("multi", [[1, 0], [0, 1]])),
    ({"x": TRUE, "y": FALSE}, {}, MULTI, ("multi", [[1, 0], [0, 1]])),
    ({"x": TRUE, "y": TRUE}, {}, SINGLE, "kind multi, no single; single needs one"),
    ({"x": TRUE, "y": FALSE}, {}, SCORES, "kind single, no regression"),
    (
        {"x": ["1", "0"], "y": MIXED, "z": [1, 0], "n": ["a", "1"], "w": [[1], [0]]},
        {},
        MULTI,
        ("multi", [[1, 1, 1], [0, 0, 0]]),
    ),
    (
        {"x": [True, None], "y": TRUE},
        {"x": TRUE},
        {},
        r"'x' has no value in 1 .*row\(s\) 2,",
    ),
    ({"x": TRUE}, {}, {}, "no label column 'label' or .* among x;"),
]


@pytest.mark.parametrize(("train", "test", "options", "expected"), SEVERAL)
def test_boolean_columns(train, test, options, expected):
    tables = pa.table(train), pa.table({**train, **test})
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            read(*tables, **options)
        return
    found = read(*tables, **options)
    assert (found.kind, found.train.labels.tolist()) == expected
    assert "".join(found.label_names) in "xyz"


def divided(tmp_path, **columns):
    return load_texts(chosen(write(tmp_path / "mine.parquet", **columns)))


def test_a_file_is_divided_by_class_and_always_alike(tmp_path):
    uneven = repeated(["a", "a", "a", "b"])
    found = {}
    for suffix in (*TEXT_FILES, *TYPED_FILES):
        columns = {"text": TEXTS, "label": uneven, "number": [*range(ROWS)]}
        path = write(tmp_path / f"mine{suffix}", **columns)
        data = load_texts(chosen(path))
        assert np.bincount(data.test.labels).tolist() == [6, 2]
        said = "has no splits: of 40 rows 8 are held out, one in 5 of each class"
        assert f"{path} {said}" in data.remarks
        assert classes(data) == dict(zip(TEXTS, uneven, strict=True))
        found[data.test.inputs, data.train.inputs] = suffix
        numbers = data.test.columns["number"]
        assert [TEXTS[int(n)] for n in numbers] == [*data.test.inputs]
    assert len(found) == 1
    for labels in ([i / 7 for i in range(ROWS)], TEXTS, ["one"] * ROWS):
        data = divided(tmp_path, text=TEXTS, label=labels)
        assert (len(data.train), len(data.test)) == (32, 8)
    labels = np.repeat([f"class {n:02}" for n in range(41)], [2] * 40 + [20])
    texts = [f"text {n}" for n in range(100)]
    for columns in (
        {"label": labels},
        {name: labels == name for name in np.unique(labels)},
    ):
        data = divided(tmp_path, text=texts, **columns)
        assert np.bincount(data.test.labels).tolist() == [1] * 40 + [4]
        assert [*class_remarks(data)] == []


def test_a_column_split_divides_a_file(tmp_path):
    for names in (["train", " test", "train ", "validation"], ["train", "validation"]):
        data = divided(
            tmp_path, text=TEXTS, label=repeated([0, 1]), split=repeated(names)
        )
        wanted = TEXTS[1 :: len(names)]
        assert (len(data.train), [*data.test.inputs]) == (20, wanted)
        assert "held out" not in data.remarks
        assert ("10 rows of 'validation' are not used" in data.remarks) == (
            len(names) == 4
        )


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("column", ["split", "Split"])
def test_splits_have_usual_names_in_any_case(name, column, tmp_path):
    held_out = "test" if SPLITS[name] == "train" else name.title()
    values = repeated(["Train", held_out, name.upper(), held_out])
    columns = {"text": TEXTS, "label": repeated([0, 1]), column: values}
    data = divided(tmp_path, **columns)
    sizes = (20, 20) if SPLITS[name] == "train" else (10, 30)
    assert (len(data.train), len(data.test)) == sizes
    assert column not in data.train.columns


def test_a_column_split_may_be_the_label_or_be_in_one_of_two_tables(tmp_path):
    path = write(tmp_path / "mine.csv", text=TEXTS, split=repeated(["north", "south"]))
    data = load_texts(chosen(path, label_column="split"))
    assert data.label_names == ("north", "south")
    table = pa.table({"label": ["a", "b"], "split": ["north", "south"]})
    assert read(table, table).train.columns == {"split": ["north", "south"]}


def test_a_limit_takes_the_same_rows_and_changes_no_classes(tmp_path):
    path = write(tmp_path / "mine.csv", text=TEXTS, label=repeated([3, 5, 9, 12]))
    whole, part, more = (
        load_texts(chosen(path, train_limit=n, test_limit=n)) for n in (None, 2, 4)
    )
    assert part.label_names == whole.label_names == ("3", "5", "9", "12")
    assert part.train.inputs == more.train.inputs[:2]
    assert part.test.inputs == more.test.inputs[:2]
    assert (len(part.train), len(part.test)) == (2, 2)
    assert classes(part).items() <= classes(whole).items()
    assert len(load_texts(chosen(path, train_limit=10**6)).train) == len(whole.train)
