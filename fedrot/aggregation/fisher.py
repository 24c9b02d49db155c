"""Fisher-weighted averaging."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.aggregation.statistics import FISHER, Statistics, Tensors
from fedrot.errors import FedrotError, UpdateError


class Fisher:
    """Average weighted by diagonal Fisher information (Matena & Raffel 2021; Jin et al. 2023, sec. 3.1).

    ``theta = sum_i w_i F_i theta_i / sum_i w_i F_i`` entry by entry, the weighted mean for tensors
    without a Fisher and where it is zero at every client. Sums are float64.

    The diagonal does not follow a rotation: clients align first and compute it then (``align_mod``),
    or only permutations are aligned.

    Args:
        floor: added to every ``F_i``, as a share of the mean of all entries of all updates, so that
            what the loss does not see (a key's bias, say) is averaged, and not decided by rounding.
    """

    needs: tuple[str, ...] = (FISHER,)

    def __init__(self, floor: float = 1e-6) -> None:
        if not 0 <= floor < float("inf"):
            raise FedrotError(f"floor is {floor}; it must not be negative.")
        self.floor = floor
        self._mean = Mean()
        self._reference: dict[str, Tensor] = {}
        self._products: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self._size = 0.0

    @property
    def notes(self) -> Mapping[str, str]:
        """What was out of the ordinary, by tensor; always empty."""
        return {}

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Fold one update in, with its Fisher information.

        Raises:
            UpdateError: as ``Mean.add``; or there is no Fisher information, or it is of other tensors
                than the first update's. Nothing has been added then.
        """
        fisher = (statistics or {}).get(FISHER, {})
        if not fisher:
            raise UpdateError(
                "The update comes without Fisher information, which this average needs; see "
                "fedrot.collect_fisher."
            )
        odd = sorted(fisher.keys() ^ self._reference.keys()) if self._reference else []
        if odd:
            raise UpdateError(
                f"The Fisher information of '{odd[0]}' is missing or extra, compared with the first "
                "update. Collect statistics alike at every client."
            )
        self._mean.add(update, weight, statistics)
        if not self._reference:
            self._reference = {name: update[name].detach().double() for name in fisher}
        entries = sum(value.numel() for value in fisher.values())
        mean = sum(float(value.double().sum()) for value in fisher.values()) / entries
        self._size += weight * mean
        for name, value in fisher.items():
            share = weight * value.detach().double()
            product = share * (update[name].detach().double() - self._reference[name])
            self._products[name] = self._products.get(name, 0) + product
            self._totals[name] = self._totals.get(name, 0) + share

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors so far; adding may go on afterwards.

        Raises:
            UpdateError: nothing was added.
        """
        merged, floor = self._mean.result(), self.floor * self._size
        for name, reference in self._reference.items():
            total = self._totals[name] + floor
            known = total > 0
            apart = self._products[name] + floor * (merged[name].double() - reference)
            found = reference + apart / torch.where(known, total, 1.0)
            merged[name] = torch.where(known, found.to(merged[name].dtype), merged[name])
        return merged
