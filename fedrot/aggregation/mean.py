"""``Mean``: the weighted mean of updates, as in FedAvg."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from fedrot.aggregation.registry import Aggregator, register_aggregation
from fedrot.collect.statistics import TRAINED, Statistics, along_rows, check_statistics
from fedrot.errors import UpdateError
from fedrot.tensors import (
    Device,
    TensorDict,
    Tensors,
    check_update,
    check_weight,
    compute_dtype,
    rounded,
)

#: The mask of a tensor that a client trained in all rows.
ALL_ROWS = torch.tensor(True)


@register_aggregation("mean", "the weighted mean, as in FedAvg")
class Mean(Aggregator):
    """Running weighted mean (McMahan et al. 2017, FedAvg).

    The mean is held in float32, or float64 for float64 updates, and updated in place:
    it needs the memory of one model for any number of updates. The result has the
    dtypes of the first update. Integers and booleans are averaged in float64, and
    rounded to the nearest in the result.

    Statistics ``trained`` are masks of the rows that a client trained (for example the
    labels it saw). A row is averaged over the clients that trained it, or over all
    clients if none did.

    A subclass does not stream unless it sets ``streams = True`` itself.

    >>> mean = Mean()
    >>> mean.add({"w": torch.tensor([0.0, 4.0])}, weight=1)
    >>> mean.add({"w": torch.tensor([4.0, 4.0])}, weight=3)
    >>> mean.result()
    {'w': tensor([3., 4.])}
    """

    streams = True

    def __init_subclass__(cls) -> None:
        # ``fold_parts`` and ``release`` would pass by an ``add`` or ``result`` of the
        # subclass.
        cls.streams = vars(cls).get("streams", False)

    def __init__(self) -> None:
        #: The sum of the weights of all updates that were added.
        self.weight = 0.0
        self._mean: TensorDict = {}
        self._dtypes: dict[str, torch.dtype] = {}
        #: For tensors with masks: the mean of each row over its clients, and the sum of
        #: their weights.
        self._trained: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def current(self) -> Tensors:
        """The mean over all clients, empty before the first update.

        It is no copy: do not write to it. Means of integers are not rounded.
        """
        return self._mean

    def check(
        self,
        update: Tensors,
        weight: float,
        statistics: Statistics | None = None,
    ) -> None:
        """Raise the errors of ``add``, without adding."""
        check_weight(weight)
        like = (self._mean or update).items()
        shapes = {name: tensor.shape for name, tensor in like}
        check_update(update, shapes)
        check_statistics(statistics or {}, shapes)

    def add(
        self,
        update: Tensors,
        weight: float,
        statistics: Statistics | None = None,
    ) -> None:
        """Add one update.

        Raises:
            UpdateError: the weight is not a positive number of a reasonable size, names
                or shapes differ from the first update's, or a mask does not fit its
                tensor. After an error, nothing has been added.
        """
        self.check(update, weight, statistics)
        self.fold(update, weight, statistics)

    def fold(
        self, update: Tensors, weight: float, statistics: Statistics | None = None
    ) -> None:
        """Add one update that ``check`` has accepted."""
        self.fold_parts([update], weight, statistics)

    def fold_parts(
        self,
        parts: Iterable[Tensors],
        weight: float,
        statistics: Statistics | None = None,
    ) -> None:
        """Add one update that ``check`` has accepted and that comes in parts.

        If ``parts`` raises an error, the parts before it have been added.
        """
        masks = (statistics or {}).get(TRAINED, {})
        fold = partial(self._fold_part, weight=weight, masks=masks)
        # A loop variable would hold a part while the next part is made; ``map`` does
        # not.
        for _ in map(fold, parts):
            pass
        self.weight += weight

    def _fold_part(self, part: Tensors, weight: float, masks: Tensors) -> None:
        share = weight / (self.weight + weight)
        for name, tensor in part.items():
            value = tensor.detach()
            floats = value.is_floating_point()
            if name not in self._mean:
                self._dtypes[name] = value.dtype
                wide = compute_dtype(value) if floats else torch.float64
                self._mean[name] = value.to(wide, copy=True)
            mean = self._mean[name]
            value = value.to(mean.dtype)
            if name in self._trained or (name in masks and floats):
                self._fold_rows(name, value, weight, masks.get(name, ALL_ROWS))
            if share < 1:
                mean.lerp_(value, share)

    def _fold_rows(self, name: str, value: Tensor, weight: float, mask: Tensor) -> None:
        rows = along_rows(mask, value)
        added = weight * rows.to(value.dtype)
        if name not in self._trained:
            # Earlier updates had no mask: their clients trained all rows.
            before = torch.full_like(added, self.weight)
            self._trained[name] = self._mean[name].clone(), before
        mean, weights = self._trained[name]
        total = weights + added
        # A row that nobody has trained yet has the total 0.
        divisor = total.clamp_min(torch.finfo(total.dtype).tiny)
        share = torch.where(total > 0, added / divisor, 0.0)
        self._trained[name] = mean + share * (value - mean), total

    def result(self, device: Device | None = None) -> TensorDict:
        """Return the mean so far; more updates may be added afterwards.

        Args:
            device: of the result; None: the device of the updates.

        Raises:
            UpdateError: nothing was added.
        """
        return self._read(device, copy=True)

    def release(self) -> TensorDict:
        """Return the held tensors on the CPU, not copies; the mean is empty then."""
        if not self.streams:
            return super().release()
        tensors = self._read("cpu", copy=False)
        self._mean = {}
        return tensors

    def _read(self, device: Device | None, copy: bool) -> TensorDict:
        if not self._mean:
            raise UpdateError("Nothing was added; a mean needs at least one update.")
        tensors = {}
        for name, dtype in self._dtypes.items():
            merged = self._mean[name]
            if name in self._trained:
                of_rows, weights = self._trained[name]
                merged = torch.where(weights > 0, of_rows, merged)
            tensors[name] = rounded(merged, dtype).to(device, dtype, copy=copy)
        return tensors
