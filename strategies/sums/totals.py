"""``Totals``: clients' class sums, added as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import torch
from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.head import ClassSums
from fedrot.strategies.sums.losses import capped

#: Groups of clients, each of which can be left out. Memory does not grow with the number of clients.
GROUPS = 8

#: All clients have the same network: the mean square of a group's features is at most so many times that
#: of the median group's, or the group's sums are left out.
LONGEST = 10.0

#: Sums are kept as multiples of these units, 40 bits apart, and are at most ``_LARGEST``.
_UNITS = tuple(2.0**power for power in (80, 40, 0, -40, -80, -120))
_LARGEST = 1e30


class Totals:
    """Sums of clients' class sums, with the same bits in every order of arrival.

    A client's rows count at most as ``capped`` says. Sums are split at fixed powers of two, and the
    parts of at most 4,096 clients are added without rounding (Demmel and Nguyen, "Fast Reproducible
    Floating-Point Summation", 2013).

    Args:
        rows: the number of rows that each client has announced, by node.
        shape: of the task head's weight, ``(classes, inputs)``.
        largest: see ``fedrot.head.largest_inputs``.
    """

    def __init__(
        self, rows: Mapping[int, int], shape: tuple[int, int], largest: Tensor | None = None
    ) -> None:
        self.shape, self._rows, self._largest = shape, rows, largest
        self._capped = dict(zip(rows, capped([*rows.values()]), strict=True))
        order = sorted(rows, key=lambda node: (rows[node], node))
        self._group = {node: place % GROUPS for place, node in enumerate(order)}
        self._parts: dict[int, Tensor] = {}

    @property
    def groups(self) -> list[int]:
        """The groups with features of a usual size, see ``LONGEST``."""
        classes, inputs = self.shape
        sizes = {
            group: float(parts[:, -inputs * inputs :: inputs + 1].sum() / parts[:, :classes].sum())
            for group, parts in sorted(self._parts.items())
        }
        return [group for group, size in sizes.items() if size <= LONGEST * median(sizes.values())]

    @property
    def counts(self) -> Tensor:
        """The rows of each class, of all clients."""
        classes = self.shape[0]
        return torch.stack([self._parts[group][:, :classes] for group in self.groups]).sum((0, 1))

    def add(self, node: int, sums: ClassSums) -> None:
        """Add a client's sums.

        Raises:
            UpdateError: more rows than the client has announced, no whole numbers of rows, or features
                that are too large.
        """
        rows = float(sums.counts.sum())
        if rows > self._rows[node] or bool((sums.counts != sums.counts.floor()).any()):
            raise UpdateError(f"The sums are over {rows:g} rows, announced were {self._rows[node]}.")
        left = torch.cat([sums.counts, sums.sums.flatten(), sums.gram.flatten()])
        if float(left.abs().max()) > _LARGEST:
            raise UpdateError(f"The sums of features have values above {_LARGEST:g}.")
        if self._largest is not None:
            sums.check_within(self._largest)
        left = left * (self._capped[node] / self._rows[node])
        empty = torch.zeros(len(_UNITS), len(left), dtype=torch.float64)
        parts = self._parts.setdefault(self._group[node], empty)
        for unit, total in zip(_UNITS, parts, strict=True):
            part = (left / unit).round() * unit
            total.add_(part)
            left = left - part

    def without(self, groups: Iterable[int] = ()) -> ClassSums:
        """Return the sums over all clients that are not in ``groups``.

        Raises:
            UpdateError: there are none, or they contradict each other.
        """
        kept = [self._parts[group] for group in self.groups if group not in set(groups)]
        if not kept:
            raise UpdateError("No other client has sent sums.")
        classes, inputs = self.shape
        total = sum(kept[1:], kept[0]).sum(0)
        counts, sums, gram = total.split((classes, classes * inputs, inputs**2))
        return ClassSums(counts, sums.reshape(classes, inputs), gram.reshape(inputs, inputs))
