"""Choices by the losses of clients, which no quarter of the clients can turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from fedrot.task_head.losses import ONE, LossSums, smallest

#: Rows of a client count at most as this multiple of the median client's. A client of
#: four then has less than half of all rows, whatever it claims.
MOST = 1.5

#: A client's difference of two losses counts up to the first loss of all clients and
#: this, in nats.
LEAST_RANGE = 1.0

#: Place of the old model's head among those that clients evaluate.
OLD = 0

#: A group is left out if the loss without it is smaller by so many standard errors. One
#: group is a quarter from so many groups on.
SURE, FEWEST = 1.0, 4

#: These groups stay if without them the mean of all clients rises, unless the centre
#: falls by this share of the most that a client's change counts.
TOLERATED = 0.05


def in_order(answers: Mapping[int, LossSums]) -> dict[int, LossSums]:
    """Return answers in an order that depends neither on the arrival nor on the nodes'
    ids.
    """
    return dict(
        sorted(answers.items(), key=lambda item: item[1].losses.flatten().tolist())
    )


def capped(rows: Sequence[float]) -> list[float]:
    """Return numbers of rows, none above ``MOST`` times their median.

    >>> capped([100, 80, 120, 10**9])
    [100.0, 80.0, 120.0, 165.0]
    """
    most = MOST * median(rows) if rows else 0.0
    return [float(min(count, most)) for count in rows]


def centre(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of clients' values without the smallest and the largest.

    From each end as much weight is left out as a quarter of the clients can have, so
    that no quarter moves the result out of the range of the others' values. With fewer
    than four clients this is the mean; if a quarter can have half of the weight, it is
    the median.

    Args:
        values: ``[clients, ...]``, finite.
        weights: ``[clients]``, from ``capped``.
    """
    return (_shares(values, weights) * values.sort(dim=0, stable=True).values).sum(0)


def _shares(values: Tensor, weights: Tensor) -> Tensor:
    """Return the share of each client's value in the centre, in ascending order of the
    values.
    """
    own = weights[values.argsort(dim=0, stable=True)]
    total, quarter = weights.sum(), weights.topk(len(weights) // 4).values.sum()
    left_out = quarter.clamp(max=total / 2 * (1 - 1e-9))
    upper = own.cumsum(0)
    inside = upper.clamp(max=total - left_out) - (upper - own).clamp(min=left_out)
    return inside.clamp(min=0) / (total - 2 * left_out)


class Votes:
    """The losses of the same heads at all clients: the old model's, the fitted one, and
    others.

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
        """Return the centre of the changes from ``old`` losses of clients, within the
        range of these.
        """
        return self.centre(self._clipped(new, old))

    def _reach(self, old: Tensor) -> Tensor:
        return self.centre(old) + LEAST_RANGE

    def _clipped(self, new: Tensor, old: Tensor) -> Tensor:
        reach = self._reach(old)
        return (new - old.reshape(-1, *[1] * (new.ndim - 1))).clamp(-reach, reach)

    def temperature(self, task_head: int) -> int:
        """Return the place of a head's best temperature."""
        return smallest(
            self.change(self.means[:, task_head], self.means[:, task_head, ONE])
        )

    def losses(self, task_head: int) -> tuple[float, float, float]:
        """Return the loss of the old model, of it at its best temperature, and of a
        head at its own.
        """
        given = self.means[:, OLD, ONE]
        old = self.means[:, OLD, self.temperature(OLD)]
        first = float(self.centre(given))
        calibrated = first + float(self.change(old, given))
        return first, calibrated, calibrated + self.from_old(task_head).decisive

    def from_old(self, task_head: int) -> Change:
        """Return the change from the old model to a head, both at their best
        temperatures.
        """
        old = self.means[:, OLD]
        before = old[:, self.temperature(OLD)]
        return self._change(task_head, self.temperature(task_head), before, old[:, ONE])

    def harmful(self, fitted: int, without: Mapping[int, int]) -> list[int]:
        """Return the groups without which the ``fitted`` head is better, at most a
        quarter of them.

        A gain counts from ``SURE`` standard errors on, and any gain if the fitted head
        is no better than the old model.

        Args:
            without: the places of the heads without one group each, by group.
        """
        needed = SURE if self.from_old(fitted).decisive < 0 else 0.0
        before = self.means[:, fitted, self.temperature(fitted)]
        found = []
        for group, task_head in without.items():
            at = self.temperature(task_head)
            change = self._change(task_head, at, before, self.means[:, fitted, at])
            if change.centre < -needed * change.error:
                found.append((change.centre, group))
        return sorted(group for _, group in sorted(found)[: len(without) // FEWEST])

    def pays(self, without: int, fitted: int) -> bool:
        """Return whether the head ``without`` harmful groups is better than the
        ``fitted`` one of all.

        Where labels differ, honest groups may help a few clients much and cost the
        others little. The mean of all clients tells that; liars can turn it, so a large
        loss of the others decides, too.
        """
        before = self.means[:, fitted, self.temperature(fitted)]
        change = self._change(without, self.temperature(without), before, before)
        return change.mean < 0 or change.centre < -TOLERATED * float(
            self._reach(before)
        )

    def _change(
        self, task_head: int, at: int, before: Tensor, partner: Tensor
    ) -> Change:
        """Return the change from the losses ``before`` to those of a head at a
        temperature.

        ``partner``: the mean losses from whose rows the squares of the head are
        differences. The error is the centre's standard error if the rows of every
        client vary as the median client's.
        """
        changes = self._clipped(self.means[:, task_head, at], before)
        same = self.means[:, task_head, at] - partner
        variance = self.centre((self._squares[:, task_head, at] - same**2).clamp(min=0))
        rows = self.rows[changes.argsort(stable=True)]
        error = (variance * (_shares(changes, self.weights) ** 2 / rows).sum()).sqrt()
        mean = (changes * self.weights).sum() / self.weights.sum()
        return Change(float(self.centre(changes)), float(mean), float(error))


class Change(NamedTuple):
    """The change of the loss of a row from one model to another.

    Attributes:
        centre: of the clients' changes.
        mean: of all clients.
        error: the centre's standard error.
    """

    centre: float
    mean: float
    error: float

    @property
    def decisive(self) -> float:
        """The centre if it is beyond its standard error; else the mean, within the
        error.
        """
        if abs(self.centre) > self.error:
            return self.centre
        return min(max(self.mean, -self.error), self.error)
