"""Choices by the losses of clients, which no quarter of the clients can turn."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from fedrot.task_head.losses import ONE, LossSums, smallest

#: Rows of a client's sums count at most as this multiple of the median client's. A
#: client of four then has less than half of all rows, whatever it claims.
MOST = 1.5

#: The same of votes, from four clients on: no quarter of them has half of the weight.
MOST_OF_VOTES = 1.0

#: A client's change of the loss is clipped to the centre of the old losses plus this,
#: in nats, in both directions.
LEAST_RANGE = 1.0

#: A group is left out if the loss without it is smaller by so many standard errors.
SURE = 1.0

#: With fewer groups, or clients, one is more than a quarter: none is left out.
FEWEST = 4

#: A client's change is unusual if it differs from the centre by more than so many
#: standard errors of one client.
FAR = 6.0

#: Harmful groups stay if without them the mean of all clients rises, unless the centre
#: falls by this share of the most that a client's change counts (``pays``).
TOLERATED = 0.05


def in_order(answers: Mapping[int, LossSums]) -> dict[int, LossSums]:
    """Return answers in an order that depends neither on arrival nor on nodes' ids."""
    return dict(
        sorted(answers.items(), key=lambda item: item[1].losses.flatten().tolist())
    )


def capped(rows: Sequence[float], multiple: float = MOST) -> list[float]:
    """Return numbers of rows, none above a multiple of their median.

    >>> capped([100, 80, 120, 10**9])
    [100.0, 80.0, 120.0, 165.0]
    """
    most = multiple * median(rows) if rows else 0.0
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
    """Return the share of each client's value in the centre, values ascending."""
    order = values.argsort(dim=0, stable=True)
    total = weights.sum()
    quarter = weights.topk(len(weights) // 4).values.sum()
    left_out = quarter.clamp(max=total / 2 * (1 - 1e-9))
    upper = weights[order].cumsum(0)
    lower = upper - weights[order]
    inside = upper.clamp(max=total - left_out) - lower.clamp(min=left_out)
    return inside.clamp(min=0) / (total - 2 * left_out)


class Votes:
    """The clients' losses of the same models: the old one, and others.

    Args:
        answers: the clients' sums, with a task head for each model.
        models: what stands for each model, in the order of the task heads in the
            answers; the first is the old model.

    Attributes:
        rows: number of held-out rows, ``[clients]``.
        weights: of the clients, float64 ``[clients]``, see ``MOST_OF_VOTES``.
    """

    def __init__(self, answers: Sequence[LossSums], models: Sequence[Hashable]) -> None:
        counts = torch.stack([answer.counts for answer in answers])
        self.rows = counts[:, 0]
        multiple = MOST_OF_VOTES if len(answers) >= FEWEST else MOST
        self.weights = torch.tensor(
            capped(self.rows.tolist(), multiple), dtype=torch.float64
        )
        self._old = models[0]
        self._places = {model: place for place, model in enumerate(models)}
        self._accuracy = counts[:, 1:] / counts[:, :1]
        rows = self.rows.reshape(-1, 1, 1)
        #: Mean losses, and squares of differences, ``[clients, models, temperatures]``.
        self._means = torch.stack([answer.losses for answer in answers]) / rows
        self._squares = torch.stack([answer.squares for answer in answers]) / rows

    def means(self, model: Hashable) -> Tensor:
        """Return the clients' mean losses of a row, ``[clients, temperatures]``."""
        return self._means[:, self._places[model]]

    def accuracy(self, model: Hashable) -> Tensor:
        """Return the clients' shares of rows that a model predicts as labelled."""
        return self._accuracy[:, self._places[model]]

    def centre(self, values: Tensor) -> Tensor:
        """Return the centre of clients' values ``[clients, ...]``."""
        return centre(values, self.weights)

    def change(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the centre of the changes of clients from ``old`` losses.

        A change counts up to ``LEAST_RANGE`` more than the centre of the old ones.
        """
        return self.centre(self._clipped(new, old))

    def _reach(self, old: Tensor) -> Tensor:
        return self.centre(old) + LEAST_RANGE

    def _clipped(self, new: Tensor, old: Tensor) -> Tensor:
        reach = self._reach(old)
        before = old if new.ndim == 1 else old.unsqueeze(1)
        return (new - before).clamp(-reach, reach)

    def temperature(self, model: Hashable) -> int:
        """Return the place of a model's best temperature."""
        means = self.means(model)
        return smallest(self.change(means, means[:, ONE]))

    def at_best(self, model: Hashable) -> Tensor:
        """Return the clients' mean losses at a model's best temperature."""
        return self.means(model)[:, self.temperature(model)]

    def losses(self, model: Hashable) -> tuple[float, float, float]:
        """Return the losses of the old model, of it calibrated, and of a model.

        They are means over all rows, and so properties of each model. Calibrated is at
        its best temperature; the model is, too.
        """
        first = self.means(self._old)[:, ONE]
        of_clients = torch.stack([first, self.at_best(self._old), self.at_best(model)])
        old, calibrated, new = (of_clients @ self.rows / self.rows.sum()).tolist()
        return old, calibrated, new

    def from_old(self, model: Hashable) -> Change:
        """Return the change from the old model, both at their best temperatures."""
        return self._change(
            model,
            self.temperature(model),
            self.at_best(self._old),
            self.means(self._old)[:, ONE],
        )

    def harmful(self, fitted: Hashable, without: Mapping[int, Hashable]) -> list[int]:
        """Return the groups without which ``fitted`` is better, at most a quarter.

        A gain counts from ``SURE`` standard errors on, and any gain if the fitted model
        is no better than the old one.

        Args:
            without: the models without one group each, by group.
        """
        needed = SURE if self.from_old(fitted).decisive < 0 else 0.0
        before = self.at_best(fitted)
        gains = []
        for group, model in without.items():
            place = self.temperature(model)
            change = self._change(model, place, before, self.means(fitted)[:, place])
            if change.centre < -needed * change.error:
                gains.append((change.centre, group))
        worst = sorted(gains)[: len(without) // FEWEST]
        return sorted(group for _, group in worst)

    def pays(self, without: Hashable, fitted: Hashable) -> bool:
        """Return whether the model without harmful groups is better than ``fitted``.

        Where labels differ, honest groups may help a few clients much and cost the
        others little. The mean of all clients tells that; liars can turn it, so a large
        loss of the others decides, too.
        """
        before = self.at_best(fitted)
        change = self._change(without, self.temperature(without), before, before)
        tolerated = TOLERATED * float(self._reach(before))
        return change.mean < 0 or change.centre < -tolerated

    def _change(
        self, model: Hashable, place: int, before: Tensor, partner: Tensor
    ) -> Change:
        """Return the change from losses to those of a model at a temperature.

        The error is the centre's standard error if the rows of every client vary as the
        median client's.

        Args:
            before: the clients' losses before.
            partner: the mean losses from whose rows the model's squares differ.
        """
        means = self.means(model)[:, place]
        changes = self._clipped(means, before)
        squares = self._squares[:, self._places[model], place]
        variances = (squares - (means - partner) ** 2).clamp(min=0)
        variance = self.centre(variances)
        rows = self.rows[changes.argsort(stable=True)]
        shares = _shares(changes, self.weights)
        error = (variance * (shares**2 / rows).sum()).sqrt()
        middle = self.centre(changes)
        quarter = len(changes) // FEWEST
        distances = (changes - middle).abs()
        excess = distances - FAR * (variance / self.weights).sqrt()
        # As many as a quarter may be above the next one.
        most = excess.topk(quarter + 1).values[-1].clamp(min=0)
        usual = self.weights * (excess <= most)
        noise = (variances / self.rows).sqrt()
        sure = max(int((changes < -noise).sum()), int((changes > noise).sum()))
        return Change(
            float(middle),
            float((changes * self.weights).sum() / self.weights.sum()),
            float(error),
            float((changes * usual).sum() / usual.sum()),
            sure >= len(changes) - quarter,
        )


class Change(NamedTuple):
    """The change of the loss of a row from one model to another.

    Attributes:
        centre: of the clients' changes.
        mean: of all clients.
        error: the centre's standard error.
        usual: the mean without the unusual clients (``FAR``), at most a quarter.
        agreed: whether all clients but at most a quarter gain, or all but at most a
            quarter lose, each by more than its own standard error.
    """

    centre: float
    mean: float
    error: float
    usual: float
    agreed: bool

    @property
    def decisive(self) -> float:
        """The centre beyond its standard error, or if clients agree; else ``usual``.

        ``usual`` counts up to the error. If all but a quarter of the clients gain, each
        beyond its standard error, the result is negative, whatever the others send:
        they are among those that the centre leaves out.
        """
        if self.agreed or abs(self.centre) > self.error:
            return self.centre
        return min(max(self.usual, -self.error), self.error)
