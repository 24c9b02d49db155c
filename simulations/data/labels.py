"""Data sets in memory: their labels, and the division of rows into training and
held-out ones.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.types as types

from fedrot.simulations.data.read import Content, Source, listed, refuse, refuse_rows
from fedrot.simulations.experiment import Experiment

Kind: TypeAlias = Literal["single", "multi", "regression"]
METRICS_OF_KIND: Mapping[Kind, tuple[str, ...]] = {
    "single": ("accuracy", "macro_f1"),
    "multi": ("macro_f1", "micro_f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}
#: Without splits, one in this number of rows is held out. Seeds of this division and of
#: limits.
HELD_OUT_SHARE, SPLIT_SEED, LIMIT_SEED = 5, 0, 0
#: Numbers as Python writes them; variation selectors and other letters without a shape.
_INTEGER = re.compile("0|-?[1-9][0-9]{0,999}")
_SHAPELESS = re.compile("[\ufe00-\ufe0f\u034f\u115f\u1160\u3164\uffa0]")
LABEL: Content = (
    "label",
    ("label", "labels", "target", "class"),
    lambda kind: not types.is_nested(kind),
)


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

    labels: np.ndarray
    columns: Mapping[str, Sequence[object]]
    inputs: Sequence[Any]
    second: Sequence[Any] | None = None

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
        said: how labels were read and rows divided, and which files were left out.
        tags: of tagged words, ``O``, and ``B-TYPE`` and ``I-TYPE`` of every type.
        domains: of texts of several domains, those with training rows.
        side, channels: of images, the side of a model's inputs in pixels, and 1 or 3.
    """

    name: str
    kind: Kind
    label_names: tuple[str, ...]
    metrics: tuple[str, ...]
    train: Split
    test: Split
    said: str = ""
    tags: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    side: int = 0
    channels: int = 0


class Rows(NamedTuple):
    """Rows of a table: its origin, their numbers there from 1, and their labels as in
    ``Split``.
    """

    where: str
    table: pa.Table
    numbers: np.ndarray
    labels: np.ndarray

    def take(self, rows: np.ndarray) -> Rows:
        return Rows(
            self.where, self.table.take(rows), self.numbers[rows], self.labels[rows]
        )


def clean(text: object) -> str:
    """Return a text without spaces around it and in Unicode's composed form (NFC)."""
    return unicodedata.normalize("NFC", str(text)).strip()


def label_columns(source: Source, experiment: Experiment) -> tuple[str, ...]:
    """Return the label column, or without one the boolean columns, one for each label.

    With ``label_kind="multi"``, columns of 0 and 1, or of the texts true and false, are
    boolean, too. Without any, return ``()`` for language models, else raise
    ``DataError``.
    """

    def boolean(column: pa.ChunkedArray) -> bool:
        if experiment.label_kind != "multi" or types.is_nested(column.type):
            return types.is_boolean(column.type)
        found = {str(value).lower() for value in column.unique().to_pylist()}
        return found <= {"0", "1", "false", "true", "none"}

    if experiment.label_column is None and not set(LABEL[1]) & set(source.columns):
        tables = source.tables.values()
        booleans = [
            name
            for name in source.columns
            if all(boolean(table[name]) for table in tables)
        ]
        if len(booleans) >= 2:
            return tuple(source.column(LABEL, name) for name in booleans)
        if experiment.task in ("mlm", "clm"):
            return ()
    return (source.column(LABEL, experiment.label_column),)


def labelled(
    source: Source,
    experiment: Experiment,
    columns: Sequence[str],
    inputs: Sequence[str],
    read: Callable[[Rows], Sequence[Sequence[Any]]],
) -> DataSet:
    """Read the labels of complete columns, divide the rows, and read their inputs.

    Without label columns, all rows are of one class. A single table is divided by its
    column ``split``. Without it, one row in five of every class in the label column is
    held out, always the same rows; without classes (not one column, scores, or no value
    twice), one in five of all rows. Limits change no classes. Raises ``DataError``.
    """
    asked, several = experiment.label_kind, len(columns) > 1
    first = next(iter(source.tables.values()))
    types_ = [first.schema.field(name).type for name in columns]
    fractions = any(
        types.is_floating(t) or (types.is_decimal(t) and t.scale > 0) for t in types_
    )
    scores = not several and (asked == "regression" or (not asked and fractions))
    parts = [
        Rows(
            where,
            table,
            np.arange(len(table)) + 1,
            _read(where, table, columns, scores),
        )
        for where, table in source.tables.items()
    ]
    if len(parts) == 1 and "split" in first.column_names:
        parts = _by_column(parts[0])
    labels = np.concatenate([rows.labels for rows in parts])
    kind: Kind = "regression" if scores else "single"
    names, alike = ("score",) if scores else tuple(columns), ""
    if several:
        if asked == "multi" or (labels.sum(axis=1) != 1).any():
            kind = "multi"
        labels = (
            labels.argmax(axis=1) if kind == "single" else labels.astype(np.float32)
        )
    elif not scores:
        names, labels, alike = _classes(source, listed(columns), parts)
    if columns and asked and asked != kind:
        advice = (
            "single needs one class in each row, multi a column of 0 and 1 for each "
            "label"
        )
        refuse(
            f"label column {listed(columns)}",
            f"holds labels of the kind {kind}, no {asked}",
            advice,
        )
    ends = np.cumsum([len(rows.labels) for rows in parts])
    parts = [
        r._replace(labels=own)
        for r, own in zip(parts, np.split(labels, ends), strict=False)
    ]
    parts, note = (
        (parts, "")
        if len(parts) > 1
        else _drawn(parts[0], kind == "single" and not several)
    )
    limits, used = (
        (experiment.train_limit, experiment.test_limit),
        {*columns, *inputs, "split"},
    )
    splits = []
    for rows, limit in zip(parts, limits, strict=True):
        if not (size := len(rows.labels)):
            refuse(
                rows.where, "has no rows", "check the file or choose another data set"
            )
        if limit is not None and limit < size:
            rows = rows.take(
                np.random.default_rng(LIMIT_SEED).permutation(size)[:limit]
            )
        others = [name for name in rows.table.column_names if name not in used]
        splits.append(
            Split(rows.labels, rows.table.select(others).to_pydict(), *read(rows))
        )
    said = (
        f"Labels: {kind}, {listed(names)} (--set label_kind: single, multi or "
        f"regression).{alike}"
    )
    spoken = said if experiment.task in ("classification", "image") else ""
    said = " ".join(filter(None, (source.said, note, spoken)))
    return DataSet(
        experiment.data, kind, names, METRICS_OF_KIND[kind], splits[0], splits[1], said
    )


