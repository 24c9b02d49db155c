"""Data sets in memory, and their labels: single label, multi-label or regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fedrot.simulations.data.sources import DataError, Source

Kind: TypeAlias = Literal["single", "multi", "regression"]
#: More integer classes than this are numbers of another kind.
MOST_CLASSES = 100_000
LABEL_COLUMNS = ("label", "labels", "target", "class")

CLASS_NAMES: Mapping[str, tuple[str, ...]] = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not equivalent", "equivalent"),
    "qqp": ("not duplicate", "duplicate"),
    "rte": ("entailment", "not entailment"),
    "qnli": ("entailment", "not entailment"),
    "mnli": ("entailment", "neutral", "contradiction"),
}
METRICS_OF_KIND: Mapping[Kind, tuple[str, ...]] = {
    "single": ("accuracy", "macro_f1"),
    "multi": ("macro_f1", "micro_f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}


@dataclass(frozen=True)
class Split:
    """Rows of one split; subclasses add the inputs of models.

    Attributes:
        labels: int64 ``[n]`` (single label), float32 ``[n, classes]`` of 0 and 1 (multi-label) or
            float32 ``[n]`` (regression).
        columns: every other column by name, ``n`` values each.
    """

    labels: npt.NDArray[Any]
    columns: Mapping[str, Sequence[object]]

    def __len__(self) -> int:
        return len(self.labels)


S_co = TypeVar("S_co", bound=Split, covariant=True)


@dataclass(frozen=True)
class DataSet(Generic[S_co]):
    """A data set.

    Attributes:
        label_names: one per class (``("score",)`` in regression).
        metrics: names for ``evaluate_predictions``, the headline metric first.
        test: the held-out split: validation for GLUE tasks, test for the emotion corpora.
        note: see ``Source``.
    """

    name: str
    kind: Kind
    label_names: tuple[str, ...]
    metrics: tuple[str, ...]
    train: S_co
    test: S_co
    note: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Labels:
    """The labels of both splits, as in ``Split``, with the kind of task and the class names."""

    kind: Kind
    names: tuple[str, ...]
    train: npt.NDArray[Any]
    test: npt.NDArray[Any]


def label_columns(source: Source, wanted: str | None, *, optional: bool = False) -> tuple[str, ...]:
    """Return the label column, or the boolean columns that are the labels together.

    Without any, return none if labels are ``optional``; else raise ``DataError``.
    """
    if wanted is None and not set(LABEL_COLUMNS) & set(source.columns):
        schema = source.train.schema
        booleans = tuple(c for c in source.columns if pa.types.is_boolean(schema.field(c).type))
        if len(booleans) >= 2:
            return booleans
        if optional:
            return ()
    return (source.column("label", wanted, LABEL_COLUMNS, "--label-column"),)


def labels_of(source: Source, columns: tuple[str, ...]) -> Labels:
    """Read label columns; without any, all rows are of one class.

    Raises ``DataError`` for missing, negative and nested values.
    """
    both = (source.train, source.test)
    if not columns:
        zeros = (np.zeros(table.num_rows, dtype=np.int64) for table in both)
        return Labels("single", ("all",), *zeros)
    if any(table[column].null_count for table in both for column in columns):
        raise DataError(f"{source.task}: label column(s) {', '.join(columns)} have missing values")
    if len(columns) > 1:
        train, test = (np.stack([t[c].to_numpy() for c in columns], axis=1) for t in both)
        if all((rows.sum(axis=1) == 1).all() for rows in (train, test)):
            return Labels("single", columns, train.argmax(axis=1), test.argmax(axis=1))
        return Labels("multi", columns, train.astype(np.float32), test.astype(np.float32))

    (column,) = columns
    type_ = source.train.schema.field(column).type
    if pa.types.is_floating(type_):
        scores = [table[column].to_numpy().astype(np.float32) for table in both]
        return Labels("regression", ("score",), *scores)
    values = [table[column].to_pylist() for table in both]
    if pa.types.is_nested(type_):
        raise DataError(
            f"{source.task}: label column {column!r} holds {type_}; give integers, strings or "
            "float scores, or one boolean column per label"
        )
    if pa.types.is_integer(type_):
        return Labels("single", *_integer_classes(source, column, values))
    names = sorted(set(values[0]) | set(values[1]))
    number = {value: index for index, value in enumerate(names)}
    train, test = (np.array([number[v] for v in rows], dtype=np.int64) for rows in values)
    return Labels("single", tuple(map(str, names)), train, test)


def _integer_classes(
    source: Source, column: str, values: list[list[int]]
) -> tuple[tuple[str, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    train, test = (np.array(rows, dtype=np.int64) for rows in values)
    if min(train.min(), test.min()) < 0:
        raise DataError(
            f"{source.task}: label column {column!r} has negative values, which usually stand for "
            "rows without a label; remove those rows"
        )
    classes = int(max(train.max(), test.max())) + 1
    if classes > MOST_CLASSES:
        raise DataError(
            f"{source.task}: label column {column!r} has the class {classes - 1}; number classes from 0 "
            f"and below {MOST_CLASSES}, or give them as texts"
        )
    names = source.class_names.get(column) or CLASS_NAMES.get(source.task)
    if names is None and "label_name" in source.train.column_names:
        named = dict(zip(values[0], source.train["label_name"].to_pylist(), strict=True))
        names = tuple(str(named.get(index, index)) for index in range(classes))
    if names is None or len(names) < classes:
        names = tuple(str(index) for index in range(classes))
    return names, train, test
