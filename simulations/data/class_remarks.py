"""What a user has to know of classes: without rows, alike, or perhaps no classes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from decimal import Decimal

import numpy as np
import pandas as pd
from numpy import ndarray

from fedrot.simulations.data.labels import DataSet, seen
from fedrot.simulations.data.read import listed

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", re.ASCII)
_WORDS = {"true": "1", "yes": "1", "false": "0", "no": "0"}
#: Minus and the slashes of fractions, and marks that stand for quotation marks.
_SIGNS = str.maketrans("\u2212\u2044\u2215", "-//", "'\"`\xb4\u02bc\u2032\u201a\u201e")
#: What files have in place of a missing label; torch ignores -100.
_NO_CLASS = re.compile(r"-1(00)?(\.0*)?|[<#]?(na|n/a|nan|nat|null|none)>?")


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
        if data.kind == "single"
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
        ((train > 0) & (test == 0), "no test row: no score knows"),
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
            yield (
                f"{np.sum(which)} of {len(names)} classes have {words} them: "
                f"{listed(map(repr, names[which]))}."
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


def reading(name: str) -> object:
    """Return a number, or the letters of a text in lower case."""
    text = unicodedata.normalize("NFKC", name.translate(_SIGNS))
    text = seen("".join(map(_sign, text.translate(_SIGNS))))
    text = _WORDS.get(text, text)
    if _NUMBER.fullmatch(text):
        return Decimal(text)
    return text.replace("-", "") or name


def _sign(letter: str) -> str:
    """Return a dash as "-", a digit as 0 to 9, "_" and quotation marks as nothing."""
    kind = unicodedata.category(letter)
    if kind in ("Pc", "Pi", "Pf"):
        return ""
    return "-" if kind == "Pd" else str(unicodedata.decimal(letter, letter))
