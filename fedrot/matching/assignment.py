"""Exact assignment of units (Zhang et al. 2025, Eq. 7), and when it is the identity.

The certificate of the identity: if the distance from every client neuron ``f_i`` to its
anchor neuron ``a_i`` is at most half the distance from ``a_i`` to the nearest other
anchor neuron, then ``|f_i - a_j| >= |a_i - a_j| - |f_i - a_i| >= |f_i - a_i|`` for
every ``j``, and the identity is an optimal assignment. The anchor's distances are
computed once; the client's cost one pass over its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import compress

import torch
from torch import Tensor

#: An order of units, None for the identity, and the decrease of the squared distance.
Assigned = tuple[Tensor | None, float]

#: A permutation must gain more than this share of ``|trace|`` over the identity to be
#: accepted.
MINIMUM_GAIN = 1e-6

#: Numbers of columns of the widest slot in the quick lower bounds on the anchor's
#: separation.
QUICK_COLUMNS = (32, 128)

#: The full bound is computed only if distances exceed the quick bound by at most this
#: factor.
HOPELESS = 8.0

#: Slots side by side, ``[n, columns]``; their transpose; and whether their rows may
#: change the sign.
_Side = tuple[Tensor, Tensor, bool]

#: Rows of a Gram matrix that are computed at once.
_ROWS = 256

#: Entries of a difference that is computed at once on a CPU: half a megabyte in
#: float32.
_PIECE = 2**17

#: Factor on computed distances that covers their rounding errors.
SLACK = 1 + 1e-5


def summed(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors, added in their order; a float64 0 if there are none.

    The 0 is a scalar, so that the sum of other tensors keeps their dtype.
    """
    return sum(terms, start=torch.zeros((), dtype=torch.float64))


