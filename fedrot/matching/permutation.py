"""Neuron matching (Zhang et al. 2025, Eq. 7): an exact assignment behind an identity certificate.

The certificate: if every client neuron ``f_i`` lies within half the distance from its anchor neuron
``a_i`` to the nearest other anchor neuron, then ``|f_i - a_j| >= |a_i - a_j| - |f_i - a_i| >=
|f_i - a_i|`` for every ``j``, so the identity is an optimal assignment. The anchor's half of it is
computed once; the client's costs one pass over its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedrot.matching.blocks import Pair

#: A permutation must gain more than this share of ``|trace|`` over the identity to be accepted.
MINIMUM_GAIN = 1e-6

#: Columns of the widest slot that the quick lower bounds on the anchor's separation look at.
QUICK_COLUMNS = (32, 128)

#: How many times its quick bound a client may exceed before the full bound is not even tried.
HOPELESS = 8.0

_ROWS = 256


def row_distances(blocks: Sequence[Pair]) -> Tensor:
    """Return ``|f_i - a_i|^2`` for every neuron, shape ``[n]``, over all slots together."""
    return sum(((c - a).square_().sum(1).double() for a, c in blocks), start=torch.zeros(())).double()


def separation(anchor: Sequence[Tensor], columns: int | None = None) -> Tensor:
    """Return a lower bound on ``min_j |a_i - a_j|``, shape ``[n]``, float64.

    Args:
        anchor: the slots of the anchor, each ``[n, rest]``.
        columns: look only at that many columns of the widest slot; dropping coordinates can only
            shorten distances, so the bound stays valid. None uses everything.

    The rounding error of the Gram matrix is subtracted, so the bound is never too large.
    """
    if columns is not None:
        anchor = [max(anchor, key=lambda block: block.shape[1])[:, :columns]]
    features = torch.cat(tuple(anchor), dim=1)
    transposed = features.mT.contiguous()
    norms = features.square().sum(1)
    n, half = len(norms), norms / 2
    # max_j of <a_i, a_j> - |a_j|^2 / 2, block row by block row of the Gram matrix's upper triangle.
    nearest = torch.full_like(norms, -torch.inf)
    for start in range(0, n, _ROWS):
        stop = min(start + _ROWS, n)
        gram = features[start:stop] @ transposed[:, start:]
        gram.diagonal().fill_(-torch.inf)
        below = (gram[:, stop - start :] - half[start:stop, None]).amax(0) if stop < n else half[:0]
        nearest[stop:] = torch.maximum(nearest[stop:], below)
        row = gram.sub_(half[start:]).amax(1)
        nearest[start:stop] = torch.maximum(nearest[start:stop], row)
    rounding = features.shape[1] * torch.finfo(norms.dtype).eps * (norms + norms.amax())
    return (norms - 2 * nearest - rounding).double().clamp_min(0).sqrt()


def certified(distances: Tensor, bound: Tensor) -> bool:
    """Return whether ``|f_i - a_i| <= bound_i / 2`` for all neurons (``distances`` are squared)."""
    return bool((2 * distances.sqrt() * (1 + 1e-5) <= bound).all())


def identity_certified(distances: Tensor, separation: Callable[[int | None], Tensor]) -> bool:
    """Return whether some bound of ``separation(columns)`` certifies the identity, cheapest first.

    The full bound is the dearest and is tried only while it can still succeed: it is about
    ``sqrt(all columns / quick columns)`` times the quick one.
    """
    if any(certified(distances, separation(columns)) for columns in QUICK_COLUMNS):
        return True
    within_reach = certified(distances / HOPELESS**2, separation(QUICK_COLUMNS[-1]))
    return within_reach and certified(distances, separation(None))


def assignment(score: Tensor) -> tuple[Tensor | None, float]:
    """Return the best permutation ``[n]`` and by how much it lowers the squared distance.

    None when the identity is optimal or within ``MINIMUM_GAIN`` of the optimum. The identity is
    recognised without solving when ``S_ij <= (S_ii + S_jj) / 2`` for all ``i, j``.
    """
    half = score.diagonal().clone() / 2
    if all(
        bool((part <= half[i : i + _ROWS, None] + half).all())
        for i, part in zip(range(0, len(half), _ROWS), score.split(_ROWS), strict=True)
    ):
        return None, 0.0
    return best_assignment(score)


def best_assignment(score: Tensor, signed: bool = False) -> tuple[Tensor | None, float]:
    """Maximise ``sum_i score[i, e(i)]``; return ``(e, distance gain)`` or ``(None, 0)``.

    With ``signed`` every unit may also change its sign, and ``e`` is an element of a
    ``SignedPermutation``.
    """
    # Importing scipy.optimize takes a third of the time of importing torch, and is rarely needed.
    from scipy.optimize import linear_sum_assignment

    _, column = linear_sum_assignment((score.abs() if signed else score).cpu().numpy(), maximize=True)
    index = torch.from_numpy(column)
    chosen = score.double().cpu().gather(1, index[:, None])[:, 0]
    best = chosen.abs().sum() if signed else chosen.sum()
    trace = score.diagonal().double().sum().cpu()
    improvement = float(best - trace)
    if improvement <= MINIMUM_GAIN * abs(float(trace)):
        return None, 0.0
    if signed:
        index = (index + 1) * torch.where(chosen < 0, -1, 1)
    return index, 2 * improvement
