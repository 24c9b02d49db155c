"""``Coverage``: which tensors have statistics from most of the clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable


class Coverage:
    """The share of the clients' weight that has statistics of a tensor, by tensor.

    An average that needs statistics of a tensor leaves out the clients that have none.
    If these are most of the clients, the tensor gets the mean of all: nobody decides
    alone on a tensor.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._sent: dict[Hashable, float] = defaultdict(float)
        self._lacking: dict[Hashable, float] = defaultdict(float)

    def add(
        self,
        sent: Iterable[Hashable],
        lacking: Iterable[Hashable],
        weight: float,
    ) -> None:
        """Add a client's tensors: with statistics, and those it has not trained."""
        self._weight += weight
        for name in sent:
            self._sent[name] += weight
        for name in lacking:
            self._lacking[name] += weight

    def most(self, name: Hashable) -> bool:
        """Return whether most of the weight that trained a tensor has statistics."""
        return 2 * self._sent[name] > self._trained(name)

    def note(self, what: str, name: Hashable) -> str:
        """Return the note about a tensor; empty if all clients sent its statistics."""
        share = self._sent[name] / self._trained(name)
        # Sums of weights have rounding errors.
        if share > 1 - 1e-9:
            return ""
        left_out = (
            "the others are left out" if self.most(name) else "its weights are the mean"
        )
        return f"clients with {share:.0%} of the weight sent {what}; {left_out}"

    def _trained(self, name: Hashable) -> float:
        return self._weight - self._lacking[name]
