"""``Coverage``: which tensors have statistics from most of the clients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Coverage:
    """The share of the clients' weight that has statistics of a tensor, by tensor.

    An average that needs statistics of a tensor leaves out the clients that have none.
    If these are most of the clients, the tensor gets the mean of all: nobody decides
    alone on a tensor.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._given: dict[Hashable, float] = {}
        self._lacking: dict[Hashable, float] = {}

    def add(
        self, given: Iterable[Hashable], lacking: Iterable[Hashable], weight: float
    ) -> None:
        """Add a client's tensors with statistics, and tensors that it has not
        trained.
        """
        self._weight += weight
        for weights, names in ((self._given, given), (self._lacking, lacking)):
            for name in names:
                weights[name] = weights.get(name, 0.0) + weight

    def most(self, name: Hashable) -> bool:
        """Return whether more than half of the weight that trained a tensor has
        statistics of it.
        """
        return 2 * self._given.get(name, 0.0) > self._trained(name)

    def note(self, what: str, name: Hashable) -> str:
        """Return the note about a tensor of which some client sent no statistics; empty
        if all did.
        """
        share = self._given.get(name, 0.0) / self._trained(name)
        if share > 1 - 1e-9:
            return ""
        left_out = (
            "the others are left out" if self.most(name) else "its weights are the mean"
        )
        return f"clients with {share:.0%} of the weight sent {what}; {left_out}"

    def _trained(self, name: Hashable) -> float:
        return self._weight - self._lacking.get(name, 0.0)
