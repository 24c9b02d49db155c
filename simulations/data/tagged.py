"""Data sets of tagged words, for named-entity recognition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from fedrot.simulations.data.sources import Catalogue, DataError, Source, find
from fedrot.simulations.data.texts import DataSet, Split, limited, other_columns, shared_columns

if TYPE_CHECKING:
    import pyarrow as pa

Tags: TypeAlias = npt.NDArray[np.int64]

TOKEN_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("ner_tags", "tags")
METRICS = ("f1", "precision", "recall")
#: The tag of words outside every entity; it has number 0.
OUTSIDE = "O"

NER = Catalogue((".", "ner"))


@dataclass(frozen=True)
class TagSplit(Split):
    """Rows of words with a tag each; a row's labels are the entity types that occur in it.

    Attributes:
        words: the words of each row.
        tags: of each row int64 ``[words]``, numbers of ``TagData.tags``.
    """

    words: Sequence[tuple[str, ...]]
    tags: Sequence[Tags]


@dataclass(frozen=True)
class TagData(DataSet[TagSplit]):
    """A data set of tagged words; ``tags`` are ``O``, and ``B-`` and ``I-`` of every entity type."""

    tags: tuple[str, ...]


def load_tag_data(
    name: str,
    data_dir: Path | None = None,
    *,
    token_column: str | None = None,
    tag_column: str | None = None,
    train_limit: int | None = None,
    test_limit: int | None = None,
) -> TagData:
    """Load tagged words by name, as for texts; in ``data_dir`` they lie directly or below ``ner``.

    Tags are strings in BIO, or numbers that a hub has names for. Rows are multi-label in what they are
    partitioned by: the entity types that occur in them.

    Args:
        token_column: column of lists of words; ``tokens`` or ``words`` if not given.
        tag_column: column of lists of tags; ``ner_tags`` or ``tags`` if not given.
        train_limit: keep this many training rows, the first of a fixed shuffle.
        test_limit: the same for the held-out rows.

    Raises:
        DataError: what texts may lack, too; a row whose words and tags differ in number, a tag that is
            not BIO, or no entity at all.
    """
    source = limited(find(name, data_dir, NER), name, train_limit, test_limit)
    tokens = _list_column(source, token_column, TOKEN_COLUMNS, "text_column")
    column = _list_column(source, tag_column, TAG_COLUMNS, "label_column")
    splits = (("train", source.train), ("held-out", source.test))
    named = [_named(t, column, source.class_names.get(column), f"{name} ({s})") for s, t in splits]
    types = sorted({tag[2:] for rows in named for row in rows for tag in row if tag != OUTSIDE})
    if not types:
        raise DataError(f"{name}: every tag is '{OUTSIDE}', so that there is no entity to recognise")
    tags = (OUTSIDE, *(f"{prefix}-{type_}" for type_ in types for prefix in "BI"))
    train, test = (
        _split(table, f"{name} ({split})", tokens, column, rows, tags)
        for (split, table), rows in zip(splits, named, strict=True)
    )
    return TagData(name, "multi", tuple(types), METRICS, train, test, tags, note=source.note)


def _list_column(source: Source, wanted: str | None, known: Sequence[str], option: str) -> str:
    import pyarrow.types as types

    present = shared_columns(source)
    known = [wanted] if wanted else known
    column = next((c for c in known if c in present), None)
    if column is None:
        raise DataError(
            f"{source.task}: no column {' or '.join(map(repr, known))}; columns are "
            f"{', '.join(present)}; name it as {option}"
        )
    for table in (source.train, source.test):
        kind = table.schema.field(column).type
        if not (types.is_list(kind) or types.is_large_list(kind)):
            raise DataError(f"{source.task}: column {column!r} holds {kind}; give a list for each row")
        if table[column].null_count:
            raise DataError(f"{source.task}: column {column!r} has missing values; remove those rows")
    return column


def _named(table: pa.Table, column: str, names: tuple[str, ...] | None, where: str) -> list[list[str]]:
    """Tags by name, checked."""
    rows = table[column].to_pylist()
    if names is not None:
        rows = [[names[tag] if isinstance(tag, int) else tag for tag in row] for row in rows]
    for tag in {tag for row in rows for tag in row}:
        if tag != OUTSIDE and not (isinstance(tag, str) and tag[:2] in ("B-", "I-") and tag[2:]):
            raise DataError(
                f"{where}: tag {tag!r} in column {column!r} is not BIO; tags are '{OUTSIDE}', 'B-TYPE' "
                "where an entity begins, and 'I-TYPE' where it goes on"
            )
    return rows


def _split(
    table: pa.Table,
    where: str,
    tokens: str,
    column: str,
    named: list[list[str]],
    tags: tuple[str, ...],
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
    # Tags of a type stand next to each other, after the one outside.
    labels = np.zeros((len(words), len(tags) // 2), dtype=np.float32)
    for row, found in enumerate(numbers):
        labels[row, (found[found > 0] - 1) // 2] = 1
    rest = other_columns(table, {tokens, column, "split"})
    return TagSplit(labels, rest, words, numbers)
