"""Data sets of texts, of pairs of texts, and of tagged words for named-entity recognition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as types

from fedrot.simulations.data import BUNDLED
from fedrot.simulations.data.data_set import METRICS_OF_KIND, DataSet, Split
from fedrot.simulations.data.labels import complete, label_columns, labels_of
from fedrot.simulations.data.sources import (
    Catalogue,
    Content,
    DataError,
    Selection,
    Source,
    find,
    other_columns,
)

PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
)
TEXT = Content(
    "text",
    "one text per row",
    ("text", "sentence", "content", "review", "comment", "tweet", "utterance"),
    "--text-column (two, separated by a comma, for pairs)",
    lambda kind: not (types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind)),
)

METRICS_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "cola": ("matthews", "accuracy", "macro_f1"),
    "mrpc": ("accuracy", "macro_f1", "f1"),
    "qqp": ("accuracy", "macro_f1", "f1"),
}

Tags: TypeAlias = npt.NDArray[np.int64]


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind)


_LISTS = "a list for each row"
WORDS = Content("word", _LISTS, ("tokens", "words"), "--text-column", _is_list)
TAGS = Content("tag", _LISTS, ("ner_tags", "tags"), "--label-column", _is_list)
TAG_METRICS = ("f1", "precision", "recall")
#: The tag of words outside of all entities; its number is 0.
OUTSIDE = "O"

NER = Catalogue((".", "ner"))


@dataclass(frozen=True)
class TextSplit(Split):
    """Rows of texts; ``pairs`` has the second text of each pair, or is None."""

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None


TextData: TypeAlias = DataSet[TextSplit]


def load_text_data(
    name: str = BUNDLED,
    data_dir: Path | None = None,
    *,
    labels_optional: bool = False,
    **selection: Unpack[Selection],
) -> TextData:
    """Load a data set by name.

    A name is looked up in ``data_dir`` first (``<name>/train.parquet`` next to a held-out split,
    ``<name>.parquet``, or ``<name>_train.parquet`` next to a held-out split; directly or below ``glue``,
    ``emotion`` and ``embedded``), then among the bundled data, then on the hub (``owner/name`` or
    ``owner/name:configuration``). A name that ends in one of ``READERS`` is a file; rows of plain text
    are its paragraphs. A file without a column ``split`` has one row in five of each class held out,
    always the same rows. If labels are optional, all rows of a data set without labels are of one class.

    Raises:
        DataError: unknown data set, unreadable file, missing column, empty split, or missing values.
    """
    source = find(name, data_dir)
    texts = _text_columns(source, selection.get("text_column"))
    chosen = label_columns(source, selection.get("label_column"), optional=labels_optional)
    whole = complete(source, TEXT, texts, chosen, selection).divided(chosen)
    source = whole.limited(name, selection)
    labels = labels_of(source, chosen, selection.get("label_kind", ""), whole)
    metrics = METRICS_OF_TASK.get(source.task) if labels.kind == "single" else None
    return DataSet(
        name=name,
        kind=labels.kind,
        label_names=labels.names,
        metrics=metrics or METRICS_OF_KIND[labels.kind],
        train=_text_split(source.train, texts, chosen, labels.train),
        test=_text_split(source.test, texts, chosen, labels.test),
        note=source.note,
        # Language models do not use the labels.
        said=" ".join(filter(None, (source.said, "" if labels_optional else labels.said))),
    )


def _text_columns(source: Source, wanted: str | None) -> tuple[str, ...]:
    names = [name.strip() for name in (wanted or "").split(",")]
    if len(names) > 2:
        raise DataError(f"{source.where}: {TEXT.option} has {len(names)} columns; give one or two")
    pair = next((pair for pair in PAIR_COLUMNS if set(pair) <= set(source.columns)), (None,))
    return tuple(source.column(TEXT, name) for name in (pair if wanted is None else names))


def _text_split(
    table: pa.Table, texts: tuple[str, ...], label_columns: tuple[str, ...], labels: npt.NDArray[Any]
) -> TextSplit:
    first, *second = (tuple(map(str, table[column].to_pylist())) for column in texts)
    others = other_columns(table, *texts, *label_columns)
    return TextSplit(labels, others, first, second[0] if second else None)


@dataclass(frozen=True)
class TagSplit(Split):
    """Rows of words. ``tags`` are int64 numbers of ``TagData.tags``; labels are entity types."""

    words: Sequence[tuple[str, ...]]
    tags: Sequence[Tags]


@dataclass(frozen=True)
class TagData(DataSet[TagSplit]):
    """A data set of tagged words; ``tags`` are ``O``, and ``B-TYPE`` and ``I-TYPE`` of every type."""

    tags: tuple[str, ...]


def load_tag_data(name: str, data_dir: Path | None = None, **selection: Unpack[Selection]) -> TagData:
    """Load tagged words by name, like ``load_text_data``; ``data_dir`` may have a folder ``ner``.

    Tags are BIO strings, or numbers for which the hub has names. Labels are the entity types in a row
    (multi-label). Raises ``DataError``, also if tags are not BIO, or if a row has too few or too many.
    """
    source = find(name, data_dir, NER)
    tokens = source.column(WORDS, selection.get("text_column"))
    column = source.column(TAGS, selection.get("label_column"))
    whole = complete(source, WORDS, [tokens], [column], selection).divided()
    source = whole.limited(name, selection)
    splits = {f"{name} ({split})": table for split, table in source.tables.items()}
    named = [_named(t, column, source.class_names.get(column), where) for where, t in splits.items()]
    types = sorted({tag[2:] for rows in named for row in rows for tag in row if tag != OUTSIDE})
    if not types:
        raise DataError(f"{name}: every tag is '{OUTSIDE}', so there is no entity; choose other data")
    tags = (OUTSIDE, *(f"{prefix}-{type_}" for type_ in types for prefix in "BI"))
    train, test = (
        _tag_split(table, where, tokens, column, rows, tags)
        for (where, table), rows in zip(splits.items(), named, strict=True)
    )
    notes = {"note": source.note, "said": source.said}
    return TagData(name, "multi", tuple(types), TAG_METRICS, train, test, tags, **notes)


def _named(table: pa.Table, column: str, names: tuple[str, ...] | None, where: str) -> list[list[str]]:
    """Return the tags of each row as strings; raises ``DataError`` if one is not BIO."""
    rows = table[column].to_pylist()
    if names is not None:
        rows = [[names[tag] if isinstance(tag, int) else tag for tag in row] for row in rows]
    for tag in {tag for row in rows for tag in row}:
        if tag != OUTSIDE and not (isinstance(tag, str) and tag[:2] in ("B-", "I-") and tag[2:]):
            raise DataError(
                f"{where}: tag {tag!r} in column {column!r} is not BIO; tags are '{OUTSIDE}', 'B-TYPE' "
                "at the first word of an entity, and 'I-TYPE' at the others"
            )
    return rows


def _tag_split(
    table: pa.Table, where: str, tokens: str, column: str, named: list[list[str]], tags: tuple[str, ...]
) -> TagSplit:
    number = {tag: index for index, tag in enumerate(tags)}
    words = [tuple(map(str, row)) for row in table[tokens].to_pylist()]
    for row, (ours, theirs) in enumerate(zip(words, named, strict=True)):
        if len(ours) != len(theirs):
            raise DataError(
                f"{where}, row {row}: {len(ours)} words in {tokens!r} and {len(theirs)} tags in "
                f"{column!r}; each word needs one tag"
            )
    numbers = [np.array([number[tag] for tag in row], dtype=np.int64) for row in named]
    # Type t has the tags 2t + 1 and 2t + 2.
    labels = np.zeros((len(words), len(tags) // 2), dtype=np.float32)
    for row, found in enumerate(numbers):
        labels[row, (found[found > 0] - 1) // 2] = 1
    return TagSplit(labels, other_columns(table, tokens, column), words, numbers)
