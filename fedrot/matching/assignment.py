"""Exact assignment of units (Zhang et al. 2025, Eq. 7), and a certificate for the
identity.

The certificate: if the distance from every client neuron ``f_i`` to its anchor neuron
``a_i`` is at most half the distance from ``a_i`` to the nearest other anchor neuron,
then ``|f_i - a_j| >= |a_i - a_j| - |f_i - a_i| >= |f_i - a_i|`` for every ``j``, and
the identity is an optimal assignment. The anchor's
distances are computed once; the client's cost one pass over its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

#: A permutation must gain more than this share of ``|trace|`` over the identity to be
#: accepted.
MINIMUM_GAIN = 1e-6

#: Numbers of columns of the widest slot in the quick lower bounds on the anchor's
#: separation.
QUICK_COLUMNS = (32, 128)

#: The full bound is computed only if distances exceed the quick bound by at most this
#: factor.
HOPELESS = 8.0

_ROWS = 256

#: Entries of a difference that is computed at once on a CPU: half a megabyte in
#: float32.
_PIECE = 2**17

#: Factor on computed distances that covers their rounding errors.
SLACK = 1 + 1e-5


def row_distances(blocks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return ``|f_i - a_i|^2`` for every neuron, shape ``[n]``, over all slots
    together.
    """
    return sum(
        (_row_distances(a, c).double() for a, c in blocks), start=torch.zeros(())
    ).double()


