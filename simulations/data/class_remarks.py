"""``class_remarks``: sentences about classes that lack rows or have similar names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd
from numpy import ndarray

from fedrot.simulations.data.labels import DataSet
from fedrot.simulations.data.read import listed
from fedrot.simulations.data.spelling import reading, seen

#: What files have in place of a missing label; torch ignores -100.
_NO_CLASS = re.compile(r"-1(00)?(\.0*)?|[<#]?(na|n/a|nan|nat|null|none)>?")
#: What the classes without a test row have.
UNTESTED = "no test row: no score knows"


def class_remarks(
    data: DataSet, held_out: ndarray | slice = slice(None)
) -> Iterator[str]:
    """Yield sentences about the classes of a data set; none about scores.

    ``held_out`` are the training rows that clients hold out.
    """
    if data.kind == "regression":
        return
    names = np.array(data.label_names, dtype=object)
    train, test, of_clients = (
        np.bincount(labels, minlength=len(names))
        if data.one_class
        else (labels > 0).sum(axis=0)
        for labels in (
            data.train.labels,
            data.test.labels,
            data.train.labels[held_out],
        )
    )
    missing = [bool(_NO_CLASS.fullmatch(seen(name))) for name in names]
    for which, words in (
        ((train == 0) & (test > 0), "no training row, but test rows: no model knows"),
        (test == 0, UNTESTED),
        (
            (train > 0) & (of_clients == 0),
            "no row that a client holds out: no choice knows",
        ),
        (
            missing,
            "a name that often stands for no label (torch ignores -100): if so, delete",
        ),
    ):
        if np.any(which):
            shown = listed(map(repr, names[which]))
            yield (
                f"{np.sum(which)} of {len(names)} classes have {words} them: {shown}."
            )
    yield from look_alike("classes", data.label_names)


def look_alike(what: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each group of names that a person may read as one."""
    every = pd.Series([*names], dtype=object)
    for _, same in every.groupby([*map(reading, every)], sort=False):
        if len(same) > 1:
            yield (
                f"The {what} {listed(map(repr, same))} differ only in case, spaces, "
                "dashes, quotation marks, unseen characters or how a number is written."
            )
