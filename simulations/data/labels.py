"""Data sets in memory: their labels, and their training and held-out rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import pyarrow.types as types
from numpy import ndarray
from numpy.random import default_rng
from pyarrow import ChunkedArray, Table

from fedrot.simulations.data import Columns, Names
from fedrot.simulations.data.partition import held_out_rows
from fedrot.simulations.data.read import (
    Content,
    Source,
    clean,
    listed,
    refuse,
    refuse_rows,
)
from fedrot.simulations.data.spelling import seen
from fedrot.simulations.scenario import Kind, Scenario
from fedrot.simulations.tasks.task_registry import TASKS

#: Names of classification problems in transformers, by kind of the labels.
PROBLEM_TYPES = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
METRICS_OF_KIND: Mapping[Kind, Names] = {
    "single": ("accuracy", "macro_f1", "ece", "calibrated_loss"),
    "multi": ("macro_f1", "micro_f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}
#: Without splits, one in this number of rows is held out.
HELD_OUT_SHARE = 5
#: Seeds of this division, and of limits.
SPLIT_SEED = 0
LIMIT_SEED = 0
#: Numbers as Python writes them; variation selectors and other letters without a shape.
_INTEGER = re.compile("0|-?[1-9][0-9]{0,999}")
#: The inputs of rows and, if there is one, their ``second``, see ``Split``.
Inputs = Sequence[Sequence[Any]]
Reader: TypeAlias = "Callable[[Rows], Inputs]"
LABEL: Content = (
    "label",
    ("label", "labels", "target", "class"),
    lambda kind: not types.is_nested(kind),
    "one class or score a row, or for several labels a column of true and false each",
)
#: Values of a column ``split``, in lower case.
SPLITS: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
}


@dataclass(frozen=True)
class Split:
    """Rows of one split.

    Attributes:
        labels: int64 ``[n]`` (single label), float32 ``[n, classes]`` of 0 and 1
            (multi-label) or float32 ``[n]`` (regression).
        columns: every other column by name, ``n`` values each.
        inputs: ``n`` texts, tuples of words, or images (uint8 ``[height, width,
            channels]``).
        second: the second texts of pairs, or the tags of words (int64, numbers of
            ``DataSet.tags``).
    """

    labels: ndarray
    columns: Columns
    inputs: Sequence[Any]
    second: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
        label_names: one name per class (``("score",)`` in regression).
        metrics: names for ``evaluate_predictions``, the headline metric first.
        test: the held-out split: validation for GLUE tasks, test for the emotion
            corpora.
        remarks: how labels were read and rows divided, and which files were left out.
        tags: of tagged words, ``O``, and ``B-TYPE`` and ``I-TYPE`` of every type.
        domains: of texts of several domains, those with training rows.
        shape: of images, a model's inputs: height and width in pixels, and channels.
    """

    name: str
    kind: Kind
    label_names: Names
    metrics: Names
    train: Split
    test: Split
    remarks: str = ""
    tags: Names = ()
    domains: Names = ()
    shape: tuple[int, ...] = ()

    @property
    def one_class(self) -> bool:
        """Whether the label of a row is the number of a class."""
        return self.train.labels.dtype == np.int64


class Rows(NamedTuple):
    """Rows of a table.

    Attributes: the table's origin, the rows' numbers there from 1, and their labels as
    in ``Split``.
    """

    where: str
    table: Table
    numbers: ndarray
    labels: ndarray

    def take(self, rows: ndarray) -> Rows:
        return Rows(
            self.where,
            self.table.take(rows),
            self.numbers[rows],
            self.labels[rows],
        )

    def divide(self, train: ndarray, test: ndarray) -> list[Rows]:
        """Return the rows of two masks."""
        return [self.take(np.flatnonzero(mask)) for mask in (train, test)]


def label_columns(source: Source, scenario: Scenario) -> Names:
    """Return the label column, or without one the boolean columns, one for each label.

    With ``label_kind="multi"``, columns of 0 and 1, or of the texts true and false, are
    boolean, too. Without any, return ``()`` for language models, else raise
    ``DataError``.
    """

    def boolean(name: str) -> bool:
        columns = [table[name] for table in source.tables.values()]
        if scenario.label_kind == "multi":
            return all(map(_as_booleans, columns))
        return all(types.is_boolean(column.type) for column in columns)

    if scenario.label_column is None and set(LABEL[1]).isdisjoint(source.columns):
        booleans = [*filter(boolean, source.columns)]
        if len(booleans) >= 2:
            return tuple(source.column(LABEL, name) for name in booleans)
        if not TASKS[scenario.task].uses_labels:
            return ()
    return (source.column(LABEL, scenario.label_column),)


