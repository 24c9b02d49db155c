"""Fisher-weighted averaging."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.errors import FedrotError, UpdateError
from fedrot.statistic_kinds import (
    FISHER,
    TRAINED,
    Statistics,
    Tensors,
    along_rows,
    untrained,
)


class Fisher:
    """Average weighted by diagonal Fisher information (Matena & Raffel 2021; Jin et al. 2023, sec. 3.1).

    ``theta = sum_i w_i F_i theta_i / sum_i w_i F_i`` entry by entry, the weighted mean for tensors
    without a Fisher and where it is zero at every client. Sums are float64. Rows that a client has not
    trained (statistics ``trained``) count for nothing.

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
        self._lacking: set[str] = set()

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
        self._mean.check(update, weight, statistics)
        masks = (statistics or {}).get(TRAINED, {})
        lacking = untrained(statistics)
        given = (statistics or {}).get(FISHER, {})
        fisher = {name: value for name, value in given.items() if name not in lacking}
        if not fisher:
            raise UpdateError(
                "The update comes without Fisher information, which this average needs; see "
                "fedrot.collect_fisher."
            )
        known = self._reference.keys()
        odd = sorted((known - fisher.keys() - lacking) | (fisher.keys() - known - self._lacking))
        if known and odd:
            raise UpdateError(
                f"The Fisher information of '{odd[0]}' is missing or extra, compared with the first "
                "update. Collect statistics alike at every client."
            )
        self._mean.fold(update, weight, statistics)
        self._lacking |= lacking
        total = entries = 0.0
        for name, value in fisher.items():
            theirs = update[name].detach().double()
            reference = self._reference.setdefault(name, theirs)
            rows = along_rows(masks.get(name, torch.tensor(True)), theirs)
            trained = rows.to(theirs.dtype).expand_as(theirs)
            share = value.detach().double().to(theirs.device) * trained
            total, entries = total + float(share.sum()), entries + float(trained.sum())
            self._products[name] = self._products.get(name, 0) + weight * share * (theirs - reference)
            self._totals[name] = self._totals.get(name, 0) + weight * share
        self._size += weight * total / entries

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
