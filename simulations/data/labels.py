"""Labels of data sets: their columns, their kind, and rows without a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from fedrot.simulations.data.data_set import Kind
from fedrot.simulations.data.sources import Content, DataError, Selection, Source, listed

#: Largest number of classes. A column with more values does not hold classes.
MOST_CLASSES = 100_000
#: Texts for a missing label: those of pyarrow for missing numbers, and Python's.
NO_LABEL = (*pa_csv.ConvertOptions().null_values, "None", "<NA>")
LABEL = Content(
    "label",
    "integers, strings or float scores, or one boolean column per label",
    ("label", "labels", "target", "class"),
    "--label-column",
    lambda kind: not pa.types.is_nested(kind),
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


@dataclass(frozen=True)
class Labels:
    """The labels of both splits, as in ``Split``, their kind, and the class names.

    ``said`` has sentences for the user about how the labels were read.
    """

    kind: Kind
    names: tuple[str, ...]
    train: npt.NDArray[Any]
    test: npt.NDArray[Any]
    said: str = ""


def label_columns(source: Source, wanted: str | None, *, optional: bool = False) -> tuple[str, ...]:
    """Return the label column, or several boolean columns with one label each.

    Without a label column, return ``()`` if labels are ``optional``, else raise ``DataError``.
    """
    if wanted is None and not set(LABEL.known) & set(source.columns):
        schema = source.train.schema
        booleans = tuple(c for c in source.columns if pa.types.is_boolean(schema.field(c).type))
        if len(booleans) >= 2:
            return booleans
        if optional:
            return ()
    return (source.column(LABEL, wanted),)


def complete(
    source: Source, content: Content, columns: Sequence[str], labels: Sequence[str], selection: Selection
) -> Source:
    """Return the source without rows that lack content or a label; raises ``DataError``.

    A label is missing if it is null, a number that is not finite, a negative class, or a text of
    ``NO_LABEL``. A list is missing if an item is null. ``selection["missing"]``: ``error`` raises for
    such rows, ``drop`` leaves them out, ``keep`` makes negative numbers and texts such as NA classes.
    """
    tables, said = {}, []
    for where, table in source.tables.items():
        lacking = {(content, column): _is_null(table[column]) for column in columns}
        lacking |= {(LABEL, column): _unlabelled(table[column], selection) for column in labels}
        every = np.logical_or.reduce([np.zeros(table.num_rows, dtype=bool), *lacking.values()])
        if every.any():
            if selection.get("missing") != "drop":
                (kind, column), found = next(item for item in lacking.items() if item[1].any())
                lack = _lack(table[column], found)
                raise DataError(f"{where}: {kind.name} column {column!r} has {lack}")
            if every.all():
                raise DataError(f"{where}: no row is complete; choose other columns or data")
            lacked = listed(repr(column) for (_, column), rows in lacking.items() if rows.any())
            said.append(f"{every.sum()} of {table.num_rows} rows of {where} lack {lacked}: left out.")
            table = table.filter(pa.array(~every))
        tables[where] = table
    return replace(source, tables=tables, said=" ".join(said))


def _unlabelled(column: pa.ChunkedArray, selection: Selection) -> npt.NDArray[np.bool_]:
    """Return where a label is missing, ``[rows]``; negative scores are not missing."""
    column, kept = _plain(column), selection.get("missing") == "keep"
    none = _is_null(column)
    if pa.types.is_floating(column.type):
        none |= ~np.isfinite(column.to_numpy())
        negative = selection.get("label_kind") == "single"
    else:
        negative = pa.types.is_integer(column.type) and selection.get("label_kind") != "regression"
    if negative and not kept:
        none |= pc.less(column, 0).fill_null(False).to_numpy()
    if pa.types.is_string(column.type) and not kept:
        texts = pc.utf8_trim_whitespace(column)
        none |= pc.is_in(texts, pa.array(NO_LABEL, pa.string())).to_numpy()
    return none


def _lack(column: pa.ChunkedArray, found: npt.NDArray[np.bool_]) -> str:
    """Return a message: what is missing, in which rows, and what to do."""
    values = _plain(column.filter(pa.array(found)))
    written = values.null_count < len(values) and not pa.types.is_nested(values.type)
    negative = written and pa.types.is_integer(values.type)
    what = "negative values, which usually stand for missing labels," if negative else "missing values"
    # The number of lists is not that of missing values, because only a part of a list may be missing.
    counted = what if pa.types.is_nested(values.type) else f"{len(values)} {what}"
    shown = f" ({listed(dict.fromkeys(map(_shown, values.to_pylist())))})" if written else ""
    classes = negative or (written and pa.types.is_string(values.type))
    keep = ", or --missing keep makes them classes" if classes else ""
    return (
        f"{counted}{shown} in row(s) {listed(np.flatnonzero(found) + 1)}, counted from 1; "
        f"complete these rows, or --missing drop leaves them out{keep}"
    )


def _is_null(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Return where a value, or an item of a list, is null, ``[rows]``."""
    none: npt.NDArray[np.bool_] = column.is_null().to_numpy().copy()
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        rows = pc.list_parent_indices(column).filter(pc.list_flatten(column).is_null())
        none[rows.to_numpy()] = True
    return none


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column with categories and large strings as strings, and decimals as numbers."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        kind = pa.string()
    if pa.types.is_decimal(kind) or pa.types.is_float16(kind):
        kind = pa.float64()
    return column if kind == column.type else column.cast(kind)


def _shown(value: object) -> str:
    return "empty" if value is None or str(value).strip() == "" else str(value)