def _as_booleans(column: ChunkedArray) -> bool:
    """Return whether all values can be read as true or false."""
    if types.is_nested(column.type):
        return False
    texts = {str(value).lower() for value in column.unique().to_pylist()}
    return texts <= {"0", "1", "false", "true", "none"}


def labelled(
    source: Source,
    scenario: Scenario,
    columns: Names,
    inputs: Sequence[str],
    read: Reader,
) -> DataSet:
    """Read the labels of complete columns, divide the rows, and read their inputs.

    Without label columns, all rows are of one class. A single table is divided by its
    column ``split``. Without it, one row in five of every class is held out, always the
    same rows, see ``held_out_rows``; without classes (scores, no value twice, or a task
    without labels), one in five of all rows. Limits change no classes. Raises
    ``DataError``.
    """
    wanted = scenario.label_kind
    several = len(columns) > 1
    first = next(iter(source.tables.values()))
    scores = wanted == "regression" and not several
    if wanted == "" and len(columns) == 1:
        arrow = first[columns[0]].type
        exact = types.is_decimal(arrow) and arrow.scale > 0
        scores = exact or types.is_floating(arrow)
    parts = []
    for where, table in source.tables.items():
        numbers = np.arange(len(table)) + 1
        labels = _read(where, table, columns, scores)
        parts.append(Rows(where, table, numbers, labels))
    note = ""
    used = {*columns, *inputs}
    for name in first.column_names:
        if len(parts) == 1 and name not in used and name.lower() == "split":
            parts, note = _by_column(parts[0], name)
            used.add(name)
    labels = np.concatenate([part.labels for part in parts])
    kind: Kind = "single"
    names = columns
    if scores:
        kind = "regression"
        names = ("score",)
    elif not several:
        names, labels = _classes(source, listed(columns), parts, labels)
    elif wanted == "multi" or (labels.sum(axis=1) != 1).any():
        kind = "multi"
        labels = labels.astype(np.float32)
    else:
        labels = labels.argmax(axis=1)
    if columns and wanted not in ("", kind):
        refuse(
            f"label column {listed(columns)}",
            f"holds labels of the kind {kind}, no {wanted}",
            "single needs one class in each row, multi a column of 0 and 1 for each "
            "label",
        )
    ends = [len(part.labels) for part in parts[:-1]]
    of_parts = zip(parts, np.split(labels, ends), strict=True)
    parts = [part._replace(labels=of_part) for part, of_part in of_parts]
    if len(parts) == 1:
        # Models of language know no classes.
        if not TASKS[scenario.task].uses_labels:
            labels = np.zeros(len(labels))
        parts, note = _drawn(parts[0], labels)
    notes = [source.remarks, note]
    if TASKS[scenario.task].classifies:
        notes.append(
            f"Labels: {kind}, {listed(names)} (--set label_kind: single, multi or "
            "regression)."
        )
    train, test = parts
    train_split = _split(train, scenario.train_limit, used, read)
    test_split = _split(test, scenario.test_limit, used, read)
    return DataSet(
        scenario.data,
        kind,
        names,
        METRICS_OF_KIND[kind],
        train_split,
        test_split,
        " ".join(filter(None, notes)),
    )


def _split(
    rows: Rows,
    limit: int | None,
    used: Collection[str],
    read: Reader,
) -> Split:
    """Return at most ``limit`` rows, with inputs, and columns that are not used."""
    size = len(rows.labels)
    if not size:
        refuse(
            rows.where,
            "has no rows",
            "check the file or choose another data set",
        )
    if limit and limit < size:
        rows = rows.take(default_rng(LIMIT_SEED).permutation(size)[:limit])
    others = [name for name in rows.table.column_names if name not in used]
    return Split(rows.labels, rows.table.select(others).to_pydict(), *read(rows))


