"""``ace``: least squares on input covariances that are estimated from the updates themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from fedrot.collect.statistics import Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.tensors import Tensors
from reproductions.changes import OfChanges, body_layers

#: Names of layers that read the same input, beside each other in one module.
_SAME_INPUT = re.compile(r"\.(query|key|value|[qkv]_(proj|lin))\.weight$")


class Ace(OfChanges):
    """The core of ACE-Merging (Xu et al., arXiv 2603.02945), with a ridge towards the mean.

    With ``D_i = W_i - W_0`` the input covariance of a layer is estimated by ``S_i = D_i^T D_i``, divided
    by its trace. Then ``W`` minimises
    ``sum_i w_i tr((W - W_i) S_i (W - W_i)^T) + ridge s |W - mean|^2``, where ``s`` is the mean diagonal
    of ``sum_i w_i S_i``. (Shrinkage of every ``S_i`` to a multiple of the identity is the same.) Layers
    that read the same input (query, key, value) share one estimate. The paper's collective prior and
    spectral refinement are left out. Sums are float64.

    Args:
        ridge: positive.
        head: 1 to solve pooler and task head, too.
        shared: 0 for an estimate per layer.
    """

    def __init__(self, ridge: float = 1.0, head: float = 0.0, shared: float = 1.0) -> None:
        super().__init__()
        if not ridge > 0:
            raise FedrotError(f"ridge is {ridge}; it must be positive.")
        self.ridge, self.head, self.shared = ridge, bool(head), bool(shared)
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Add one update; raises ``UpdateError`` if it is unlike the broadcast model or not finite."""
        start = self._known()
        for name in (name for name, tensor in update.items() if tensor.is_floating_point()):
            if not bool(torch.isfinite(update[name]).all()):
                raise UpdateError(f"The tensor '{name}' holds NaN or Inf.")
        super().add(update, weight, statistics)
        for names in self._groups(update):
            changes = {name: update[name].double() - start[name].double() for name in names}
            stacked = torch.cat([*changes.values()])
            size = stacked.square().sum()
            covariance = weight * (stacked.mT @ stacked) / torch.where(size > 0, size, 1.0)
            for name, change in changes.items():
                product, total = self._sums.get(name, (0, 0))
                self._sums[name] = product + change @ covariance, total + covariance

    def _groups(self, tensors: Tensors) -> Iterable[list[str]]:
        groups: dict[str, list[str]] = {}
        for name in body_layers(tensors, self.head):
            module = _SAME_INPUT.sub("", name) if self.shared else name
            groups.setdefault(module, []).append(name)
        return groups.values()

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors; raises ``UpdateError`` if nothing was added."""
        merged, start = self._mean.result(), self._known()
        for name, (product, total) in self._sums.items():
            size = self.ridge * total.diagonal().mean()
            if not size > 0:
                continue  # Nobody has changed the layer.
            mean = merged[name].double() - start[name].double()
            factor = torch.linalg.cholesky(total + size * torch.eye(len(total)).to(total))
            found = mean + torch.cholesky_solve((product - mean @ total).mT, factor).mT
            merged[name] = (start[name].double() + found).to(merged[name].dtype)
        return merged
