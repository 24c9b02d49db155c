"""Data sets in memory: their labels, and the division of rows into training and held-out ones."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as types

from fedrot.simulations.data.read import Content, DataError, Source, listed, plain, refuse_rows

if TYPE_CHECKING:
    from fedrot.simulations.settings import Experiment

Kind: TypeAlias = Literal["single", "multi", "regression"]
METRICS_OF_KIND: Mapping[Kind, tuple[str, ...]] = {
    "single": ("accuracy", "macro_f1"),
    "multi": ("macro_f1", "micro_f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}
#: Largest number of classes. A column with more values does not hold classes.
MOST_CLASSES = 100_000
#: Without splits, one in this number of rows is held out. Seeds of this division and of limits.
HELD_OUT_SHARE, SPLIT_SEED, LIMIT_SEED = 5, 0, 0
#: Numbers as Python writes them; variation selectors and other letters without a shape.
_INTEGER = re.compile("0|-?[1-9][0-9]{0,999}")
_SHAPELESS = re.compile("[\ufe00-\ufe0f\u034f\u115f\u1160\u3164\uffa0]")
LABEL = Content(
    "label",
    ("label", "labels", "target", "class"),
    "--label-column, or columns of 0 and 1 with label_kind multi",
    "texts, integers or scores, or one boolean column per label",
    lambda kind: not types.is_nested(kind),
)
CLASS_NAMES: Mapping[str, tuple[str, ...]] = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not equivalent", "equivalent"),
    "qqp": ("not duplicate", "duplicate"),
    "rte": ("entailment", "not entailment"),
    "qnli": ("entailment", "not entailment"),
    "mnli": ("entailment", "neutral", "contradiction"),
}
Values: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Rows of one split; subclasses add the inputs of models.

    Attributes:
        labels: int64 ``[n]`` (single label), float32 ``[n, classes]`` of 0 and 1 (multi-label) or
            float32 ``[n]`` (regression).
        columns: every other column by name, ``n`` values each.
    """

    labels: Values
    columns: Mapping[str, Sequence[object]]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Rows:
    """Rows of a table: its origin, their numbers there from 1, and their labels as in ``Split``."""

    where: str
    table: pa.Table
    numbers: npt.NDArray[np.int64]
    labels: Values

    def only(self, kept: npt.NDArray[np.bool_]) -> Rows:
        table = self.table.filter(pa.array(kept))
        return Rows(self.where, table, self.numbers[kept], self.labels[kept])

    def columns(self, *used: str) -> dict[str, list[object]]:
        """Return the values of all columns except the used ones and ``split``, by name."""
        names = [name for name in self.table.column_names if name not in (*used, "split")]
        return {name: self.table[name].to_pylist() for name in names}


S_co = TypeVar("S_co", bound=Split | Rows, covariant=True)


@dataclass(frozen=True)
class DataSet(Generic[S_co]):
    """A data set.

    Attributes:
        label_names: one name per class (``("score",)`` in regression).
        metrics: names for ``evaluate_predictions``, the headline metric first.
        test: the held-out split: validation for GLUE tasks, test for the emotion corpora.
        note: how the rows were divided, if there were no splits.
        said: how the labels were read, and which files were left out.
    """

    name: str
    kind: Kind
    label_names: tuple[str, ...]
    metrics: tuple[str, ...]
    train: S_co
    test: S_co
    note: str = field(default="", kw_only=True)
    said: str = field(default="", kw_only=True)


def clean(text: object) -> str:
    """Return a text without spaces around it and in Unicode's composed form (NFC)."""
    return unicodedata.normalize("NFC", str(text)).strip()


def label_columns(source: Source, experiment: Experiment, *, optional: bool = False) -> tuple[str, ...]:
    """Return the label column, or without one the boolean columns, one for each label.

    With ``label_kind="multi"``, columns of 0 and 1, or of the texts true and false, are boolean, too.
    Without any, return ``()`` if labels are ``optional``, else raise ``DataError``.
    """
    wanted, multi = experiment.label_column, experiment.label_kind == "multi"
    if wanted is None and not set(LABEL.known) & set(source.columns):
        booleans = [name for name in source.columns if _are_flags(source, name, multi)]
        if len(booleans) >= 2:
            return tuple(source.column(LABEL, name) for name in booleans)
        if optional:
            return ()
    return (source.column(LABEL, wanted),)


def _are_flags(source: Source, name: str, multi: bool) -> bool:
    columns = [plain(table[name]) for table in source.tables.values()]
    if not multi or any(types.is_nested(column.type) for column in columns):
        return all(types.is_boolean(column.type) for column in columns)
    found = {str(value).lower() for column in columns for value in column.unique().to_pylist()}
    return found <= {"0", "1", "false", "true", "none"}