def _read(
    where: str,
    table: Table,
    columns: Sequence[str],
    scores: bool,
) -> ndarray:
    """Return scores, names of classes, or the booleans of several columns.

    Booleans are ``[rows, columns]``.
    """
    if len(columns) > 1:
        flags = []
        for name in columns:
            texts = map(str, table[name].to_pylist())
            flags.append([text.lower() in ("1", "true") for text in texts])
        return np.array(flags, dtype=bool).T
    # Without label columns, all rows are of one class.
    cells = ["all"] * len(table)
    if columns:
        cells = table[columns[0]].to_pylist()
    where = f"{where}: label column {listed(map(repr, columns))}"
    if scores:
        with np.errstate(over="ignore"):
            values = pd.to_numeric(pd.Series(cells, dtype=object), errors="coerce")
            numbers = values.to_numpy(np.float32)
        refuse_rows(where, "no number of float32", ~np.isfinite(numbers))
        return numbers
    # Rows are many and classes are few: each class is cleaned once.
    named = {cell: _name(cell) for cell in set(cells)}
    names = np.array([named[cell] for cell in cells], dtype=object)
    refuse_rows(where, "no class (a text in UTF-8, or a whole number)", names == "")
    return names


def _name(value: Any) -> str:
    """Return a class as a text, whole numbers without a point; empty if it is none."""
    try:
        text = clean(value.decode() if isinstance(value, bytes) else value)
        if isinstance(value, float | Decimal):
            whole = int(value)
            text = str(whole) if value == whole else ""
    except (ValueError, OverflowError):  # no UTF-8, not finite
        return ""
    return text if seen(text) else ""


def _classes(
    source: Source,
    column: str,
    parts: Sequence[Rows],
    labels: ndarray,
) -> tuple[Names, ndarray]:
    """Return the names of classes, and the classes of the rows."""
    values = set(labels)
    # Texts such as 00012 or 1.10 are no numbers.
    whole = all(map(_INTEGER.fullmatch, values))
    names = {label: label for label in sorted(values, key=int if whole else None)}
    declared = source.class_names.get(column, ())
    if declared:
        names = {str(number): name for number, name in enumerate(declared)}
        for rows in parts:
            refuse_rows(
                rows.where,
                f"labels without a name in the column {column!r}, such as -1,",
                [label not in names for label in rows.labels],
            )
    elif whole and all("label_name" in rows.table.column_names for rows in parts):
        # The first row of a class names it, and training rows come first.
        texts = [
            text for rows in parts for text in rows.table["label_name"].to_pylist()
        ]
        names |= zip(labels[::-1], map(clean, reversed(texts)), strict=True)
    numbers = pd.Index([*names], dtype=object).get_indexer(labels)
    return tuple(names.values()), numbers


def _by_column(rows: Rows, column: str) -> tuple[list[Rows], str]:
    """Return training and held-out rows, and a sentence about others."""
    values = [*map(clean, rows.table[column].to_pylist())]
    splits = np.array([SPLITS.get(value.lower(), "") for value in values])
    # Test rows are preferred to validation rows.
    held_out = sorted({*splits} - {"train"})
    if "train" not in splits or not held_out or "" in held_out:
        refuse(
            f"the column {column!r} of {rows.where}",
            f"has {listed(sorted({*values}))}",
            "it needs 'train', and 'test' or 'validation', and no other or missing "
            "value; rename the column if it does not divide rows for tests",
        )
    parts = rows.divide(splits == "train", splits == held_out[0])
    unused = np.isin(splits, held_out[1:]).sum()
    note = f"{unused} rows of 'validation' are not used, because there are test rows."
    return parts, note if unused else ""


def _drawn(rows: Rows, labels: ndarray) -> tuple[list[Rows], str]:
    """Return training and held-out rows, and a sentence about the division."""
    share = 1 / HELD_OUT_SHARE
    held_out = held_out_rows(labels, share, default_rng(SPLIT_SEED))
    if not held_out.any():
        refuse(
            rows.where,
            f"has {len(labels)} rows, too few to hold one in {HELD_OUT_SHARE} out",
            "give a training and a test split, or more rows",
        )
    note = (
        f"{rows.where} has no splits: of {len(labels)} rows {held_out.sum()} are held "
        f"out, one in {HELD_OUT_SHARE} of each class (at least one, if it has two "
        f"rows), drawn with seed {SPLIT_SEED}."
    )
    return rows.divide(~held_out, held_out), note
