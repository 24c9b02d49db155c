"""Neuron matching (Zhang et al. 2025, Eq. 7): an exact assignment behind an identity certificate.

The certificate: if every client neuron ``f_i`` lies within half the distance from its anchor neuron
``a_i`` to the nearest other anchor neuron, then ``|f_i - a_j| >= |a_i - a_j| - |f_i - a_i| >=
|f_i - a_i|`` for every ``j``, so the identity is an optimal assignment. The anchor's half of it is
computed once; the client's costs one pass over its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedrot.matching.blocks import Pair

#: A permutation must gain more than this share of ``|trace|`` over the identity to be accepted.
MINIMUM_GAIN = 1e-6

#: Columns of the largest slot that the quick lower bound on the anchor's separation looks at.
QUICK_COLUMNS = 64

_ROWS = 1024


def row_distances(blocks: Sequence[Pair]) -> Tensor:
    """Return ``|f_i - a_i|^2`` for every neuron, shape ``[n]``, over all slots together."""
    return sum(((c - a).square_().sum(1).double() for a, c in blocks), start=torch.zeros(())).double()


def separation(anchor: Sequence[Tensor], columns: int | None = None) -> Tensor:
    """Return a lower bound on ``min_j |a_i - a_j|``, shape ``[n]``, float64.

    Args:
        anchor: the slots of the anchor, each ``[n, rest]``.
        columns: look only at that many columns of the largest slot; dropping coordinates can only
            shorten distances, so the bound stays valid. None uses everything.

    The rounding error of the Gram matrix is subtracted, so the bound is never too large.
    """
    if columns is not None:
        anchor = [max(anchor, key=lambda block: block.shape[1])[:, :columns]]
    n = anchor[0].shape[0]
    norms = torch.stack([block.square().sum(1) for block in anchor]).sum(0)
    width = sum(block.shape[1] for block in anchor)
    eps = torch.finfo(norms.dtype).eps
    bound = torch.empty(n, dtype=torch.float64, device=norms.device)
    for start in range(0, n, _ROWS):
        rows = slice(start, min(start + _ROWS, n))
        half = (norms / 2).expand(rows.stop - start, n)
        for block in anchor:
            half = torch.addmm(half, block[rows], block.mT, alpha=-1)
        half.diagonal(start).fill_(torch.inf)
        squared = norms[rows] + 2 * half.amin(1)
        bound[rows] = (squared - width * eps * (norms[rows] + norms.amax())).clamp_min(0).sqrt()
    return bound


def certified(distances: Tensor, bound: Tensor) -> bool:
    """Return whether ``|f_i - a_i| <= bound_i / 2`` for all neurons (``distances`` are squared)."""
    return bool((distances.sqrt() * (1 + 1e-5) <= bound / 2).all())


def assignment(blocks: Sequence[Pair]) -> tuple[Tensor | None, float]:
    """Return the best permutation ``[n]`` and by how much it lowers the squared distance.

    None when the identity is optimal or within ``MINIMUM_GAIN`` of the optimum. The identity is
    recognised without solving when ``S_ij <= (S_ii + S_jj) / 2`` for all ``i, j``.
    """
    total: Tensor | None = None
    for a, c in blocks:
        total = a @ c.mT if total is None else torch.addmm(total, a, c.mT)
    if total is None:
        raise ValueError("a permutation group needs at least one slot")
    diagonal = total.diagonal().clone()
    half = diagonal / 2
    if all(
        bool((part <= half[i : i + _ROWS, None] + half).all())
        for i, part in zip(range(0, len(half), _ROWS), total.split(_ROWS), strict=True)
    ):
        return None, 0.0
    return best_assignment(total)


def best_assignment(score: Tensor) -> tuple[Tensor | None, float]:
    """Maximise ``sum_i score[i, e(i)]``; return ``(e, distance gain)`` or ``(None, 0)``."""
    _, column = linear_sum_assignment(score.cpu().numpy(), maximize=True)
    index = torch.from_numpy(column)
    best = score.double().cpu().gather(1, index[:, None]).sum()
    trace = score.diagonal().double().sum().cpu()
    improvement = float(best - trace)
    if improvement <= MINIMUM_GAIN * abs(float(trace)):
        return None, 0.0
    return index, 2 * improvement
