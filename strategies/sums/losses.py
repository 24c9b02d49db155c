"""Choices by the losses of clients, which no quarter of the clients can turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from fedrot.temperature import ONE, LossSums, smallest

#: Rows of a client count at most as this multiple of the median client's. A client of four then has
#: less than half of all rows, whatever it claims.
MOST = 1.5

#: A client's difference of two losses counts up to the first loss of all clients and this, in nats.
LEAST_RANGE = 1.0

#: Places of the old and of the fitted head among those that clients evaluate.
OLD, FITTED = 0, 1

#: A group is left out if the loss without it is smaller by so many standard errors. One group is
#: a quarter from so many groups on.
SURE, FEWEST = 1.0, 4


def in_order(answers: Mapping[int, LossSums]) -> dict[int, LossSums]:
    """Return answers in an order that depends neither on the arrival nor on the nodes' ids."""
    return dict(sorted(answers.items(), key=lambda item: item[1].losses.flatten().tolist()))


def capped(rows: Sequence[float]) -> list[float]:
    """Return numbers of rows, none above ``MOST`` times their median.

    >>> capped([100, 80, 120, 10**9])
    [100.0, 80.0, 120.0, 165.0]
    """
    most = MOST * median(rows) if rows else 0.0
    return [float(min(count, most)) for count in rows]


def centre(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of clients' values without the smallest and the largest.

    From each end as much weight is left out as a quarter of the clients can have, so that no quarter
    moves the result out of the range of the others' values. With fewer than four clients this is the
    mean; if a quarter can have half of the weight, it is the median.

    Args:
        values: ``[clients, ...]``, finite.
        weights: ``[clients]``, from ``capped``.
    """
    return (_shares(values, weights) * values.sort(dim=0, stable=True).values).sum(0)


def _shares(values: Tensor, weights: Tensor) -> Tensor:
    """Return the share of each client's value in the centre, in ascending order of the values."""
    own = weights[values.argsort(dim=0, stable=True)]
    total, quarter = weights.sum(), weights.topk(len(weights) // 4).values.sum()
    left_out = quarter.clamp(max=total / 2 * (1 - 1e-9))
    upper = own.cumsum(0)
    inside = upper.clamp(max=total - left_out) - (upper - own).clamp(min=left_out)
    return inside.clamp(min=0) / (total - 2 * left_out)


class Ballot:
    """The losses of the same heads at all clients: the old head, the fitted one, and others.

    Attributes:
        rows: ``[clients]``.
        weights: of the clients, float64 ``[clients]``, see ``capped``.
        means: mean loss of a row, ``[clients, heads, temperatures]``.
        accuracy: ``[clients, heads]``.
    """

    def __init__(self, answers: Sequence[LossSums]) -> None:
        counts = torch.stack([one.counts for one in answers])
        self.rows = counts[:, 0]
        self.weights = torch.tensor(capped(self.rows.tolist()), dtype=torch.float64)
        self.accuracy = counts[:, 1:] / counts[:, :1]
        rows = self.rows.reshape(-1, 1, 1)
        self.means = torch.stack([one.losses for one in answers]) / rows
        self._squares = torch.stack([one.squares for one in answers]) / rows

    def centre(self, values: Tensor) -> Tensor:
        """Return the centre of clients' values ``[clients, ...]``."""
        return centre(values, self.weights)

    def change(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the centre of the changes from ``old`` losses of clients, within the range of these."""
        return self.centre(self._clipped(new, old))

    def _clipped(self, new: Tensor, old: Tensor) -> Tensor:
        reach = self.centre(old) + LEAST_RANGE
        return (new - old.reshape(-1, *[1] * (new.ndim - 1))).clamp(-reach, reach)

    def temperature(self, head: int) -> int:
        """Return the place of a head's best temperature."""
        return smallest(self.change(self.means[:, head], self.means[:, head, ONE]))

    @property
    def better(self) -> bool:
        """Whether the fitted head is better than the old one.

        The centre of the changes of loss decides if it is beyond its standard error, else their mean.
        """
        change, mean, error = self._changes(FITTED, OLD)
        return (change if abs(change) > error else mean) < 0

    def losses(self) -> tuple[float, float, float]:
        """Return the loss of the old head, and of both heads at their best temperatures."""
        given = self.means[:, OLD, ONE]
        old, fitted = (self.means[:, head, self.temperature(head)] for head in (OLD, FITTED))
        first = float(self.centre(given))
        calibrated = first + float(self.change(old, given))
        return first, calibrated, calibrated + float(self.change(fitted, old))

    def harmful(self, groups: Sequence[int]) -> list[int]:
        """Return the groups without which the fitted head is better, at most a quarter of them.

        The heads after the first two are those without the groups. A gain counts from ``SURE`` standard
        errors on, and any gain if the fitted head is no better than the old one.
        """
        needed, most = SURE if self.better else 0.0, len(groups) // FEWEST
        changes = [(*self._changes(head, FITTED), group) for head, group in enumerate(groups, start=2)]
        sure = sorted((change, group) for change, _, error, group in changes if change < -needed * error)
        return sorted(group for _, group in sure[:most])

    def _changes(self, head: int, other: int) -> tuple[float, float, float]:
        """Return the centre and the mean of the changes of loss from one head to another, and an error.

        Both heads are at their best temperatures. The error is the centre's standard error if the rows
        of every client vary as the median client's.
        """
        place, before = self.temperature(head), self.means[:, other, self.temperature(other)]
        changes = self._clipped(self.means[:, head, place], before)
        same = self.means[:, head, place] - self.means[:, other, place]
        variance = self.centre((self._squares[:, head, place] - same**2).clamp(min=0))
        rows = self.rows[changes.argsort(stable=True)]
        error = (variance * (_shares(changes, self.weights) ** 2 / rows).sum()).sqrt()
        mean = (changes * self.weights).sum() / self.weights.sum()
        return float(self.centre(changes)), float(mean), float(error)
