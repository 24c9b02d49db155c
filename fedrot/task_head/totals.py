"""``Totals``: clients' class sums, added as they arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.task_head.covariance import class_means
from fedrot.task_head.sums import ClassSums, from_triangle
from fedrot.task_head.votes import capped

#: Groups of clients, each of which can be left out. Memory does not grow with the
#: number of clients.
GROUPS = 8

#: All clients have the same network: the mean square of a group's features is at most
#: so many times that of the median group's, or the group's sums are left out.
LONGEST = 10.0

#: The sums of groups of clients, by the number of the group.
Groups = Mapping[int, ClassSums]

#: Fewer rows of a class, in all groups that are not left out, do not tell its mean.
SCARCE = 10

#: Sums are kept as multiples of these units, 40 bits apart.
_UNITS = tuple(2.0**power for power in (80, 40, 0, -40, -80, -120))

#: Bytes of totals for each entry of a triangle of sums.
BYTES = 8 * GROUPS * len(_UNITS)

#: The largest value of a sum.
_LARGEST = 1e30


class Totals:
    """Sums of clients' class sums, with the same bits in every order of arrival.

    A client's rows count at most as ``capped`` says. Sums are split at fixed powers of
    two, and the parts of at most 4,096 clients are added without rounding (Demmel and
    Nguyen, "Fast Reproducible Floating-Point Summation", 2013).

    Args:
        rows: the number of rows that each client has announced, by node.
        largest: see ``fedrot.task_head.bounds.largest_inputs``.

    Attributes:
        group: the number of each client's group, by node.
    """

    def __init__(self, rows: Mapping[int, int], largest: Tensor | None = None) -> None:
        self._rows = rows
        self._largest = largest
        self._capped = dict(zip(rows, capped([*rows.values()]), strict=True))
        # Neighbours by rows are in different groups, so that groups have like sizes.
        order = sorted(rows, key=lambda node: (rows[node], node))
        self.group = {node: place % GROUPS for place, node in enumerate(order)}
        self._parts: dict[int, Tensor] = {}
        self._like: ClassSums | None = None

    def add(self, node: int, sums: ClassSums) -> None:
        """Add a client's sums.

        Raises:
            UpdateError: more rows than the client has announced, no whole numbers of
                rows, or features that are too large.
        """
        announced = self._rows[node]
        sizes = sums.kind.sizes(sums.counts)
        if sums.rows > announced or (sizes != sizes.floor()).any():
            raise UpdateError(
                f"The sums are over {sums.rows:g} rows, announced were {announced}."
            )
        triangle = sums.gram[*torch.triu_indices(*sums.gram.shape)]
        vector = torch.cat([sums.counts, sums.sums.flatten(), triangle])
        if float(vector.abs().max()) > _LARGEST:
            raise UpdateError(f"The sums of features have values above {_LARGEST:g}.")
        if self._largest is not None:
            sums.check_within(self._largest)
        self._like = sums
        rest = vector * (self._capped[node] / announced)
        empty = torch.zeros(len(_UNITS), len(vector), dtype=torch.float64)
        parts = self._parts.setdefault(self.group[node], empty)
        for unit, total in zip(_UNITS, parts, strict=True):
            part = (rest / unit).round() * unit
            total.add_(part)
            rest = rest - part

    def groups(self) -> Groups:
        """Return the sums of the groups whose features have a usual size.

        See ``LONGEST``.
        """
        groups = {
            group: self._whole(parts.sum(0))
            for group, parts in sorted(self._parts.items())
        }
        sizes = {
            group: float(sums.gram.trace() / sums.rows)
            for group, sums in groups.items()
        }
        most = LONGEST * median(sizes.values())
        return {group: sums for group, sums in groups.items() if sizes[group] <= most}

    def _whole(self, vector: Tensor) -> ClassSums:
        """Return class sums, given their parts in one vector."""
        assert self._like is not None  # from add
        classes, inputs = self._like.sums.shape
        triangle = inputs * (inputs + 1) // 2
        counts, sums, upper = vector.split((classes, classes * inputs, triangle))
        return replace(
            self._like,
            counts=counts,
            sums=sums.reshape(classes, inputs),
            gram=from_triangle(upper, inputs),
            trusted=True,
        )


def total_without(left_out: Sequence[int], groups: Groups) -> ClassSums:
    """Return the sums over all groups but some, with all rows of scarce classes.

    A class is scarce if the other groups have fewer than ``SCARCE`` rows of it. It may
    be an honest client's alone: each of its rows counts as its mean.

    Raises:
        UpdateError: no other group is left.
    """
    kept = [sums for group, sums in groups.items() if group not in left_out]
    if not kept:
        raise UpdateError("No other client has sent sums.")
    total = sum(kept[1:], kept[0])
    scarce = (total.counts < SCARCE).double() * total.kind.by_class
    # A group may have sent sums of one body and none of another.
    others = [groups[group] for group in left_out if group in groups]
    counts = scarce * sum((sums.counts for sums in others), torch.zeros(()))
    if not counts.any():
        return total
    sums = scarce.unsqueeze(1) * sum(other.sums for other in others)
    means = class_means(counts, sums)
    gram = means.mT @ sums + counts.sum() * total.within()
    scarce_rows = replace(total, counts=counts, sums=sums, gram=gram, trusted=True)
    return total + scarce_rows
