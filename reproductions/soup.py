"""``GreedySoup``: the average of those updates that raise its score on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.aggregation.registry import register_aggregation
from fedrot.collect.statistics import Statistics
from fedrot.errors import UpdateError
from fedrot.tensors import Tensors


@register_aggregation("greedy", "the mean of those updates that do not lower its held-out score")
class GreedySoup:
    """Greedy soup (Wortsman et al. 2022, recipe 1): the mean of a subset of the updates.

    Updates are sorted by their own score, highest first. Each one is added to the average if the
    average's score does not fall. All updates are held until ``result``, which scores each alone and
    each average.

    Args:
        score: from tensors to their score on held-out data, higher is better. NaN counts as the lowest
            score; if all scores are NaN, every update is in the average.
    """

    needs: tuple[str, ...] = ()

    def __init__(self, score: Callable[[Tensors], float]) -> None:
        self._score = score
        self._updates: list[tuple[Tensors, float, Statistics | None]] = []
        self._check = Mean()
        #: Indices of the updates in the last result, in the order in which they were accepted.
        self.chosen: tuple[int, ...] = ()
        #: The number of updates in the last result, under ``soup``.
        self.notes: Mapping[str, str] = {}

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Store one update; raises ``UpdateError`` as ``Mean.add``."""
        self._check.check(update, weight, statistics)
        if not self._updates:
            self._check.add(update, weight, statistics)
        self._updates.append((dict(update), weight, statistics))

    def result(self) -> dict[str, Tensor]:
        """Return the average of the chosen updates; raises ``UpdateError`` if nothing was added."""
        if not self._updates:
            raise UpdateError("Nothing was added; a soup needs at least one update.")
        scores = [self._scored(update) for update, _, _ in self._updates]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        chosen, best = [order[0]], scores[order[0]]
        soup = self._average(chosen)
        for index in order[1:]:
            candidate = self._average([*chosen, index])
            score = self._scored(candidate)
            if score >= best:
                chosen, best, soup = [*chosen, index], score, candidate
        self.chosen = tuple(chosen)
        self.notes = {"soup": f"{len(chosen)} of {len(order)} updates, score {best:.6g}"}
        return soup

    def _scored(self, tensors: Tensors) -> float:
        score = self._score(tensors)
        return score if score == score else float("-inf")

    def _average(self, chosen: list[int]) -> dict[str, Tensor]:
        mean = Mean()
        for index in chosen:
            mean.add(*self._updates[index])
        return mean.result()
