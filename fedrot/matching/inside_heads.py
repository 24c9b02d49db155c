"""Solvers inside heads: ``HeadSolver``, and closed forms for rotations, rotary groups and scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from sys import float_info
from typing import Any, cast

import torch
from torch import Tensor

from fedrot.matching.chance import beyond, least
from fedrot.matching.problem import Match, Pair, Problem, in_batches, solves
from fedrot.matching.procrustes import best_orders, identity, polar, singular_values
from fedrot.options import AlignmentOptions
from fedrot.symmetry.actions import HeadRotation, Rescale
from fedrot.symmetry.groups import Group
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from fedrot.tensors import diagonal_blocks

#: An element must gain more than this share of ``|<I, M>|``; smaller gains are rounding errors.
MINIMUM_GAIN = 1e-12


class HeadSolver(ABC):
    """A solver for groups inside heads: all heads of all layers in one batch.

    The evidence ``M`` of a pair of heads determines the best element. ``<R, M>`` is the similarity of
    the heads after the element ``R`` has moved the client's head. Leading axes (layers, pairs of heads)
    are batches.
    """

    @abstractmethod
    def similarity(self, action: Any, blocks: Sequence[Pair]) -> Tensor:
        """Return the evidence from blocks of weights, ``[heads, ...]``."""

    @abstractmethod
    def of_cross(self, action: Any, cross: Tensor) -> Tensor:
        """Return the evidence from cross matrices ``A C^T``, ``[..., dim, dim]``."""

    @abstractmethod
    def best(
        self, action: Any, evidence: Tensor, options: AlignmentOptions, precise: bool = True
    ) -> Tensor:
        """Return the elements with the largest ``<R, M>``; ``precise`` means float64 weights."""

    @abstractmethod
    def value(self, action: Any, element: Tensor, evidence: Tensor) -> Tensor:
        """Return ``<R, M>`` of elements, ``[...]``."""

    @abstractmethod
    def still(self, action: Any, evidence: Tensor) -> Tensor:
        """Return ``<I, M>`` of the identity, ``[...]``."""

    def worth(self, action: Any, evidence: Tensor, options: AlignmentOptions) -> Tensor:
        """Return ``<R, M>`` of the best elements, ``[...]``."""
        return self.value(action, self.best(action, evidence, options), evidence)

    def __call__(self, groups: Sequence[Group], problem: Problem) -> list[Match]:
        """Return the matches of all groups; groups with equal actions form one batch."""
        return in_batches(groups, lambda group: group.kind, lambda _, own: self._batch(own, problem))

    def ceiling(self, action: Any, evidence: Tensor) -> Tensor | None:
        """Return upper bounds of ``<R, M> - <I, M>``, ``[...]``; None if ``best`` costs no more."""
        return None

    def _batch(self, groups: Sequence[Group], problem: Problem) -> list[Match]:
        action = groups[0].kind
        crosses, weights, before, required = [], [], [], []
        for group in groups:
            blocks = problem.pairs(group)
            before.append(problem.distance(group, blocks))
            factor, addition = problem.evidence(group, blocks)
            weights.append(self.similarity(action, blocks))
            crosses.append(factor * weights[-1])
            if addition is not None:
                own = diagonal_blocks(addition, len(addition) // action.units)
                crosses[-1] = crosses[-1] + self.of_cross(action, own)
            required.append(least(problem, group, before[-1]))
        cross, weight = torch.stack(crosses), torch.stack(weights)
        ceiling = self.ceiling(action, cross) if any(required) else None
        most = [torch.inf] * len(groups) if ceiling is None else (2 * ceiling.sum(1)).tolist()
        # Groups that cannot be compared gain nothing.
        most = [gain if needed < torch.inf else 0.0 for gain, needed in zip(most, required, strict=True)]
        matches = [Match(None, b, b, gain) for b, gain in zip(before, most, strict=True)]
        # If chance is drawn later, a group may still be evidence for the others.
        enough = beyond(most, [max(needed, float_info.min) for needed in required])
        left = [i for i in range(len(groups)) if enough[i]]
        if left:
            precise = blocks[0][1].dtype == torch.float64
            cross, weight = cross[left], weight[left]
            best = self.best(action, cross, problem.options, precise)
            gains, removed = (
                (2 * (self.value(action, best, m) - self.still(action, m)).sum(1)).tolist()
                for m in (cross, weight)
            )
            traces = self.still(action, cross).sum(1).abs().tolist()
        for place, i in enumerate(left):
            after = max(before[i] - removed[place], 0.0)
            found = gains[place] > MINIMUM_GAIN * traces[place]
            still = Match(None, before[i], before[i])
            matches[i] = Match(best[place], before[i], after, gains[place]) if found else still
        return matches


#: Factor on the ceiling that covers its rounding errors in float32.
ROUNDED = 1.01


class RotationSolver(HeadSolver):
    """Rotations: the evidence is ``M = sum over slots of A C^T``, float64 ``[heads, dim, dim]``."""

    def similarity(self, action: HeadRotation, blocks: Sequence[Pair]) -> Tensor:
        sides = ([_by_key_head(action, x) for x in pair] for pair in blocks)
        total = reduce(Tensor.add_, (torch.bmm(a, c.mT) for a, c in sides))
        # Directions of M below its rounding error do not determine the rotation and stay as they are.
        m = total.double()
        noise = torch.finfo(total.dtype).eps * torch.linalg.matrix_norm(m)
        return m + noise[:, None, None] * identity(m)

    def of_cross(self, action: HeadRotation, cross: Tensor) -> Tensor:
        return cross

    def ceiling(self, action: HeadRotation, evidence: Tensor) -> Tensor:
        """Return ``|H^-1/2 K|^2 / 2``, where ``M = H + K`` with ``H`` symmetric and ``K`` skew.

        For every ``P > 0``, ``|M|_* <= tr(P + M^T P^-1 M) / 2``; here ``P = H``. The bound is infinite
        if ``H`` is not positive definite.
        """
        single = evidence.float()
        symmetric, skew = ((single + s * single.mT) / 2 for s in (1, -1))
        factor, failed = torch.linalg.cholesky_ex(symmetric)
        half = torch.linalg.solve_triangular(factor, skew, upper=False)
        bound = ROUNDED * half.square().sum((-1, -2)).double() / 2
        return torch.where(failed > 0, torch.inf, bound)

    def best(
        self, action: HeadRotation, evidence: Tensor, options: AlignmentOptions, precise: bool = True
    ) -> Tensor:
        if options.within_heads == "permutation":
            return best_orders(evidence)
        return polar(evidence, precise=precise)

    def value(self, action: HeadRotation, element: Tensor, evidence: Tensor) -> Tensor:
        return (element * evidence).sum((-1, -2))

    def still(self, action: HeadRotation, evidence: Tensor) -> Tensor:
        return torch.diagonal(evidence, dim1=-2, dim2=-1).sum(-1)

    def worth(self, action: HeadRotation, evidence: Tensor, options: AlignmentOptions) -> Tensor:
        if options.within_heads == "rotation":
            return singular_values(evidence).sum(-1)
        return super().worth(action, evidence, options)


def _by_key_head(action: HeadRotation, rows: Tensor) -> Tensor:
    """Return ``[heads, dim, rest]``; query heads that share a key head are joined in ``rest``."""
    if len(rows) == action.heads * action.dim:
        return rows.unflatten(0, (action.heads, action.dim))
    return rows.unflatten(0, (action.heads, -1, action.dim)).transpose(1, 2).flatten(2)


Rotary = RotaryPhases | RotarySigns


class RotarySolver(HeadSolver):
    """Rotary phases and signs: the evidence is ``s_f``, complex128 ``[heads, dim / 2]``.

    With the two coordinates of a frequency as real and imaginary part, ``s_f = sum a_f conj(c_f)`` over
    queries, keys and their biases. The best phase is the angle of ``s_f``, the best sign the sign of its
    real part; a frequency with ``s_f = 0`` does not move.
    """

    def similarity(self, action: Rotary, blocks: Sequence[Pair]) -> Tensor:
        found = []
        for pair in blocks:
            (a0, a1), (c0, c1) = (action.pairs(x).unbind(2) for x in pair)
            real, imaginary = (a0 * c0).add_(a1 * c1), (a1 * c0).sub_(a0 * c1)
            found.append(torch.complex(real.sum((1, 3)).double(), imaginary.sum((1, 3)).double()))
        total = torch.stack(found).sum(0)
        # Frequencies below the rounding error do not determine their phase and stay as they are.
        eps = torch.finfo(blocks[0][1].dtype).eps
        return total + eps * torch.linalg.vector_norm(total, dim=1)[:, None]

    def of_cross(self, action: Rotary, cross: Tensor) -> Tensor:
        units = torch.arange(action.heads * action.dim, device=cross.device)
        first, second = action.pairs(units)[0, 0, :, :, 0]
        upper, lower = cross[..., first, second], cross[..., second, first]
        return torch.complex(cross[..., first, first] + cross[..., second, second], lower - upper)

    def best(
        self, action: Rotary, evidence: Tensor, options: AlignmentOptions, precise: bool = True
    ) -> Tensor:
        phases = isinstance(action, RotaryPhases)
        # Under rotary positions, permutations of a head's units are no symmetry: nothing moves.
        if options.within_heads == "permutation":
            return torch.zeros_like(evidence.real) if phases else torch.ones_like(evidence.real).long()
        return evidence.angle() if phases else torch.where(evidence.real < 0, -1, 1)

    def value(self, action: Rotary, element: Tensor, evidence: Tensor) -> Tensor:
        if isinstance(action, RotarySigns):
            return (element * evidence.real).sum(-1)
        return (element.cos() * evidence.real + element.sin() * evidence.imag).sum(-1)

    def still(self, action: Rotary, evidence: Tensor) -> Tensor:
        return evidence.real.sum(-1)


solves(HeadRotation)(RotationSolver())
solves(RotaryPhases, RotarySigns)(RotarySolver())


@solves(Rescale)
def match_scales(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Solve the quartic of each head."""
    matches = []
    for group in groups:
        blocks = problem.pairs(group)
        before = problem.distance(group, blocks)
        heads = cast(Rescale, group.kind).heads
        # |u|^2, <u, u_a>, |v|^2, <v, v_a> per head: u is covariant, v contravariant.
        sums = torch.zeros(4, heads, dtype=torch.float64, device=blocks[0][1].device)
        for slot, (a, c) in zip(group.slots, blocks, strict=True):
            ours, anchors = c.reshape(heads, -1).double(), a.reshape(heads, -1).double()
            first = 2 if slot.contravariant else 0
            sums[first] += ours.square().sum(1)
            sums[first + 1] += (ours * anchors).sum(1)
        element, gains = best_scale(*sums)
        gain = float(gains.sum())
        after = max(before - gain, 0.0)
        matches.append(Match(element if gain > 0 else None, before, after, gain))
    return matches


