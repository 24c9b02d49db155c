"""Partitions: divisions of training rows among clients."""

from __future__ import annotations

import io
import itertools
import math
import warnings
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy import ndarray
from numpy.random import Generator, default_rng

from fedrot.errors import FedrotError
from fedrot.simulations.data import Columns, Names
from fedrot.simulations.data.read import clean, listed, missing, refuse_rows

Rows = npt.NDArray[np.int64]
#: The rows of each client, or of each class.
Parts = list[Rows]

KINDS = ("iid", "dirichlet", "pathological", "column")
SPECS = "iid, dirichlet:ALPHA, pathological:CLASSES, column:NAME"

#: Largest range of scores that are rounded to integers.
MOST_BINS = 1000
#: Number of equal intervals of wider ranges.
WIDE_BINS = 10


class PartitionError(FedrotError):
    """A partition is unknown, impossible, or leaves a client without rows."""


def parse_partition(spec: str) -> tuple[str, Any]:
    """Return kind and parameter of a partition such as ``dirichlet:0.5``.

    Raises ``PartitionError``.
    """
    kind, _, value = spec.strip().partition(":")
    if kind not in KINDS or (kind == "iid") != (value == ""):
        raise PartitionError(f"unknown partition {spec!r}; choose from {SPECS}")
    if kind in ("iid", "column"):
        return kind, value
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    whole = kind == "pathological"
    if not 0 < number < math.inf or (whole and not number.is_integer()):
        raise PartitionError(
            f"partition {spec!r}: {value!r} is no such number; choose from {SPECS}"
        )
    return kind, int(number) if whole else number


def split_clients(
    split_labels: ndarray,
    columns: Columns,
    partition: str,
    clients: int,
    seed: int,
) -> Parts:
    """Divide the rows of a split among ``clients``, always alike for a seed.

    * ``iid``: a random division into equal parts.
    * ``dirichlet:ALPHA``: each class is divided in Dirichlet(ALPHA) proportions.
    * ``pathological:K``: each client has exactly K classes. With fewer than classes/K
      clients some classes have no client; their rows are dropped. Every other partition
      keeps all rows.
    * ``column:NAME``: one client per value of the column, in the order of the values as
      texts. If there are more values than clients, values are grouped: the most
      frequent first, each into the smallest group. The seed has no influence.

    Args:
        split_labels, columns: see ``Split``; classes are those of ``partition_keys``.
        clients: their number; 0: that of the values of the column.

    Returns:
        For each client a sorted int64 array of row numbers. Arrays are disjoint and not
        empty.

    Raises:
        PartitionError: the rows cannot be divided in this way, or a client would have
            no rows.
    """
    rows = len(split_labels)
    kind, value = parse_partition(partition)
    if not (kind == "column" and clients == 0) and not 1 <= clients <= rows:
        raise PartitionError(
            f"{rows} rows cannot be divided among {clients} clients; give 1 to {rows}"
        )
    keys, _ = partition_keys(split_labels)
    if kind == "iid":
        parts = np.array_split(default_rng(seed).permutation(rows), clients)
    elif kind == "column":
        parts = _column_rows(value, columns, clients)
    else:
        parts = _flower_rows(
            kind,
            value,
            keys,
            clients,
            seed,
        )
    if not all(map(len, parts)):
        raise PartitionError(
            f"partition {partition}: of {clients} clients one would have no rows; use "
            "fewer clients, more rows or a less uneven partition"
        )
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


