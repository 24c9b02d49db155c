"""Data sets of texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import numpy.typing as npt

from fedrot.simulations.data.data_set import METRICS_OF_KIND, DataSet, Split, label_columns, labels_of
from fedrot.simulations.data.sources import (
    BUNDLED,
    DataError,
    Selection,
    Source,
    find,
    other_columns,
)

if TYPE_CHECKING:
    import pyarrow as pa

PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
)
TEXT_COLUMNS = ("text", "sentence", "content", "review", "comment", "tweet", "utterance")

#: The option that names the columns.
OPTION = "--text-column (two, separated by a comma, for pairs)"

METRICS_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "cola": ("matthews", "accuracy", "macro_f1"),
    "mrpc": ("accuracy", "macro_f1", "f1"),
    "qqp": ("accuracy", "macro_f1", "f1"),
}


@dataclass(frozen=True)
class TextSplit(Split):
    """Rows of texts; ``pairs`` holds the second sentence of each pair, if there are pairs."""

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None


TextData: TypeAlias = DataSet[TextSplit]


def load_text_data(
    name: str = BUNDLED, data_dir: Path | None = None, **selection: Unpack[Selection]
) -> TextData:
    """Load a data set by name.

    A name is looked up in ``data_dir`` first (``<name>/train.parquet`` beside a held-out split,
    ``<name>.parquet``, or ``<name>_train.parquet``; directly or below ``glue``, ``emotion`` and
    ``embedded``), then among the bundled data, then on the hub (``owner/name`` or
    ``owner/name:configuration``). A name that ends in ``.parquet``, ``.csv`` or ``.jsonl`` is the path
    of a file. Without a column ``split``, one row in five of each class is held out, always the same.

    Raises:
        DataError: unknown data set (the message lists the available ones), unreadable file, missing
            column (the message lists the columns), empty split, or missing values.
    """
    label = selection.get("label_column")
    source = find(name, data_dir, label=label).limited(name, selection)
    texts, chosen = _text_columns(source, selection.get("text_column")), label_columns(source, label)
    labels = labels_of(source, chosen)
    metrics = METRICS_OF_TASK.get(source.task) if labels.kind == "single" else None
    return DataSet(
        name=name,
        kind=labels.kind,
        label_names=labels.names,
        metrics=metrics or METRICS_OF_KIND[labels.kind],
        train=_split(source.train, f"{name} (train)", texts, chosen, labels.train),
        test=_split(source.test, f"{name} (held-out)", texts, chosen, labels.test),
        note=source.note,
    )


def _text_columns(source: Source, wanted: str | None) -> tuple[str, ...]:
    if wanted is None:
        pair = next((pair for pair in PAIR_COLUMNS if set(pair) <= set(source.columns)), None)
        return pair or (source.column("text", None, TEXT_COLUMNS, OPTION),)
    names = [name.strip() for name in wanted.split(",")]
    if len(names) > 2:
        raise DataError(f"{source.task}: {OPTION} names {len(names)} columns; a text has one or two")
    return tuple(source.column("text", name, (), OPTION) for name in names)


def _split(
    table: pa.Table,
    where: str,
    texts: tuple[str, ...],
    label_columns: tuple[str, ...],
    labels: npt.NDArray[Any],
) -> TextSplit:
    for column in texts:
        if table[column].null_count:
            raise DataError(
                f"{where}: text column {column!r} has {table[column].null_count} missing values; "
                "remove those rows"
            )
    first, *second = (tuple(map(str, table[column].to_pylist())) for column in texts)
    others = other_columns(table, *texts, *label_columns)
    return TextSplit(labels, others, first, second[0] if second else None)
