"""Solvers inside heads with rotary positions, and for scales of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fedrot.matching.inside_heads import HeadSolver
from fedrot.matching.problem import Match, Pair, Problem, solves
from fedrot.options import AlignmentOptions
from fedrot.symmetry.groups import Group
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from fedrot.symmetry.signs import Rescale

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