def labels_of(
    source: Source,
    columns: tuple[str, ...],
    kind: Kind | Literal[""] = "",
    whole: Source | None = None,
) -> Labels:
    """Read label columns without missing values; without a column, all rows are of one class.

    Classes are the values that occur, or the values for which the source has names.

    Args:
        kind: kind of labels; empty: ``regression`` for floating-point numbers, ``multi`` for boolean
            columns if a row has not exactly one True, else ``single``.
        whole: the source without limits; limits do not change the classes.

    Raises:
        DataError: values do not fit the kind.
    """
    both, whole = (source.train, source.test), whole or source
    if not columns:
        train, test = (np.zeros(table.num_rows, dtype=np.int64) for table in both)
        return Labels("single", ("all",), train, test)
    if len(columns) > 1:
        return _boolean_labels(source, columns, kind)
    (column,) = columns
    type_, other = (_plain(table[column]).type for table in both)
    where = f"{source.task}: label column {column!r}"
    if pa.types.is_string(type_) != pa.types.is_string(other):
        raise DataError(
            f"{where} holds {type_} in training rows and {other} in held-out rows; use one type in both"
        )
    if kind == "multi":
        raise DataError(f"{where} has one label for a row; for several, give a boolean column per label")
    if kind == "regression" or (not kind and pa.types.is_floating(type_)):
        return _scores(where, [table[column] for table in both], given=bool(kind))
    return _classes(source, column, whole)


def _boolean_labels(source: Source, columns: tuple[str, ...], kind: Kind | Literal[""]) -> Labels:
    names = listed(columns)
    if kind == "regression":
        raise DataError(f"{source.task}: the label columns {names} are boolean and hold no scores")
    train, test = (
        np.stack([t[c].to_numpy() for c in columns], axis=1) for t in (source.train, source.test)
    )
    single = all((rows.sum(axis=1) == 1).all() for rows in (train, test))
    if kind == "single" and not single:
        raise DataError(
            f"{source.task}: a row has no label, or several, in the columns {names}; --label-kind "
            "single needs one in each row, multi takes any number"
        )
    if single and kind != "multi":
        said = f"Labels: {len(columns)} classes in the columns {names}, exactly one in each row."
        return Labels("single", columns, train.argmax(axis=1), test.argmax(axis=1), said)
    said = f"Labels: any number of {len(columns)} in each row, in the columns {names}."
    return Labels("multi", columns, train.astype(np.float32), test.astype(np.float32), said)


def _scores(where: str, columns: Sequence[pa.ChunkedArray], *, given: bool) -> Labels:
    try:
        both = [_plain(column).cast(pa.float64()).to_numpy() for column in columns]
    except pa.ArrowException as error:
        raise DataError(
            f"{where} holds no numbers ({error}); --label-kind single makes them classes"
        ) from error
    with np.errstate(over="ignore"):
        train, test = (scores.astype(np.float32) for scores in both)
    every = np.concatenate([train, test])
    if not np.isfinite(every).all():
        raise DataError(f"{where} has scores beyond the range of float32; scale or remove them")
    said = f"Labels: scores from {every.min():g} to {every.max():g} (regression)."
    if not given and (every == np.rint(every)).all():
        said += " All are whole numbers: if they are classes, give --label-kind single."
    return Labels("regression", ("score",), train, test, said)


def _classes(source: Source, column: str, whole: Source) -> Labels:
    train, test, *every = (
        _class_values(source, column, table)
        for table in (source.train, source.test, whole.train, whole.test)
    )
    known = [set(values) for values in every]
    values = sorted(known[0] | known[1])
    if len(values) > MOST_CLASSES:
        raise DataError(
            f"{source.task}: label column {column!r} has {len(values)} classes, above the maximum of "
            f"{MOST_CLASSES}; choose another column, or --label-kind regression"
        )
    names = tuple(map(str, values))
    whole_numbers = isinstance(values[0], int) and not isinstance(values[0], bool)
    if whole_numbers:
        declared = source.class_names.get(column) or CLASS_NAMES.get(source.task) or ()
        if values[0] >= 0 and values[-1] < len(declared):
            values, names = [*range(len(declared))], declared
        elif "label_name" in whole.columns:
            # If training and held-out rows differ, the name in the training rows is used.
            tables = zip((whole.test, whole.train), reversed(every), strict=True)
            named = {
                value: name
                for table, rows in tables
                for value, name in zip(rows, table["label_name"].to_pylist(), strict=True)
            }
            names = tuple(str(named[value]) for value in values)
    number = {value: index for index, value in enumerate(values)}
    classes = "1 class" if len(values) == 1 else f"{len(values)} classes"
    said = [f"Labels: {classes} in the column {column!r}: {listed(names)}."]
    if whole_numbers and not (source.class_names.get(column) or "label_name" in whole.columns):
        said.append("If these numbers are scores, give --label-kind regression.")
    unseen = [names[number[value]] for value in sorted(known[1] - known[0])]
    if unseen:
        said.append(f"Only held-out rows have {listed(unseen)}: clients have no such training rows.")
    return Labels(
        "single",
        names,
        np.array([number[value] for value in train], dtype=np.int64),
        np.array([number[value] for value in test], dtype=np.int64),
        " ".join(said),
    )


def _class_values(source: Source, column: str, table: pa.Table) -> list[Any]:
    values = _plain(table[column])
    if pa.types.is_string(values.type):
        values = pc.utf8_trim_whitespace(values)
    if pa.types.is_floating(values.type):
        try:
            values = values.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{source.task}: label column {column!r} has numbers that are not whole ({error}); "
                "--label-kind regression makes them scores"
            ) from error
    found: list[Any] = values.to_pylist()
    return found
