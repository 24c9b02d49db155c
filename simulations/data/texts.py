"""Data sets of texts and their pairs, of tagged words, and of texts of several
domains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.types as types

from fedrot.simulations.data.labels import (
    DataSet,
    Rows,
    Split,
    clean,
    label_columns,
    labelled,
)
from fedrot.simulations.data.read import Content, find, listed, refuse
from fedrot.simulations.experiment import Experiment

PAIRS = (
    "sentence1,sentence2",
    "question1,question2",
    "premise,hypothesis",
    "question,sentence",
)
#: The tag of words outside of all entities, whose number is 0; all tags.
OUTSIDE, _BIO = "O", re.compile("O|[BI]-.+", re.DOTALL)
#: The column with the name of a row's domain.
DOMAIN = "domain"
#: The metrics over all domains with training rows, and over those without.
SEEN, UNSEEN = "macro_f1", "unseen_macro_f1"
TEXT: Content = (
    "text",
    ("text", "sentence", "content", "review", "comment", "tweet", "utterance"),
    lambda kind: not types.is_nested(kind) and "binary" not in str(kind),
)
WORDS: Content = (
    "word list",
    ("tokens", "words"),
    lambda kind: "list<" in str(kind)[:11],
)
TAGS: Content = ("tag list", ("ner_tags", "tags"), WORDS[2])


def load_texts(experiment: Experiment) -> DataSet:
    """Load the texts, or pairs of texts, of an experiment, see ``read.find``; raises
    ``DataError``.
    """
    source = find(experiment.data, experiment.data_dir)
    pair = next(
        (pair for pair in PAIRS if {*pair.split(",")} <= {*source.columns}), None
    )
    chosen = experiment.text_column or pair
    wanted: Sequence[str | None] = chosen.split(",") if chosen else [None]
    if len(wanted) > 2:
        refuse("--text-column", f"has {len(wanted)} columns", "give one or two")
    texts = [source.column(TEXT, name) for name in wanted]

    def read(rows: Rows) -> list[tuple[str, ...]]:
        return [tuple(map(str, rows.table[column].to_pylist())) for column in texts]

    return labelled(source, experiment, label_columns(source, experiment), texts, read)


def load_tags(experiment: Experiment) -> DataSet:
    """Load the tagged words of an experiment, see ``read.find``.

    Tags are BIO strings, or numbers for which the hub has names. Labels are the entity
    types in a row (multi-label). Raises ``DataError``, also if tags are not BIO, or if
    a row has too few or too many.
    """
    source = find(experiment.data, experiment.data_dir)
    columns = (
        source.column(WORDS, experiment.text_column),
        source.column(TAGS, experiment.label_column),
    )
    names = source.class_names.get(columns[1])

    def read(rows: Rows) -> tuple[Sequence[tuple[str, ...]], Sequence[Sequence[str]]]:
        words, tags = (rows.table[column].to_pylist() for column in columns)
        tags = [
            [clean(names[t] if names and isinstance(t, int) else t) for t in row]
            for row in tags
        ]
        for number, ours, theirs in zip(rows.numbers, words, tags, strict=True):
            if len(ours) != len(theirs) or not all(map(_BIO.fullmatch, theirs)):
                what = (
                    f"has {len(ours)} words in {columns[0]!r}, and in {columns[1]!r} "
                    f"{listed(theirs)}"
                )
                refuse(
                    f"{rows.where}, row {number}",
                    what,
                    "each word needs a tag: O, B-TYPE or I-TYPE",
                )
        return [tuple(map(str, row)) for row in words], tags

    data = labelled(source, experiment, (), columns, read)
    every = [*(data.train.second or ()), *(data.test.second or ())]
    entities = sorted({tag[2:] for tags in every for tag in tags if tag != OUTSIDE})
    if not entities:
        refuse(
            f"{data.name}: every tag", f"is '{OUTSIDE}', no entity", "choose other data"
        )
    tags = (OUTSIDE, *(f"{prefix}-{entity}" for entity in entities for prefix in "BI"))
    train, test = (_numbered(split, tags) for split in (data.train, data.test))
    types_, metrics = tuple(entities), ("f1", "precision", "recall")
    return DataSet(
        data.name, "multi", types_, metrics, train, test, data.said, tags=tags
    )


def _numbered(split: Split, tags: Sequence[str]) -> Split:
    number = {tag: index for index, tag in enumerate(tags)}
    numbers = [
        np.array([number[tag] for tag in row], dtype=np.int64)
        for row in split.second or ()
    ]
    labels = np.zeros((len(numbers), len(tags) // 2), dtype=np.float32)
    for row, found in zip(labels, numbers, strict=True):
        row[(found[found > 0] - 1) // 2] = 1  # type t has the tags 2t + 1 and 2t + 2
    return replace(split, labels=labels, second=numbers)


def load_domains(experiment: Experiment) -> DataSet:
    """Load texts; several names in ``data``, or ``unseen_data``, are the domains of one
    task.

    The labels of the task, of which a row may have several, are those of all sets in
    ``data``; equal names are one label. Labels that a domain lacks are NaN in its rows.
    Limits are per domain. Of unseen domains, the test rows and the labels of the task
    are kept. Raises ``DataError``, also if two data sets have the same name, if one has
    scores, pairs or classes without names, or if an unseen one has none of the labels.
    """
    named = [
        [name.strip() for name in names.split(",") if name.strip()]
        for names in (experiment.data, experiment.unseen_data)
    ]
    domains, every = tuple(named[0]), [*named[0], *named[1]]
    loaded = {
        n: load_texts(experiment.model_copy(update={"data": n}))
        for n in dict.fromkeys(every)
    }
    if len(every) == 1:
        return loaded[every[0]]
    if len(set(map(metric_of, every))) < len(every):
        refuse(
            "two data sets",
            f"have the same name among {listed(every)}",
            "rename one of them",
        )
    labels = tuple(
        dict.fromkeys(label for name in domains for label in loaded[name].label_names)
    )
    for name, data in loaded.items():
        numbers = all(label.removeprefix("-").isdigit() for label in data.label_names)
        several = data.kind == "multi" or not (data.kind == "regression" or numbers)
        if data.train.second or not several or not {*data.label_names} & {*labels}:
            what = (
                "has scores, pairs, numbers for classes, or none of the labels "
                f"{listed(labels)}"
            )
            refuse(
                f"'{name}'",
                what,
                "domains need single texts, and classes with common names",
            )
    metrics = (SEEN, *([UNSEEN] if named[1] else []), *map(metric_of, every))
    train = _united(
        {name: (loaded[name], loaded[name].train) for name in domains}, labels
    )
    test = _united({name: (data, data.test) for name, data in loaded.items()}, labels)
    said = " ".join(filter(None, (data.said for data in loaded.values())))
    return DataSet(
        ",".join(domains), "multi", labels, metrics, train, test, said, domains=domains
    )


def metric_of(domain: str) -> str:
    """Return the metric's name for the macro F1 of one domain."""
    return f"f1_{Path(domain).stem}"


def _united(parts: Mapping[str, tuple[DataSet, Split]], labels: Sequence[str]) -> Split:
    domains = [name for name, (_, split) in parts.items() for _ in range(len(split))]
    tables = []
    for data, split in parts.values():
        own = (
            split.labels
            if data.kind == "multi"
            else np.eye(len(data.label_names))[split.labels]
        )
        tables.append(
            pd.DataFrame(own, columns=[*data.label_names]).reindex(columns=labels)
        )
    texts = tuple(text for _, split in parts.values() for text in split.inputs)
    return Split(pd.concat(tables).to_numpy(np.float32), {DOMAIN: domains}, texts)