def _row_distances(a: Tensor, c: Tensor) -> Tensor:
    """Return the row distances of one pair; on a CPU in pieces, whose differences stay
    in its cache.
    """
    if c.device.type != "cpu" or c.numel() <= _PIECE:
        return (c - a).square_().sum(1)
    # Pieces are contiguous: rows, or columns of a matrix that is stored by columns.
    along = 0 if c.stride(0) >= c.stride(1) else 1
    pieces = zip(
        *(x.split(max(1, _PIECE // c.shape[1 - along]), along) for x in (a, c)),
        strict=True,
    )
    sums = [(theirs - ours).square_().sum(1) for ours, theirs in pieces]
    return torch.cat(sums) if along == 0 else torch.stack(sums).sum(0)


def largest(blocks: Sequence[Tensor]) -> Tensor:
    """Return the norm of the largest neuron over all slots together, a scalar."""
    return (
        sum((b.square().sum(1).double() for b in blocks), start=torch.zeros(()))
        .amax()
        .sqrt()
    )


def separation(
    plain: Sequence[Tensor], signed: Sequence[Tensor] = (), columns: int | None = None
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
    sides = [list(plain), list(signed)]
    if columns is not None:
        widest = max((*plain, *signed), key=lambda block: block.shape[1])
        sides = [
            [block[:, :columns] for block in side if block is widest] for side in sides
        ]
    features = [torch.cat(side, dim=1) if side else None for side in sides]
    norms = sum(
        (f.square().sum(1) for f in features if f is not None), start=torch.zeros(())
    )
    transposed = [None if f is None else f.mT.contiguous() for f in features]
    n, half = len(norms), norms / 2
    # max_j of <a_i, a_j> - |a_j|^2 / 2, block row by block row of the Gram matrix's
    # upper triangle.
    nearest = torch.full_like(norms, -torch.inf)
    for start in range(0, n, _ROWS):
        stop = min(start + _ROWS, n)
        gram = _gram(features, transposed, start, stop)
        gram.diagonal().fill_(-torch.inf)
        below = (
            (gram[:, stop - start :] - half[start:stop, None]).amax(0)
            if stop < n
            else half[:0]
        )
        nearest[stop:] = torch.maximum(nearest[stop:], below)
        row = gram.sub_(half[start:]).amax(1)
        nearest[start:stop] = torch.maximum(nearest[start:stop], row)
    eps = torch.finfo(norms.dtype).eps
    width = sum(f.shape[1] for f in features if f is not None)
    squares = norms - 2 * nearest - width * eps * (norms + norms.amax())
    if signed:
        # |a_i - (-a_i)|^2 costs only one pass over the slots, so all columns are used.
        flipped = 4 * sum((s.square().sum(1) for s in signed), start=torch.zeros(()))
        width = sum(s.shape[1] for s in signed)
        squares = torch.minimum(squares, flipped - width * eps * flipped)
    return squares.double().clamp_min(0).sqrt()


def _gram(
    features: Sequence[Tensor | None],
    transposed: Sequence[Tensor | None],
    start: int,
    stop: int,
) -> Tensor:
    """Return rows ``start`` to ``stop`` of the Gram matrix from column ``start``, with
    best signs.
    """
    plain, signed = (
        None if f is None or t is None else f[start:stop] @ t[:, start:]
        for f, t in zip(features, transposed, strict=True)
    )
    if plain is None or signed is None:
        return plain if plain is not None else cast(Tensor, signed).abs_()
    return plain.add_(signed.abs_())


def certified(distances: Tensor, bound: Tensor, nearer: float = 1.0) -> Tensor:
    """Return whether ``|f_i - a_i| <= nearer bound_i / 2`` for all neurons, bool
    ``[]``.

    ``distances`` are squared.
    """
    return (2 * distances.sqrt() * SLACK <= nearer * bound).all()


def identities_certified(
    distances: Sequence[Tensor], separations: Sequence[Callable[[int | None], Tensor]]
) -> list[bool]:
    """Return for each group whether a bound ``separation(columns)`` certifies the
    identity.

    Cheap bounds come first. The full bound is about ``sqrt(all columns / quick
    columns)`` times the quick bound. It is computed only if it may succeed. Each bound
    is one transfer from the device.
    """
    found = [False] * len(distances)

    def within(
        left: Sequence[int], columns: int | None, nearer: float = 1.0
    ) -> list[int]:
        checks = [
            certified(distances[i], separations[i](columns), nearer) for i in left
        ]
        known = torch.stack(checks).tolist() if checks else []
        return [i for i, ok in zip(left, known, strict=True) if ok]

    for columns in (*QUICK_COLUMNS, None):
        left = [i for i, known in enumerate(found) if not known]
        if columns is None:
            left = within(left, QUICK_COLUMNS[-1], HOPELESS)
        for i in within(left, columns):
            found[i] = True
    return found


def assignment(
    score: Tensor, signed: Tensor | None = None
) -> tuple[Tensor | None, float]:
    """Return ``best_assignment``, without solving if ``S_ij <= (S_ii + S_jj) / 2`` for
    all ``i, j``.
    """
    if signed is None:
        total, diagonal = score, score.diagonal()
    else:
        total, diagonal = score + signed.abs(), (score + signed).diagonal()
    half = diagonal.clone() / 2
    if all(
        bool((part <= half[i : i + _ROWS, None] + half).all())
        for i, part in zip(range(0, len(half), _ROWS), total.split(_ROWS), strict=True)
    ):
        return None, 0.0
    return best_assignment(score, signed)


def best_assignment(
    score: Tensor, signed: Tensor | None = None
) -> tuple[Tensor | None, float]:
    """Maximise ``sum_i score[i, e(i)]``; return ``e`` and the decrease of the squared
    distance.

    The result is ``(None, 0)`` if the identity is within ``MINIMUM_GAIN`` of the
    optimum.

    Args:
        score: similarities ``[n, n]`` of slots that keep their signs, or a scalar 0.
        signed: similarities ``[n, n]`` of slots that may change their sign. Every unit
            then gets the better sign, and ``e`` is an element of a
            ``SignedPermutation``.
    """
    place = score.device if signed is None else signed.device
    total = (score if signed is None else score + signed.abs()).cpu()
    index = best_columns(total)
    chosen = total.gather(1, index[:, None]).double().sum()
    trace = (
        (score if signed is None else score + signed).diagonal().double().sum().cpu()
    )
    improvement = float(chosen - trace)
    if improvement <= MINIMUM_GAIN * abs(float(trace)):
        return None, 0.0
    if signed is not None:
        turned = signed.cpu().gather(1, index[:, None])[:, 0] < 0
        index = (index + 1) * torch.where(turned, -1, 1)
    return index.to(place), 2 * improvement


def best_columns(score: Tensor) -> Tensor:
    """Return the column of each row that maximises ``sum_i score[i, column[i]]``, on
    the CPU.
    """
    # Imported here: the import takes a third of the time of importing torch, and is
    # rarely needed.
    from scipy.optimize import linear_sum_assignment

    return torch.from_numpy(
        linear_sum_assignment(score.cpu().numpy(), maximize=True)[1]
    )
