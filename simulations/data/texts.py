"""Data sets of texts, of pairs of texts, and of tagged words for named-entity recognition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as types

from fedrot.simulations.data.labels import DataSet, Rows, Split, clean, label_columns, labelled
from fedrot.simulations.data.read import Content, DataError, Source, find

if TYPE_CHECKING:
    from fedrot.simulations.settings import Experiment

PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
)
METRICS_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "cola": ("matthews", "accuracy", "macro_f1"),
    **dict.fromkeys(("mrpc", "qqp"), ("accuracy", "macro_f1", "f1")),
}
TAG_METRICS = ("f1", "precision", "recall")
#: The tag of words outside of all entities; its number is 0.
OUTSIDE = "O"
Tags: TypeAlias = npt.NDArray[np.int64]


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind)


TEXT = Content(
    "text",
    ("text", "sentence", "content", "review", "comment", "tweet", "utterance"),
    "--text-column (two, separated by a comma, for pairs)",
    "one text per row",
    lambda kind: not (types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind)),
)
WORDS = Content("word", ("tokens", "words"), "--text-column", "a list for each row", _is_list)
TAGS = Content("tag", ("ner_tags", "tags"), "--label-column", "a list for each row", _is_list)


@dataclass(frozen=True)
class TextSplit(Split):
    """Rows of texts; ``pairs`` has the second text of each pair, or is None."""

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None


TextData: TypeAlias = DataSet[TextSplit]


def load_texts(experiment: Experiment, *, labels_optional: bool = False) -> TextData:
    """Load the texts of an experiment, see ``read.find``; raises ``DataError``.

    If labels are optional, all rows of a data set without labels are of one class.
    """
    source = find(experiment.data, experiment.data_dir)
    texts = _text_columns(source, experiment.text_column)
    columns = label_columns(source, experiment, optional=labels_optional)
    data = labelled(source, columns, experiment)
    train, test = (_text_split(rows, texts, columns) for rows in (data.train, data.test))
    changed: dict[str, Any] = {"train": train, "test": test}
    if data.kind == "single" and source.task in METRICS_OF_TASK:
        changed["metrics"] = METRICS_OF_TASK[source.task]
    if labels_optional:
        changed["said"] = source.said  # language models do not use the labels
    return TextData(**{**vars(data), **changed})


def _text_columns(source: Source, wanted: str | None) -> list[str]:
    names = [name.strip() for name in (wanted or "").split(",")]
    if len(names) > 2:
        raise DataError(f"--text-column has {len(names)} columns; give one or two")
    pair = next((pair for pair in PAIR_COLUMNS if set(pair) <= set(source.columns)), (None,))
    return [source.column(TEXT, name) for name in (pair if wanted is None else names)]


def _text_split(rows: Rows, texts: Sequence[str], labels: Sequence[str]) -> TextSplit:
    first, *second = (tuple(map(str, rows.table[column].to_pylist())) for column in texts)
    return TextSplit(rows.labels, rows.columns(*texts, *labels), first, second[0] if second else None)


@dataclass(frozen=True)
class TagSplit(Split):
    """Rows of words. ``tags`` are int64 numbers of ``TagData.tags``; labels are entity types."""

    words: Sequence[tuple[str, ...]]
    tags: Sequence[Tags]


@dataclass(frozen=True)
class TagData(DataSet[TagSplit]):
    """A data set of tagged words; ``tags`` are ``O``, and ``B-TYPE`` and ``I-TYPE`` of every type."""

    tags: tuple[str, ...]


def load_tags(experiment: Experiment) -> TagData:
    """Load the tagged words of an experiment, see ``read.find``.

    Tags are BIO strings, or numbers for which the hub has names. Labels are the entity types in a row
    (multi-label). Raises ``DataError``, also if tags are not BIO, or if a row has too few or too many.
    """
    source = find(experiment.data, experiment.data_dir)
    tokens = source.column(WORDS, experiment.text_column)
    column = source.column(TAGS, experiment.label_column)
    data = labelled(source, (), experiment)
    parts = (data.train, data.test)
    tagged = [_tagged(rows, tokens, column, source.class_names.get(column)) for rows in parts]
    types = sorted({tag[2:] for _, tags in tagged for row in tags for tag in row if tag != OUTSIDE})
    if not types:
        raise DataError(f"{data.name}: every tag is '{OUTSIDE}', no entity; choose other data")
    names = (OUTSIDE, *(f"{prefix}-{type_}" for type_ in types for prefix in "BI"))
    number = {tag: index for index, tag in enumerate(names)}
    splits: list[TagSplit] = []
    for rows, (words, tags) in zip(parts, tagged, strict=True):
        numbers = [np.array([number[tag] for tag in row], dtype=np.int64) for row in tags]
        labels = np.zeros((len(words), len(types)), dtype=np.float32)
        for row, found in enumerate(numbers):
            labels[row, (found[found > 0] - 1) // 2] = 1  # type t has the tags 2t + 1 and 2t + 2
        splits.append(TagSplit(labels, rows.columns(tokens, column), words, numbers))
    train, test = splits
    return TagData(data.name, "multi", tuple(types), TAG_METRICS, train, test, names, note=data.note)


def _tagged(
    rows: Rows, tokens: str, column: str, names: Sequence[str] | None
) -> tuple[list[tuple[str, ...]], list[list[str]]]:
    """Return the words and the tags of each row; raises ``DataError`` if a tag is not BIO."""
    words = [tuple(map(str, row)) for row in rows.table[tokens].to_pylist()]
    tags = rows.table[column].to_pylist()
    if names is not None:
        tags = [[names[tag] if isinstance(tag, int) else tag for tag in row] for row in tags]
    tags = [[clean(tag) for tag in row] for row in tags]
    for number, ours, theirs in zip(rows.numbers, words, tags, strict=True):
        if len(ours) != len(theirs):
            raise DataError(
                f"{rows.where}, row {number}: {len(ours)} words in {tokens!r} and {len(theirs)} tags in "
                f"{column!r}; each word needs one tag"
            )
        wrong = [tag for tag in theirs if tag != OUTSIDE and not (tag[:2] in ("B-", "I-") and tag[2:])]
        if wrong:
            raise DataError(
                f"{rows.where}, row {number}: tag {wrong[0]!r} in column {column!r} is not BIO; tags "
                f"are '{OUTSIDE}', 'B-TYPE' at the first word of an entity, and 'I-TYPE' at the others"
            )
    return words, tags