def best_scale(uu: Tensor, ua: Tensor, vv: Tensor, va: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise ``|s u - u_a|^2 + |v / s - v_a|^2`` over real ``s != 0``, per head.

    The stationary points are the real roots of ``|u|^2 s^4 - <u,u_a> s^3 + <v,v_a> s - |v|^2``; the
    objective is evaluated at each root. A head with ``u = 0`` or ``v = 0`` keeps ``s = 1``.

    Args:
        uu, ua, vv, va: ``|u|^2``, ``<u, u_a>``, ``|v|^2``, ``<v, v_a>``, each float64 ``[heads]``.

    Returns:
        The factors ``[heads]``, and the decrease of the squared distance of each head, ``[heads]``.
    """
    usable = (uu > 0) & (vv > 0)
    safe = torch.where(usable, uu, torch.ones_like(uu))
    companion = torch.zeros(len(uu), 4, 4, dtype=torch.float64, device=uu.device)
    companion[:, 1:, :3] = torch.eye(3, dtype=torch.float64, device=uu.device)
    companion[:, 0, 0], companion[:, 0, 2], companion[:, 0, 3] = ua / safe, -va / safe, vv / safe
    # On the CPU: few GPU builds of torch have eigenvalues of asymmetric matrices.
    roots = torch.linalg.eigvals(companion.cpu()).to(uu.device)
    real = (roots.imag.abs() <= 1e-9 * roots.abs()) & (roots.abs() > 0) & usable[:, None]
    one = torch.ones_like(uu)[:, None]
    candidates = torch.cat([one, torch.where(real, roots.real, one)], dim=1)

    def objective(s: Tensor) -> Tensor:
        column = [x[:, None] for x in (uu, ua, vv, va)]
        return column[0] * s**2 - 2 * column[1] * s + column[2] / s**2 - 2 * column[3] / s

    costs = objective(candidates)
    best = costs.argmin(1, keepdim=True)
    return candidates.gather(1, best)[:, 0], (costs[:, :1] - costs.gather(1, best))[:, 0]
