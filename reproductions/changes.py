"""Averages of changes from the broadcast model, without statistics: ``scaled``, and the base of ``ace``.

They work on the weights of linear layers below the task head. All other tensors are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedrot.aggregation import Mean
from fedrot.collect.statistics import Statistics
from fedrot.errors import FedrotError
from fedrot.head import HEADS
from fedrot.tensors import Tensors, check_update

#: Parts of the names of a model's last layers.
_LAST = tuple(f".{name}." for name in (*HEADS, "pooler", "pre_classifier"))


def of_head(name: str) -> bool:
    """Return whether a tensor belongs to the pooler or the task head."""
    return any(part in f".{name}" for part in _LAST)


def body_layers(tensors: Tensors, head: bool = False) -> list[str]:
    """Return the matrices outside of embeddings; pooler and task head are left out unless ``head``."""
    matrices = [name for name, t in tensors.items() if t.ndim == 2 and "embedding" not in name]
    return [name for name in matrices if head or not of_head(name)]


class OfChanges:
    """What both averages share; ``start`` is the broadcast model, set before the first update."""

    needs: tuple[str, ...] = ()
    notes: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.start: Tensors | None = None
        self._mean = Mean()

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Add one update; raises ``UpdateError`` as ``Mean.add``, or if it has other tensors."""
        check_update(update, {name: tuple(t.shape) for name, t in self._known().items()})
        self._mean.add(update, weight, statistics)

    def _known(self) -> Tensors:
        if self.start is None:
            raise FedrotError(f"{type(self).__name__} needs the broadcast model: set 'start' first.")
        return self.start


class Scaled(OfChanges):
    """``W_0 + factor * mean of (W_i - W_0)``: a server's learning rate for the body alone."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors; raises ``UpdateError`` if nothing was added."""
        merged, start = self._mean.result(), self._known()
        for name in body_layers(merged):
            before = start[name].double()
            merged[name] = (before + self.factor * (merged[name] - before)).to(merged[name].dtype)
        return merged
