"""``fisher-damped``: Fisher weighting whose information is scaled tensor by tensor."""

from __future__ import annotations

import torch

from fedrot.aggregation import Fisher
from fedrot.collect.statistics import FISHER, Statistics
from fedrot.tensors import Tensors
from reproductions.changes import of_head


class DampedFisher(Fisher):
    """``Fisher`` whose information is divided, tensor by tensor and client by client, by its mean.

    So no client and no tensor dominates. The floor is a ridge towards the mean. Pooler and task head are
    averaged.
    """

    def __init__(self, floor: float = 0.1) -> None:
        super().__init__(floor)

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Add one update; raises ``UpdateError`` as ``Fisher.add``."""
        scaled = {
            name: value / value.mean().clamp_min(torch.finfo(value.dtype).tiny)
            for name, value in (statistics or {}).get(FISHER, {}).items()
            if not of_head(name)
        }
        super().add(update, weight, {**(statistics or {}), FISHER: scaled})