def partition_keys(
    labels: ndarray,
    names: Names = (),
) -> tuple[Rows, Names]:
    """Return the class by which each row is divided, int64 ``[n]``, and all names.

    Single label: the label. Multi-label: the first label that is 1, or the number of
    labels ("none") if none is; unknown labels (NaN) are not 1. Regression: the score
    rounded to an integer, minus the smallest one if that is negative; for wide ranges
    its interval, see ``MOST_BINS``.
    """
    if labels.ndim == 2:
        positive = labels > 0
        labelled = positive.any(axis=1)
        keys = np.where(labelled, positive.argmax(axis=1), labels.shape[1])
        if not labelled.all():
            names += ("none",)
    elif not np.issubdtype(labels.dtype, np.floating):
        keys = labels
    else:
        low = float(labels.min(initial=0))
        high = float(labels.max(initial=0))
        if high - low > MOST_BINS:
            edges = np.linspace(float(labels.min()), high, WIDE_BINS + 1)
            names = tuple(
                f"{lower:g} to {upper:g}" for lower, upper in itertools.pairwise(edges)
            )
            keys = np.searchsorted(edges[1:-1], labels, side="right")
        else:
            bins = np.rint(labels).astype(np.int64)
            first = bins.min(initial=0)
            last = bins.max(initial=first)
            names = tuple(map(str, range(first, last + 1)))
            keys = bins - first
    return keys.astype(np.int64), names


def _flower_rows(
    kind: str,
    value: Any,
    keys: Rows,
    clients: int,
    seed: int,
) -> Parts:
    from datasets import Dataset
    from flwr_datasets.partitioner import (
        DirichletPartitioner,
        PathologicalPartitioner,
    )

    build: Any = partial(DirichletPartitioner, min_partition_size=1)
    if kind == "pathological":
        build = partial(
            PathologicalPartitioner, class_assignment_mode="first-deterministic"
        )
    partitioner = build(clients, "key", value, shuffle=False, seed=seed)
    partitioner.dataset = Dataset.from_dict({"row": np.arange(len(keys)), "key": keys})
    try:
        # Flower warns of retried draws and dropped classes, which are part of the
        # definitions. Its progress bar would disturb the caller's output.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            parts = [*map(partitioner.load_partition, range(clients))]
    except ValueError as error:
        raise PartitionError(
            f"{kind}:{value}, {clients} clients: {error} Use fewer clients."
        ) from error
    return [part.with_format("numpy")["row"][:] for part in parts]


def _column_rows(
    column: str,
    columns: Columns,
    clients: int,
) -> Parts:
    if column not in columns:
        raise PartitionError(
            f"partition column:{column}: there is no such column beside inputs and "
            f"labels; choose one of {listed(columns) or 'none'}, or another partition"
        )
    values = columns[column]
    refuse_rows(
        f"partition column:{column}",
        "no value",
        [*map(missing, values)],
    )
    names, which = np.unique([*map(clean, values)], return_inverse=True)
    if len(names) < clients:
        raise PartitionError(
            f"partition column:{column}: {len(names)} values for {clients} clients: "
            f"{listed(names)}; leave the number of clients out"
        )
    parts = rows_by_number(which)
    if len(parts) == clients or not clients:
        return parts
    groups: list[list[Rows]] = [[] for _ in range(clients)]
    for part in sorted(parts, key=len, reverse=True):
        smallest = min(groups, key=lambda group: sum(map(len, group)))
        smallest.append(part)
    return [*map(np.concatenate, groups)]


def held_out_rows(
    labels: ndarray,
    share: float,
    rng: Generator,
) -> npt.NDArray[np.bool_]:
    """Return which rows are held out, bool ``[n]``: a share of those of each class.

    Of a class with two or more rows at least one is held out, and one is not. The class
    of a row with several labels is the one with the fewest rows. Scores, and labels
    that all differ, are no classes.
    """
    keys = np.zeros(len(labels), dtype=np.int64)
    if labels.ndim == 2:
        keys, _ = partition_keys(labels[:, np.nansum(labels, axis=0).argsort()])
    elif labels.dtype == np.int64 and len(np.unique(labels)) < len(labels):
        keys = labels
    held_out = np.zeros(len(labels), dtype=bool)
    for members in rows_by_number(keys):
        drawn = rng.permutation(members)[:-1]
        count = max(round(share * len(members)), 1)
        held_out[drawn[:count]] = share > 0
    return held_out


def rows_by_number(numbers: ndarray) -> Parts:
    """Return the rows that have 0, those that have 1, and so on, in order."""
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers))
    return np.split(order, ends[:-1])
