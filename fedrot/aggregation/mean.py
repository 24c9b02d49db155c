"""The weighted mean, folded in one update at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrot.aggregation.statistics import TRAINED, Statistics, Tensors, along_rows, check_statistics
from fedrot.errors import UpdateError
from fedrot.matching.blocks import compute_dtype
from fedrot.validation import check_update, check_weight


class Mean:
    """Running weighted mean (McMahan et al. 2017, FedAvg).

    Sums are kept in float32, or float64 for float64 updates, whatever dtype travels; the result has
    the dtypes of the first update. Integer and boolean tensors are the first update's.

    Statistics ``trained`` say which rows of a tensor a client trained (the labels it has seen, say):
    these rows are averaged over the clients that trained them, and over all where nobody did.
    """

    needs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._first: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._trained: dict[str, tuple[Tensor, Tensor]] = {}
        self._weight = 0.0

    @property
    def notes(self) -> Mapping[str, str]:
        """What was out of the ordinary, by tensor; empty for a mean."""
        return {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what was added, empty before."""
        return {name: tuple(tensor.shape) for name, tensor in self._first.items()}

    def check(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Check what ``add`` would be given.

        Raises:
            UpdateError: as ``add``.
        """
        check_weight(weight)
        if self._first:
            check_update(update, self.shapes)
        check_statistics(statistics or {}, {name: tuple(t.shape) for name, t in update.items()})

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Fold one update in.

        Raises:
            UpdateError: the weight is not a positive number of a reasonable size, names or shapes differ
                from the first update's, or a mask does not fit its tensor. Nothing has been added then.
        """
        self.check(update, weight, statistics)
        self.fold(update, weight, statistics)

    def fold(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Do what ``add`` does with what ``check`` has passed."""
        if not self._first:
            self._first = {name: tensor.detach() for name, tensor in update.items()}
        masks = (statistics or {}).get(TRAINED, {})
        for name, tensor in update.items():
            if not self._first[name].is_floating_point():
                continue
            value = tensor.detach().to(compute_dtype(self._first[name]))
            if name in masks or name in self._trained:
                self._add_rows(name, value, weight, masks.get(name))
            if name in self._sums:
                self._sums[name].add_(value, alpha=weight)
            else:
                self._sums[name] = value * weight
        self._weight += weight

    def _add_rows(self, name: str, value: Tensor, weight: float, mask: Tensor | None) -> None:
        rows = along_rows(torch.tensor(True) if mask is None else mask, value)
        share = weight * rows.to(value.dtype)
        if name not in self._trained:
            # Whoever came before without a mask trained all rows.
            before = self._sums[name].clone() if name in self._sums else torch.zeros_like(value)
            self._trained[name] = before, torch.full_like(value, self._weight)
        total, weights = self._trained[name]
        self._trained[name] = total + share * value, weights + share

    def result(self) -> dict[str, Tensor]:
        """Return the mean of what was added so far; adding may go on afterwards.

        Raises:
            UpdateError: nothing was added.
        """
        if not self._first:
            raise UpdateError("Nothing was added; a mean needs at least one update.")
        return {
            name: self._mean(name).to(tensor.dtype) if name in self._sums else tensor.clone()
            for name, tensor in self._first.items()
        }

    def _mean(self, name: str) -> Tensor:
        mean = self._sums[name] / self._weight
        if name not in self._trained:
            return mean
        total, weights = self._trained[name]
        return torch.where(weights > 0, total / weights.clamp_min(torch.finfo(weights.dtype).tiny), mean)
