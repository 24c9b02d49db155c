"""The weighted mean, folded in one update at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.statistic_kinds import TRAINED, Statistics, Tensors, along_rows, check_statistics
from fedrot.tensors import check_update, check_weight, compute_dtype


class Mean:
    """Running weighted mean (McMahan et al. 2017, FedAvg).

    The mean so far is held in float32, or float64 for float64 updates, whatever dtype travels, and
    moved towards every update in place: it is one model large however many updates are added. The
    result has the dtypes of the first update. Integer and boolean tensors are the first update's.

    Statistics ``trained`` say which rows of a tensor a client trained (the labels it has seen, say):
    these rows are averaged over the clients that trained them, and over all where nobody did.
    """

    needs: tuple[str, ...] = ()

    def __init__(self) -> None:
        #: Of all updates that were added.
        self.weight = 0.0
        self._mean: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._trained: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def notes(self) -> Mapping[str, str]:
        """What was out of the ordinary, by tensor; empty for a mean."""
        return {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what was added, empty before."""
        return {name: tuple(tensor.shape) for name, tensor in self._mean.items()}

    @property
    def current(self) -> Tensors:
        """The mean so far over all clients, as it is held: read-only, and changed by the next ``add``.

        Empty before the first.
        """
        return self._mean

    def check(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Check what ``add`` would be given.

        Raises:
            UpdateError: as ``add``.
        """
        check_weight(weight)
        if self._mean:
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
        self.fold_parts([update], weight, statistics)

    def fold_parts(
        self, parts: Iterable[Tensors], weight: float, statistics: Statistics | None = None
    ) -> None:
        """Fold in an update that ``check`` has passed and that comes in parts, its weight once.

        Where a part does not come, those before it have been folded in.
        """
        masks = (statistics or {}).get(TRAINED, {})
        share = weight / (self.weight + weight)
        for part in parts:
            self._fold_part(part, weight, share, masks)
            # Or it would stay until the next one has come.
            del part
        self.weight += weight

    def _fold_part(self, part: Tensors, weight: float, share: float, masks: Tensors) -> None:
        for name, tensor in part.items():
            value, mean = tensor.detach(), self._mean.get(name)
            if mean is None:
                self._dtypes[name] = tensor.dtype
                held = compute_dtype(value) if value.is_floating_point() else value.dtype
                mean = self._mean[name] = value.to(held, copy=True)
            if not mean.is_floating_point():
                continue
            value = value.to(mean.dtype)
            if name in masks or name in self._trained:
                self._fold_rows(name, value, weight, masks.get(name))
            if share < 1:
                mean.lerp_(value, share)

    def _fold_rows(self, name: str, value: Tensor, weight: float, mask: Tensor | None) -> None:
        """Keep the mean of each row over the clients that trained it, and their weight."""
        rows = along_rows(torch.tensor(True) if mask is None else mask, value)
        theirs = weight * rows.to(value.dtype)
        if name not in self._trained:
            # Whoever came before without a mask trained all rows.
            before = torch.full_like(theirs, self.weight)
            self._trained[name] = self._mean[name].clone(), before
        mean, weights = self._trained[name]
        total = weights + theirs
        share = torch.where(total > 0, theirs / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)
        self._trained[name] = mean + share * (value - mean), total

    def result(self, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return the mean of what was added so far; adding may go on afterwards.

        Args:
            device: where to; None leaves it where the updates were.

        Raises:
            UpdateError: nothing was added.
        """
        if not self._mean:
            raise UpdateError("Nothing was added; a mean needs at least one update.")
        return {
            name: self._of(name).to(device, dtype, copy=True) for name, dtype in self._dtypes.items()
        }

    def _of(self, name: str) -> Tensor:
        if name not in self._trained:
            return self._mean[name]
        mean, weights = self._trained[name]
        return torch.where(weights > 0, mean, self._mean[name])
