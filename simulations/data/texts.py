"""Data sets for simulations, and those of texts: bundled, in Parquet files, or from a hub.

Heavy imports stay inside functions, because every client message may start a fresh process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fedrot.simulations.data.sources import BUNDLED, DataError, Source, find
from fedrot.simulations.tasks.scores import Kind, evaluate_predictions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "BUNDLED",
    "DataError",
    "DataSet",
    "Split",
    "TextData",
    "TextSplit",
    "evaluate_predictions",
    "load_text_data",
]

LIMIT_SEED = 0

PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
)
TEXT_COLUMNS = ("text", "sentence", "content", "review", "comment", "tweet", "utterance")
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
METRICS_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "cola": ("matthews", "accuracy", "macro_f1"),
    "mrpc": ("accuracy", "macro_f1", "f1"),
    "qqp": ("accuracy", "macro_f1", "f1"),
}
METRICS_OF_KIND: Mapping[Kind, tuple[str, ...]] = {
    "single": ("accuracy", "macro_f1"),
    "multi": ("macro_f1", "micro_f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}


@dataclass(frozen=True)
class Split:
    """One split of a data set, row by row; subclasses hold what models read.

    Attributes:
        labels: int64 ``[n]`` (single label), float32 ``[n, classes]`` of 0 and 1 (multi-label) or
            float32 ``[n]`` (regression); what partitions by class divide.
        columns: every other column by name, ``n`` values each; natural partitions use them.
    """

    labels: npt.NDArray[Any]
    columns: Mapping[str, Sequence[object]]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TextSplit(Split):
    """Rows of text.

    Attributes:
        texts: the text, or the first sentence of a pair.
        pairs: the second sentence of each pair, or ``None``.
    """

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None


S_co = TypeVar("S_co", bound=Split, covariant=True)


@dataclass(frozen=True)
class DataSet(Generic[S_co]):
    """A data set: rows with labels, for training and held out.

    Attributes:
        kind: single label, multi-label or regression.
        label_names: one per class (``("score",)`` in regression).
        metrics: names for ``evaluate_predictions``, the headline metric first.
        test: the held-out split: validation for GLUE tasks, test for the emotion corpora.
        note: how the rows were divided, in a sentence, if there were no splits.
    """

    name: str
    kind: Kind
    label_names: tuple[str, ...]
    metrics: tuple[str, ...]
    train: S_co
    test: S_co
    note: str = field(default="", kw_only=True)


TextData: TypeAlias = DataSet[TextSplit]


def load_text_data(
    name: str = BUNDLED,
    data_dir: Path | None = None,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    train_limit: int | None = None,
    test_limit: int | None = None,
) -> TextData:
    """Load a data set by name.

    A name is looked up in ``data_dir`` first (``<name>/train.parquet`` beside a held-out split,
    ``<name>.parquet``, or ``<name>_train.parquet``; directly or below ``glue``, ``emotion`` and
    ``embedded``), then among the bundled data, then on the hub (``owner/name`` or
    ``owner/name:configuration``), which needs a network. A name that ends in ``.parquet``, ``.csv`` or
    ``.jsonl`` is the path of a file. Where a file has no column ``split``, one row in five of each
    class is held out, always the same ones.

    Args:
        text_column: column of the text, ``"first,second"`` for pairs; guessed if not given.
        label_column: column of integer or string classes, or float scores; guessed if not given.
            Without one, boolean columns are the labels: single label if every row has exactly one
            True, else multi-label.
        train_limit: keep this many training rows, the first of a fixed shuffle.
        test_limit: the same for the held-out rows.

    Raises:
        DataError: unknown data set (what is available is listed), unreadable file, missing
            column (the columns are listed), empty split, or missing values.
    """
    source = limited(find(name, data_dir, label=label_column), name, train_limit, test_limit)
    text_columns = _text_columns(source, text_column)
    label_columns = find_labels(source, label_column)
    labels = labels_of(source, label_columns)
    metrics = METRICS_OF_TASK.get(source.task) if labels.kind == "single" else None
    used = {*text_columns, *label_columns, "split"}
    return DataSet(
        name=name,
        kind=labels.kind,
        label_names=labels.names,
        metrics=metrics or METRICS_OF_KIND[labels.kind],
        train=_split(source.train, f"{name} (train)", text_columns, labels.train, used),
        test=_split(source.test, f"{name} (held-out)", text_columns, labels.test, used),
        note=source.note,
    )


def limited(source: Source, name: str, train: int | None, test: int | None) -> Source:
    """Keep at most so many rows of each split, the first of a fixed shuffle.

    Raises:
        DataError: a split has no rows, or a limit is below 1.
    """
    return replace(
        source,
        train=_limited(source.train, f"{name} (train)", train),
        test=_limited(source.test, f"{name} (held-out)", test),
    )


def _limited(table: pa.Table, where: str, limit: int | None) -> pa.Table:
    if table.num_rows == 0:
        raise DataError(f"{where} has no rows; check the file or choose another data set")
    if limit is None or limit >= table.num_rows:
        return table
    if limit < 1:
        raise DataError(f"the limit for {where} is {limit}; it must be at least 1")
    return table.take(np.random.default_rng(LIMIT_SEED).permutation(table.num_rows)[:limit])


def _text_columns(source: Source, wanted: str | None) -> tuple[str, ...]:
    present = shared_columns(source)
    if wanted is not None:
        columns = tuple(column.strip() for column in wanted.split(","))
        missing = [column for column in columns if column not in present]
        if missing or len(columns) > 2:
            problem = f"no column {missing[0]!r}" if missing else "at most two text columns"
            raise DataError(f"{source.task}: {problem}; columns are {', '.join(present)}")
        return columns
    for columns in (*PAIR_COLUMNS, *((column,) for column in TEXT_COLUMNS)):
        if set(columns) <= set(present):
            return columns
    raise DataError(
        f"{source.task}: no text column found among {', '.join(present)}; name it as text_column "
        "('first,second' for pairs)"
    )


def find_labels(source: Source, wanted: str | None) -> tuple[str, ...]:
    """Return the label column, or the boolean columns that are the labels together.

    Raises:
        DataError: there is none, or not the one that is wanted (the columns are listed).
    """
    import pyarrow.types as types

    present = shared_columns(source)
    if wanted is not None:
        if wanted not in present:
            raise DataError(
                f"{source.task}: no label column {wanted!r}; columns are {', '.join(present)}"
            )
        return (wanted,)
    for column in LABEL_COLUMNS:
        if column in present:
            return (column,)
    schema = source.train.schema
    columns = tuple(c for c in present if types.is_boolean(schema.field(c).type))
    if len(columns) < 2:
        raise DataError(
            f"{source.task}: no label column found among {', '.join(present)}; name it as label_column"
        )
    return columns


def shared_columns(source: Source) -> list[str]:
    """Return the columns that both splits have."""
    held_out = set(source.test.column_names)
    return [column for column in source.train.column_names if column in held_out]


@dataclass(frozen=True)
class Labels:
    """Kind of task, class names, and the labels of both splits, as in ``Split``."""

    kind: Kind
    names: tuple[str, ...]
    train: npt.NDArray[Any]
    test: npt.NDArray[Any]


def labels_of(source: Source, columns: tuple[str, ...]) -> Labels:
    """Read label columns; raises ``DataError`` for missing, negative and nested values."""
    import pyarrow.types as types

    both = (source.train, source.test)
    if any(table[column].null_count for table in both for column in columns):
        raise DataError(f"{source.task}: label column(s) {', '.join(columns)} have missing values")
    if len(columns) > 1:
        train, test = (np.stack([t[c].to_numpy() for c in columns], axis=1) for t in both)
        if all((rows.sum(axis=1) == 1).all() for rows in (train, test)):
            return Labels("single", columns, train.argmax(axis=1), test.argmax(axis=1))
        return Labels("multi", columns, train.astype(np.float32), test.astype(np.float32))

    (column,) = columns
    type_ = source.train.schema.field(column).type
    if types.is_floating(type_):
        scores = [table[column].to_numpy().astype(np.float32) for table in both]
        return Labels("regression", ("score",), *scores)
    values = [table[column].to_pylist() for table in both]
    if types.is_nested(type_):
        raise DataError(
            f"{source.task}: label column {column!r} holds {type_}; give integers, strings or "
            "float scores, or one boolean column per label"
        )
    if types.is_integer(type_):
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
    names = source.class_names.get(column) or CLASS_NAMES.get(source.task)
    if names is None and "label_name" in source.train.column_names:
        named = dict(zip(values[0], source.train["label_name"].to_pylist(), strict=True))
        names = tuple(str(named.get(index, index)) for index in range(classes))
    if names is None or len(names) < classes:
        names = tuple(str(index) for index in range(classes))
    return names, train, test


def _split(
    table: pa.Table,
    where: str,
    text_columns: tuple[str, ...],
    labels: npt.NDArray[Any],
    used: set[str],
) -> TextSplit:
    for column in text_columns:
        if table[column].null_count:
            raise DataError(
                f"{where}: text column {column!r} has {table[column].null_count} missing values; "
                "remove those rows"
            )
    texts, *pairs = (tuple(map(str, table[column].to_pylist())) for column in text_columns)
    return TextSplit(
        texts=texts,
        pairs=pairs[0] if pairs else None,
        labels=labels,
        columns=other_columns(table, used),
    )


def other_columns(table: pa.Table, used: set[str]) -> dict[str, list[object]]:
    """Return the values of all columns but the used ones."""
    return {name: table[name].to_pylist() for name in table.column_names if name not in used}