def row_distances(blocks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return ``|f_i - a_i|^2`` for every neuron over all slots, float64 ``[n]``."""
    return summed(_row_distances(a, c).double() for a, c in blocks)


def _row_distances(
    a: Tensor,
    c: Tensor,
) -> Tensor:
    """Return the row distances of one pair; on a CPU, pieces stay in its cache."""
    if c.device.type != "cpu" or c.numel() <= _PIECE:
        return (c - a).square_().sum(1)
    # Pieces are contiguous: rows, or columns of a matrix that is stored by columns.
    along = 0 if c.stride(0) >= c.stride(1) else 1
    size = max(1, _PIECE // c.shape[1 - along])
    pieces = zip(a.split(size, along), c.split(size, along), strict=True)
    sums = [(rows - others).square_().sum(1) for others, rows in pieces]
    return torch.stack(sums).sum(0) if along else torch.cat(sums)


def largest(blocks: Sequence[Tensor]) -> Tensor:
    """Return the norm of the largest neuron over all slots together, a scalar."""
    return summed(block.square().sum(1).double() for block in blocks).amax().sqrt()


def separation(
    plain: Sequence[Tensor],
    signed: Sequence[Tensor] = (),
    columns: int | None = None,
) -> Tensor:
    """Return a lower bound on ``min_j |a_i - a_j|``, shape ``[n]``, float64.

    Args:
        plain: the slots of the anchor, each ``[n, rest]``.
        signed: slots whose rows may change their sign together; the bound then holds
            for ``j`` with either sign, and for ``-a_i``.
        columns: number of columns to use, of the widest slot only. Fewer coordinates
            shorten distances, so the bound stays valid. None uses all columns of all
            slots.

    The rounding error of the Gram matrices is subtracted, so the bound is never too
    large.
    """
    widest = max((*plain, *signed), key=lambda block: block.shape[1])
    sides: list[_Side] = []
    for slots, with_signs in ((plain, False), (signed, True)):
        used = [x[:, :columns] for x in slots if columns is None or x is widest]
        if used:
            features = torch.cat(used, dim=1)
            sides.append((features, features.mT.contiguous(), with_signs))
    norms = summed(features.square().sum(1) for features, _, _ in sides)
    half = norms / 2
    # max_j of <a_i, a_j> - |a_j|^2 / 2, block row by block row of the Gram matrix's
    # upper triangle.
    nearest = torch.full_like(norms, -torch.inf)
    for start in range(0, len(norms), _ROWS):
        stop = start + _ROWS
        gram = _gram(sides, start, stop)
        gram.diagonal().fill_(-torch.inf)
        if stop < len(norms):
            below = (gram[:, _ROWS:] - half[start:stop, None]).amax(0)
            nearest[stop:] = torch.maximum(nearest[stop:], below)
        row = gram.sub_(half[start:]).amax(1)
        nearest[start:stop] = torch.maximum(nearest[start:stop], row)
    eps = torch.finfo(norms.dtype).eps
    width = sum(features.shape[1] for features, _, _ in sides)
    rounding = width * eps * (norms + norms.amax())
    squares = norms - 2 * nearest - rounding
    if signed:
        # |a_i - (-a_i)|^2 costs only one pass over the slots, so all columns are used.
        flipped = 4 * summed(block.square().sum(1) for block in signed)
        width = sum(block.shape[1] for block in signed)
        squares = torch.minimum(squares, flipped - width * eps * flipped)
    return squares.double().clamp_min(0).sqrt()


def _gram(
    sides: Sequence[_Side],
    start: int,
    stop: int,
) -> Tensor:
    """Return rows of the Gram matrix from column ``start``, with the best signs."""
    products = []
    for features, transposed, with_signs in sides:
        product = features[start:stop] @ transposed[:, start:]
        products.append(product.abs_() if with_signs else product)
    return reduce(Tensor.add_, products)


def certified(
    distances: Tensor,
    bound: Tensor,
    nearer: float = 1.0,
) -> Tensor:
    """Return whether ``|f_i - a_i| <= nearer bound_i / 2`` for all neurons, bool
    ``[]``.

    ``distances`` are squared.
    """
    return (2 * distances.sqrt() * SLACK <= nearer * bound).all()


def identities_certified(
    distances: Sequence[Tensor],
    separations: Sequence[Callable[[int | None], Tensor]],
) -> list[bool]:
    """Return for each group whether a bound certifies the identity.

    ``separations`` are functions from a number of columns to a group's bound. Cheap
    bounds come first. The full bound is about ``sqrt(all columns / quick columns)``
    times the quick bound. It is computed only if it may succeed. Each bound is one
    transfer from the device.
    """
    groups = range(len(distances))
    proven: set[int] = set()

    def within(
        left: Sequence[int],
        columns: int | None,
        nearer: float = 1.0,
    ) -> list[int]:
        if not left:
            return []
        checks = []
        for i in left:
            checks.append(certified(distances[i], separations[i](columns), nearer))
        return list(compress(left, torch.stack(checks).tolist()))

    for columns in (*QUICK_COLUMNS, None):
        left = [i for i in groups if i not in proven]
        if columns is None:
            left = within(left, QUICK_COLUMNS[-1], HOPELESS)
        proven.update(within(left, columns))
    return [i in proven for i in groups]


def assignment(
    score: Tensor,
    signed: Tensor | None = None,
) -> Assigned:
    """Return ``best_assignment``; if the identity is clearly best, without solving.

    It is the optimum if ``S_ij <= (S_ii + S_jj) / 2`` for all ``i, j``.
    """
    total, diagonal = _with_best_signs(score, signed)
    half = diagonal / 2
    # Row by row block, because the sums of all pairs take as much memory as the scores.
    for start in range(0, len(half), _ROWS):
        rows = slice(start, start + _ROWS)
        if not (total[rows] <= half[rows, None] + half).all():
            return best_assignment(score, signed)
    return None, 0.0


def _with_best_signs(
    score: Tensor,
    signed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the scores of all pairs ``[n, n]``, and of the identity ``[n]``."""
    if signed is None:
        return score, score.diagonal()
    # A copy of the diagonal: a view would keep the sums of all pairs in memory.
    diagonal = (score + signed).diagonal().clone()
    return score + signed.abs(), diagonal


def best_assignment(
    score: Tensor,
    signed: Tensor | None = None,
) -> Assigned:
    """Maximise ``sum_i score[i, e(i)]``; return ``e`` and the distance it removes.

    The distance is the decrease of the squared distance. The result is ``(None, 0)`` if
    the identity is within ``MINIMUM_GAIN`` of the optimum.

    Args:
        score: similarities ``[n, n]`` of slots that keep their signs, or a scalar 0.
        signed: similarities ``[n, n]`` of slots that may change their sign. Every unit
            then gets the better sign, and ``e`` is an element of a
            ``SignedPermutation``.
    """
    total, diagonal = _with_best_signs(score, signed)
    device = total.device
    total = total.cpu()
    index = best_columns(total)
    column = index[:, None]
    chosen = float(total.gather(1, column).double().sum())
    trace = float(diagonal.double().sum())
    improvement = chosen - trace
    if improvement <= MINIMUM_GAIN * abs(trace):
        return None, 0.0
    if signed is not None:
        turned = signed.cpu().gather(1, column)[:, 0] < 0
        index = (index + 1) * torch.where(turned, -1, 1)
    return index.to(device), 2 * improvement


def joined(
    orders: Sequence[Assigned],
    identity: Tensor,
) -> tuple[Tensor, float]:
    """Return several orders as one element ``[orders, n]``, on the CPU, and their gain.

    ``identity`` ``[n]`` takes the place of None.
    """
    elements = [identity if order is None else order.cpu() for order, _ in orders]
    return torch.stack(elements), sum(gain for _, gain in orders)


def best_columns(score: Tensor) -> Tensor:
    """Return the columns that maximise ``sum_i score[i, column[i]]``, on the CPU."""
    # Imported here: the import takes a third of the time of importing torch, and is
    # rarely needed.
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(score.cpu().numpy(), maximize=True)
    return torch.from_numpy(columns)