def _read(
    where: str, table: pa.Table, columns: Sequence[str], scores: bool
) -> np.ndarray:
    """Return scores, booleans of several columns ``[rows, columns]``, or the names of
    classes.
    """
    if len(columns) > 1:
        flags = [
            [str(cell).lower() in ("1", "true") for cell in table[c].to_pylist()]
            for c in columns
        ]
        return np.array(flags, dtype=bool).T
    cells = table[columns[0]].to_pylist() if columns else ["all"] * len(table)
    where = f"{where}: label column {listed(map(repr, columns))}"
    if scores:
        with np.errstate(over="ignore"):
            read = pd.to_numeric(pd.Series(cells, dtype=object), errors="coerce")
            numbers = read.to_numpy(np.float32)
        refuse_rows(where, "no number of float32", ~np.isfinite(numbers))
        return numbers
    named = {cell: _name(cell) for cell in set(cells)}
    texts = np.array([named[cell] for cell in cells], dtype=object)
    refuse_rows(where, "no class (a text in UTF-8, or a whole number)", texts == "")
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
    seen = (
        c for c in text if unicodedata.category(c) not in ("Cc", "Cf", "Zs", "Zl", "Zp")
    )
    return _SHAPELESS.sub("", clean("".join(seen).casefold()))


def _classes(
    source: Source, column: str, parts: list[Rows]
) -> tuple[tuple[str, ...], np.ndarray, str]:
    """Return the names of classes, the classes of the rows, and what looks alike."""
    every = [label for rows in parts for label in rows.labels]
    # Texts such as 00012 or 1.10 are no numbers.
    whole = all(map(_INTEGER.fullmatch, set(every)))
    values = sorted(set(every), key=int if whole else None)
    names = {value: value for value in values}
    if declared := source.class_names.get(column, ()):
        names = {str(number): name for number, name in enumerate(declared)}
        for rows in parts:
            what = f"labels without a name in the column {column!r}, such as -1,"
            refuse_rows(rows.where, what, [label not in names for label in rows.labels])
    elif whole and all("label_name" in rows.table.column_names for rows in parts):
        given = [
            clean(name)
            for rows in parts
            for name in rows.table["label_name"].to_pylist()
        ]
        first = dict(
            zip(reversed(every), reversed(given), strict=True)
        )  # training rows come first
        names = {value: first[value] for value in values}
    said = ""
    for _, alike in groupby(sorted(names.values(), key=_seen), _seen):
        if len(same := [*map(repr, alike)]) > 1:
            said += (
                f" The classes {listed(same)} differ only in case, spaces or unseen "
            )
            said += "characters."
    number = {value: index for index, value in enumerate(names)}
    return (
        tuple(names.values()),
        np.array([number[label] for label in every], dtype=np.int64),
        said,
    )


def _by_column(rows: Rows) -> list[Rows]:
    splits = np.array([clean(cell) for cell in rows.table["split"].to_pylist()])
    held_out = next((split for split in ("test", "validation") if split in splits), "")
    if "train" not in splits or not held_out or {"", "None"} & {*splits}:
        what = f"has {listed(sorted(set(splits)))}"
        advice = "it needs 'train' and 'test' or 'validation', and a value in each row"
        refuse(f"the 'split' column of {rows.where}", what, advice)
    return [rows.take(np.flatnonzero(splits == split)) for split in ("train", held_out)]


def _drawn(rows: Rows, by_class: bool) -> tuple[list[Rows], str]:
    """Return training and held-out rows, and a sentence about the division."""
    size = len(rows.labels)
    by_class = by_class and len(np.unique(rows.labels)) < size
    classes = rows.labels if by_class else np.zeros(size, dtype=np.int64)
    rng = np.random.default_rng(SPLIT_SEED)
    held_out = np.zeros(size, dtype=bool)
    order = np.argsort(classes, kind="stable")
    for drawn in np.split(order, np.flatnonzero(np.diff(classes[order])) + 1):
        held_out[rng.permutation(drawn)[: round(len(drawn) / HELD_OUT_SHARE)]] = True
    share = (
        "one in "
        f"{HELD_OUT_SHARE}{' of each class' if len(np.unique(classes)) > 1 else ''}"
    )
    if not held_out.any():
        what = f"has {size} rows, too few to hold {share} out"
        refuse(rows.where, what, "give a training and a test split, or more rows")
    how = f"{held_out.sum()} are held out, {share}, drawn with seed {SPLIT_SEED}"
    note = f"{rows.where} has no splits: of {size} rows {how}."
    return [rows.take(np.flatnonzero(mask)) for mask in (~held_out, held_out)], note
