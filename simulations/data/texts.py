"""Data sets of texts and pairs, of tagged words, and of several domains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow.types as types

from fedrot.simulations.data.labels import (
    DataSet,
    Inputs,
    Rows,
    Split,
    label_columns,
    labelled,
)
from fedrot.simulations.data.read import Content, clean, find, listed, refuse
from fedrot.simulations.scenario import Scenario, data_names, names_in

PAIRS = (
    "sentence1,sentence2",
    "question1,question2",
    "premise,hypothesis",
    "question,sentence",
)
#: The tag of words outside of all entities, whose number is 0.
OUTSIDE = "O"
_BIO = re.compile("O|[BI]-.+", re.DOTALL)
#: The column with the name of a row's domain.
DOMAIN = "domain"
#: The metric over all domains.
MEAN_F1 = "macro_f1"
TEXT: Content = (
    "text",
    ("text", "sentence", "content", "review", "comment", "tweet", "utterance"),
    lambda kind: not types.is_nested(kind) and "binary" not in str(kind),
    "one text a row",
)
WORDS: Content = (
    "word list",
    ("tokens", "words"),
    lambda kind: "list<" in str(kind)[:11],
    "a list of words for each row",
)
TAGS: Content = (
    "tag list",
    ("ner_tags", "tags"),
    WORDS[2],
    "a list for each row, with O, B-TYPE or I-TYPE for each word",
)


def load_texts(scenario: Scenario) -> DataSet:
    """Load the texts, or pairs of texts, of a scenario, see ``read.find``.

    Raises ``DataError``.
    """
    source = find(scenario.data, scenario.data_dir)
    usual = (pair for pair in PAIRS if set(pair.split(",")).issubset(source.columns))
    chosen = scenario.text_column or next(usual, None)
    wanted: Sequence[str | None] = [None]
    if chosen:
        wanted = names_in(chosen, source.columns.__contains__) or [chosen]
    if len(wanted) > 2:
        refuse(
            "--text-column",
            f"has {len(wanted)} columns",
            "give one or two",
        )
    columns = [source.column(TEXT, name) for name in wanted]

    def read(rows: Rows) -> Inputs:
        return [tuple(map(str, rows.table[column].to_pylist())) for column in columns]

    return labelled(
        source,
        scenario,
        label_columns(source, scenario),
        columns,
        read,
    )


def load_tags(scenario: Scenario) -> DataSet:
    """Load the tagged words of a scenario, see ``read.find``.

    Tags are BIO strings, or numbers for which the hub has names. Labels are the entity
    types in a row (multi-label). Raises ``DataError``, also if tags are not BIO, or if
    a row has too few or too many.
    """
    source = find(scenario.data, scenario.data_dir)
    words_column = source.column(WORDS, scenario.text_column)
    tags_column = source.column(TAGS, scenario.label_column)
    names = source.class_names.get(tags_column)

    def name_of(tag: Any) -> str:
        if names and isinstance(tag, int) and 0 <= tag < len(names):
            tag = names[tag]
        return clean(tag)

    def read(rows: Rows) -> Inputs:
        sentences = rows.table[words_column].to_pylist()
        cells = rows.table[tags_column].to_pylist()
        tags = []
        for number, words, cell in zip(rows.numbers, sentences, cells, strict=True):
            of_words = [*map(name_of, cell)]
            if len(words) != len(of_words) or not all(map(_BIO.fullmatch, of_words)):
                in_words = f"has {len(words)} words in {words_column!r}"
                refuse(
                    f"{rows.where}, row {number}",
                    f"{in_words}, and in {tags_column!r} {listed(of_words)}",
                    "each word needs a tag: O, B-TYPE or I-TYPE; numbers have names in "
                    "data sets of the hub alone",
                )
            tags.append(of_words)
        return [tuple(map(str, words)) for words in sentences], tags

    data = labelled(
        source,
        scenario,
        (),
        (words_column, tags_column),
        read,
    )
    used = {OUTSIDE}.union(*data.train.second, *data.test.second)
    entities = sorted({tag[2:] for tag in used - {OUTSIDE}})
    if not entities:
        refuse(
            f"{data.name}: every tag",
            f"is '{OUTSIDE}', no entity",
            "choose other data",
        )
    tags = [OUTSIDE]
    for entity in entities:
        tags += [f"B-{entity}", f"I-{entity}"]
    return replace(
        data,
        kind="multi",
        label_names=tuple(entities),
        metrics=("f1", "precision", "recall"),
        train=_numbered(data.train, tags),
        test=_numbered(data.test, tags),
        tags=tuple(tags),
    )


def _numbered(split: Split, tags: Sequence[str]) -> Split:
    """Return a split with numbers for tags, and a row's entities as its labels."""
    rows = []
    labels = np.zeros((len(split), len(tags) // 2), dtype=np.float32)
    for row, names in enumerate(split.second):
        numbers = np.array([*map(tags.index, names)], dtype=np.int64)
        # Entity t has the tags 2t + 1 and 2t + 2.
        entities = (numbers[numbers > 0] - 1) // 2
        labels[row, entities] = 1
        rows.append(numbers)
    return replace(split, labels=labels, second=rows)


def load_domains(scenario: Scenario) -> DataSet:
    """Load texts of one data set, or of several, the domains of one task.

    The labels of the task, of which a row may have several, are those of all sets;
    equal names are one label. Labels that a domain lacks are NaN in its rows. Limits
    are per domain. Raises ``DataError``, also if two data sets have the same name, or
    if one has scores, pairs or classes without names.
    """
    domains = data_names(scenario.data, scenario.data_dir)
    loaded = {}
    # Names of the hub come last: beside a missing file they may be a part of its path.
    by_place = sorted(domains, key=lambda name: "/" in name and not Path(name).suffix)
    for name in dict.fromkeys(by_place):
        alone = scenario.model_copy(update={"data": name})
        loaded[name] = load_texts(alone)
    loaded = {name: loaded[name] for name in domains}
    if len(domains) == 1:
        return loaded[domains[0]]
    metrics = [*map(metric_of, domains)]
    if len(set(metrics)) < len(domains):
        refuse(
            "two data sets",
            f"have the same name among {listed(domains)}",
            "rename one of them",
        )
    names = [name for data in loaded.values() for name in data.label_names]
    labels = tuple(dict.fromkeys(names))
    for name, data in loaded.items():
        if not _joinable(data):
            refuse(
                f"'{name}'",
                "has scores, pairs, or numbers for classes",
                "domains need single texts, and classes with common names",
            )
    train = _united(loaded, "train", labels)
    test = _united(loaded, "test", labels)
    notes = (data.remarks for data in loaded.values() if data.remarks)
    return DataSet(
        ",".join(domains),
        "multi",
        labels,
        (MEAN_F1, *metrics),
        train,
        test,
        " ".join(notes),
        domains=tuple(domains),
    )


def _joinable(data: DataSet) -> bool:
    """Return whether a data set has single texts, and classes with names."""
    if data.train.second or data.kind == "regression":
        return False
    if data.kind == "multi":
        return True
    return not all(label.removeprefix("-").isdigit() for label in data.label_names)


def metric_of(domain: str) -> str:
    """Return the metric's name for the macro F1 of one domain."""
    return f"f1_{Path(domain).stem}"


def _united(
    parts: Mapping[str, DataSet],
    name: Literal["train", "test"],
    labels: Sequence[str],
) -> Split:
    """Return the rows of all domains, with NaN for labels that a domain lacks."""
    domains: list[str] = []
    texts: list[str] = []
    tables = []
    for domain, data in parts.items():
        split: Split = getattr(data, name)
        flags = split.labels
        if data.kind != "multi":
            flags = np.eye(len(data.label_names))[flags]
        table = pd.DataFrame(flags, columns=data.label_names)
        tables.append(table.reindex(columns=labels))
        domains += [domain] * len(split)
        texts += split.inputs
    values = pd.concat(tables).to_numpy(np.float32)
    return Split(values, {DOMAIN: domains}, tuple(texts))
