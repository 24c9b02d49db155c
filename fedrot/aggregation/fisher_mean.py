"""``Fisher``: the mean weighted by diagonal Fisher information."""

from __future__ import annotations

import torch

from fedrot.aggregation.coverage import Coverage
from fedrot.aggregation.mean import ALL_ROWS, Mean
from fedrot.aggregation.registry import Aggregator, register_aggregation
from fedrot.collect.statistics import (
    FISHER,
    TRAINED,
    Statistics,
    along_rows,
    untrained,
)
from fedrot.errors import FedrotError, UpdateError
from fedrot.tensors import TensorDict, Tensors


@register_aggregation(
    "fisher", "the mean, every entry weighted by its diagonal Fisher information"
)
class Fisher(Aggregator):
    """Mean weighted by diagonal Fisher information (Matena & Raffel 2021; Jin et al.
    2023, sec. 3.1).

    ``theta = sum_i w_i F_i theta_i / sum_i w_i F_i``, entry by entry. Tensors without a
    Fisher, and entries whose Fisher is zero at every client, get the weighted mean.
    Sums are float64. Rows that a client has not trained (statistics ``trained``) have
    weight zero. A tensor is averaged over the clients that sent its Fisher, if these
    are most of those that trained it by weight; otherwise it gets the weighted mean,
    and ``notes`` say so.

    A rotation cannot be applied to a diagonal Fisher. Either the clients align first
    and compute it afterwards (``align_mod``), or only permutations are aligned.

    Args:
        floor: added to every ``F_i``, as a share of the mean over all entries of all
            updates. Entries that do not affect the loss (such as a key's bias) are then
            averaged; without a floor, their weights would be rounding errors.
    """

    needs = (FISHER,)

    def __init__(self, floor: float = 1e-6) -> None:
        if not 0 <= floor < float("inf"):
            raise FedrotError(f"floor is {floor}; it must not be negative.")
        self.floor = floor
        self._mean = Mean()
        self._reference: TensorDict = {}
        self._products: TensorDict = {}
        self._totals: TensorDict = {}
        self._size = 0.0
        self._coverage = Coverage()

    def add(
        self,
        update: Tensors,
        weight: float,
        statistics: Statistics | None = None,
    ) -> None:
        """Add one update with its Fisher information.

        Raises:
            UpdateError: as ``Mean.add``; or there is no Fisher information. After an
                error, nothing has been added.
        """
        self._mean.check(update, weight, statistics)
        statistics = statistics or {}
        lacking = untrained(statistics)
        masks = statistics.get(TRAINED, {})
        sent = statistics.get(FISHER, {})
        fisher = {name: value for name, value in sent.items() if name not in lacking}
        if not fisher:
            raise UpdateError(
                "The update has no Fisher information, which this average needs; see "
                "fedrot.collect_fisher."
            )
        self._mean.fold(update, weight, statistics)
        self._coverage.add(fisher, lacking, weight)
        total = entries = 0.0
        for name, value in fisher.items():
            wide = update[name].detach().double()
            reference = self._reference.setdefault(name, wide)
            rows = along_rows(masks.get(name, ALL_ROWS), wide)
            trained = rows.to(wide.dtype).expand_as(wide)
            share = value.detach().double().to(wide.device) * trained
            total += float(share.sum())
            entries += float(trained.sum())
            # Sums relative to the first update lose fewer digits.
            product = weight * share * (wide - reference)
            self._products[name] = self._products.get(name, 0) + product
            self._totals[name] = self._totals.get(name, 0) + weight * share
        self._size += weight * total / max(entries, 1.0)

    def result(self) -> TensorDict:
        """Return the merged tensors so far, and store notes.

        Raises:
            UpdateError: nothing was added.
        """
        merged = self._mean.result()
        floor = self.floor * self._size
        notes = {
            name: self._coverage.note("Fisher information", name)
            for name in self._reference
        }
        self.notes = {name: note for name, note in notes.items() if note}
        for name, reference in self._reference.items():
            if not self._coverage.most(name):
                continue
            total = self._totals[name] + floor
            known = total > 0
            mean = merged[name]
            apart = self._products[name] + floor * (mean.double() - reference)
            weighted = reference + apart / torch.where(known, total, 1.0)
            merged[name] = torch.where(known, weighted.to(mean.dtype), mean)
        return merged