def labelled(source: Source, columns: tuple[str, ...], experiment: Experiment) -> DataSet[Rows]:
    """Read the labels of complete columns, and divide the rows; without columns, all are of one class.

    A single table is divided by its column ``split``. Without it, one row in five of every class in the
    label column is held out, always the same rows; without classes (not one column, scores, or no value
    twice), one in five of all rows. Limits change no classes. Raises ``DataError``.
    """
    asked, note = experiment.label_kind, ""
    several = len(columns) > 1
    if columns and asked == ("regression" if several else "multi"):
        holds = "booleans and no scores" if several else "one label for a row"
        raise DataError(
            f"{source.task}: label column {listed(columns)} has {holds}; label_kind multi needs a "
            "boolean column per label and none that is called label, regression one column of numbers"
        )
    kinds = [plain(table[name]).type for table in source.tables.values() for name in columns[:1]]
    scores = bool(kinds) and (asked == "regression" or (not asked and _has_fractions(kinds[0])))
    read = _flags if several else _scores if scores else _texts
    parts = [_rows(where, table, columns, read) for where, table in source.tables.items()]
    if len(parts) == 1 and "split" in parts[0].table.column_names:
        parts = _by_column(parts[0])
    labels = [part.labels for part in parts]
    kind: Kind = "regression" if scores else "single"
    names: tuple[str, ...] = ("score",) if scores else ("all",)
    said = ""
    if several:
        kind, names, labels, said = _several(source.task, columns, labels, asked)
    elif scores:
        said = _range(np.concatenate(labels), asked)
    elif columns:
        names, labels, said = _classes(source, columns[0], parts)
    parts = [replace(part, labels=values) for part, values in zip(parts, labels, strict=True)]
    if len(parts) == 1:
        parts, note = _drawn(parts[0], by_class=kind == "single" and not several)
    train = _limited(parts[0], experiment.train_limit)
    test = _limited(parts[1], experiment.test_limit)
    said = " ".join(filter(None, (source.said, said)))
    metrics = METRICS_OF_KIND[kind]
    return DataSet(experiment.data, kind, names, metrics, train, test, note=note, said=said)


def _has_fractions(kind: pa.DataType) -> bool:
    return types.is_floating(kind) or (types.is_decimal(kind) and kind.scale > 0)


def _rows(where: str, table: pa.Table, columns: Sequence[str], read: Callable[..., Values]) -> Rows:
    labels = [read(f"{where}: label column {name!r}", plain(table[name])) for name in columns]
    several = np.stack(labels or [np.zeros(table.num_rows, dtype=np.int64)], axis=1)
    values = several if len(columns) > 1 else several[:, 0]
    return Rows(where, table, np.arange(table.num_rows) + 1, values)


def _flags(_: str, column: pa.ChunkedArray) -> Values:
    return np.array([str(value).lower() in ("1", "true") for value in column.to_pylist()], dtype=bool)


def _scores(where: str, column: pa.ChunkedArray) -> Values:
    with np.errstate(over="ignore"):
        scores = np.array([*map(_number, column.to_pylist())], dtype=np.float64).astype(np.float32)
    wrong = ~np.isfinite(scores)
    example = column[int(wrong.argmax())].as_py() if wrong.any() else ""
    refuse_rows(where, f"no number of float32, such as {example!r},", wrong)
    return scores


def _number(cell: Any) -> float:
    try:
        return math.nan if "_" in str(cell) else float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _texts(where: str, column: pa.ChunkedArray) -> Values:
    """Return the names of the rows' classes, object ``[rows]``."""
    values = column.to_pylist()
    named = {value: _name(value) for value in set(values)}
    texts = np.array([named[value] for value in values], dtype=object)
    fractions = "numbers that are not whole, so scores (label_kind regression),"
    refuse_rows(where, fractions if _has_fractions(column.type) else "no text in UTF-8", texts == "")
    return texts


def _name(value: Any) -> str:
    """Return a class as a text, whole numbers without a point; empty if it is none."""
    try:
        text = clean(value.decode() if isinstance(value, bytes) else value)
        if isinstance(value, float | Decimal):
            text = str(int(value)) if value == int(value) else ""
    except (ValueError, OverflowError):  # no UTF-8, not finite
        return ""
    return text if _seen(text) else ""


def _seen(text: str) -> str:
    """Return a text in lower case without spaces and characters that are not seen."""
    seen = (c for c in text if unicodedata.category(c) not in ("Cc", "Cf", "Zs", "Zl", "Zp"))
    return _SHAPELESS.sub("", clean("".join(seen).casefold()))


def _several(
    task: str, columns: tuple[str, ...], labels: list[Values], asked: str
) -> tuple[Kind, tuple[str, ...], list[Values], str]:
    single, names = all((rows.sum(axis=1) == 1).all() for rows in labels), listed(columns)
    if asked == "single" and not single:
        raise DataError(
            f"{task}: a row has no label, or several, in the columns {names}; label_kind single needs "
            "one in each row, multi takes any number"
        )
    if single and asked != "multi":
        said = f"Labels: {len(columns)} classes in the columns {names}, exactly one in each row."
        return "single", columns, [rows.argmax(axis=1) for rows in labels], said
    said = f"Labels: any number of {len(columns)} in each row, in the columns {names}."
    return "multi", columns, [rows.astype(np.float32) for rows in labels], said


