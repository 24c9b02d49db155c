"""Greedy soup: updates join the average in the order of their own score, while that helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.errors import UpdateError
from fedrot.statistic_kinds import Statistics, Tensors


class GreedySoup:
    """The best average of some of the updates, found greedily (Wortsman et al. 2022, recipe 1).

    Updates are sorted by their own held-out score, the best first; each joins if the score of the
    average does not fall. Holds every update until ``result``, which evaluates each one twice at
    most.

    Args:
        score: held-out score of tensors, the higher the better. A score that is not a number counts
            as the lowest; if all are, every update joins.
    """

    needs: tuple[str, ...] = ()

    def __init__(self, score: Callable[[Tensors], float]) -> None:
        self._score = score
        self._updates: list[tuple[Tensors, float, Statistics | None]] = []
        self._check = Mean()
        self._notes: dict[str, str] = {}
        self.chosen: tuple[int, ...] = ()

    @property
    def notes(self) -> Mapping[str, str]:
        """Which updates are in the last result, under ``soup``."""
        return self._notes

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Remember one update.

        Raises:
            UpdateError: as ``Mean.add``. Nothing has been added then.
        """
        self._check.check(update, weight, statistics)
        if not self._updates:
            self._check.add(update, weight, statistics)
        self._updates.append((dict(update), weight, statistics))

    def result(self) -> dict[str, Tensor]:
        """Return the chosen average; ``chosen`` are the places of its updates, in the order of joining.

        Raises:
            UpdateError: nothing was added.
        """
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
        self._notes = {"soup": f"{len(chosen)} of {len(order)} updates, score {best:.6g}"}
        return soup

    def _scored(self, tensors: Tensors) -> float:
        score = self._score(tensors)
        return score if score == score else float("-inf")

    def _average(self, chosen: list[int]) -> dict[str, Tensor]:
        mean = Mean()
        for index in chosen:
            mean.add(*self._updates[index])
        return mean.result()
