"""The weighted mean, folded in one update at a time."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.matching.blocks import compute_dtype
from fedrot.validation import check_update


class Mean:
    """Running weighted mean (McMahan et al. 2017, FedAvg).

    Sums are kept in float32, or float64 for float64 updates, whatever dtype travels; the result has
    the dtypes of the first update. Integer and boolean tensors are the first update's.
    """

    def __init__(self) -> None:
        self._first: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._weight = 0.0

    def add(self, update: Mapping[str, Tensor], weight: float, statistics: None = None) -> None:
        """Fold one update in.

        Raises:
            UpdateError: the weight is not positive and finite, or names or shapes differ from the
                first update's. Nothing has been added then.
        """
        if not 0 < weight < float("inf"):
            raise UpdateError(f"The weight is {weight}; it must be positive and finite.")
        if not self._first:
            self._first = {name: tensor.detach() for name, tensor in update.items()}
        check_update(update, {name: tuple(t.shape) for name, t in self._first.items()})
        self._weight += weight
        for name, tensor in update.items():
            if not self._first[name].is_floating_point():
                continue
            value = tensor.detach().to(compute_dtype(self._first[name]))
            if name in self._sums:
                self._sums[name].add_(value, alpha=weight)
            else:
                self._sums[name] = value * weight

    def result(self) -> dict[str, Tensor]:
        """Return the mean of what was added so far; adding may go on afterwards.

        Raises:
            UpdateError: nothing was added.
        """
        if not self._first:
            raise UpdateError("Nothing was added; a mean needs at least one update.")
        return {
            name: (self._sums[name] / self._weight).to(tensor.dtype)
            if name in self._sums
            else tensor.clone()
            for name, tensor in self._first.items()
        }