def _range(scores: Values, asked: str) -> str:
    said = f"Labels: scores from {min(scores, default=0):g} to {max(scores, default=0):g} (regression)."
    if not asked and (scores == np.rint(scores)).all():
        said += " All are whole numbers: if they are classes, give label_kind single."
    return said


def _classes(
    source: Source, column: str, parts: list[Rows]
) -> tuple[tuple[str, ...], list[Values], str]:
    """Return the names of classes, the classes of the rows, and sentences about them."""
    known = [set(part.labels) for part in parts]
    found = set().union(*known)
    if len(found) > MOST_CLASSES:
        raise DataError(
            f"{source.task}: label column {column!r} has {len(found)} classes, above the maximum of "
            f"{MOST_CLASSES}; choose another column, or label_kind regression"
        )
    # Texts such as 00012 or 1.10 are no numbers.
    whole = all(map(_INTEGER.fullmatch, found))
    names = values = sorted(found, key=int if whole else None)
    declared = source.class_names.get(column) or CLASS_NAMES.get(source.task) or ()
    for part in parts if column in source.class_names else ():
        named = np.isin(part.labels.astype(str), [*map(str, range(len(declared)))])
        refuse_rows(part.where, f"labels without a name in the column {column!r}, such as -1,", ~named)
    if whole and values and int(values[0]) >= 0 and int(values[-1]) < len(declared):
        values, names = [*map(str, range(len(declared)))], [*declared]
    elif whole and all("label_name" in part.table.column_names for part in parts):
        # If training and held-out rows differ, the name in the training rows is used.
        pairs = [zip(p.labels, p.table["label_name"].to_pylist(), strict=True) for p in reversed(parts)]
        name_of = {value: name for part in pairs for value, name in part}
        names = [clean(name_of[value]) for value in values]
    number = {value: index for index, value in enumerate(values)}
    classes = f"{len(values)} class{'' if len(values) == 1 else 'es'}"
    said = [f"Labels: {classes} in the column {column!r}: {listed(names)}."]
    if whole and names == values:
        said.append("If these numbers are scores, give label_kind regression.")
    alike = defaultdict(list)
    for name in names:
        alike[_seen(name)].append(repr(name))
    for same in filter(lambda same: len(same) > 1, alike.values()):
        said.append(f"The classes {listed(same)} differ only in case, spaces or unseen characters.")
    unseen = [names[number[value]] for value in values if value in known[-1] - known[0]]
    if unseen:
        said.append(f"Only held-out rows have {listed(unseen)}: clients have no such training rows.")
    labels = [np.array([number[value] for value in part.labels], dtype=np.int64) for part in parts]
    return tuple(names), labels, " ".join(said)


def _by_column(rows: Rows) -> list[Rows]:
    where, column = f"the 'split' column of {rows.where}", plain(rows.table["split"])
    splits = np.array(["" if value is None else clean(value) for value in column.to_pylist()])
    refuse_rows(where, "no value", splits == "")
    held_out = next((split for split in ("test", "validation") if split in splits), None)
    if "train" not in splits or held_out is None:
        raise DataError(
            f"{where} has {listed(sorted(set(splits)))}; it needs 'train' and 'test' or 'validation'"
        )
    return [rows.only(splits == split) for split in ("train", held_out)]


def _drawn(rows: Rows, *, by_class: bool) -> tuple[list[Rows], str]:
    """Return training and held-out rows, and a sentence about the division."""
    size, classes = len(rows.labels), np.zeros(len(rows.labels), dtype=np.int64)
    if by_class and len(np.unique(rows.labels)) < size:
        classes = rows.labels
    rng = np.random.default_rng(SPLIT_SEED)
    held_out = np.zeros(size, dtype=bool)
    order = np.argsort(classes, kind="stable")
    for drawn in np.split(order, np.flatnonzero(np.diff(classes[order])) + 1):
        held_out[rng.permutation(drawn)[: round(len(drawn) / HELD_OUT_SHARE)]] = True
    share = f"one in {HELD_OUT_SHARE}{' of each class' if len(np.unique(classes)) > 1 else ''}"
    if not held_out.any():
        raise DataError(
            f"{rows.where} has {size} rows, too few to hold {share} out; give a training and a test "
            "split, or more rows"
        )
    note = (
        f"{rows.where} has no splits: of {size} rows {held_out.sum()} are held out, {share}, drawn with "
        f"seed {SPLIT_SEED}."
    )
    return [rows.only(~held_out), rows.only(held_out)], note


def _limited(rows: Rows, limit: int | None) -> Rows:
    size = len(rows.labels)
    if size == 0:
        raise DataError(f"{rows.where} has no rows; check the file or choose another data set")
    if limit is None or limit >= size:
        return rows
    first = np.random.default_rng(LIMIT_SEED).permutation(size)[:limit]
    return Rows(rows.where, rows.table.take(first), rows.numbers[first], rows.labels[first])
