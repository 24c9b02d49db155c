"""Solver for one scale per head (Zhang et al. 2025, Eq. 11-12), the best of all real roots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fedrot.matching.pairs import Pair
from fedrot.matching.problem import Match, Problem
from fedrot.matching.stages import solves
from fedrot.symmetry.actions import Rescale
from fedrot.symmetry.groups import Group


@solves(Rescale)
def match_scales(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Solve the quartic of each head."""
    matches = []
    for group in groups:
        blocks = problem.pairs(group)
        before = problem.distance(group, blocks)
        element, gains = best_scale(*_products(group, blocks))
        gain = float(gains.sum())
        after = max(before - gain, 0.0)
        matches.append(Match(element if gain > 0 else None, before, after, gain))
    return matches


def _products(group: Group, blocks: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``|u|^2, <u, u_a>, |v|^2, <v, v_a>`` per head: ``u`` covariant, ``v`` contravariant."""
    heads = cast(Rescale, group.kind).heads
    sums = torch.zeros(4, heads, dtype=torch.float64, device=blocks[0][1].device)
    for slot, (a, c) in zip(group.slots, blocks, strict=True):
        ours, anchors = c.reshape(heads, -1).double(), a.reshape(heads, -1).double()
        first = 2 if slot.contravariant else 0
        sums[first] += ours.square().sum(1)
        sums[first + 1] += (ours * anchors).sum(1)
    return sums[0], sums[1], sums[2], sums[3]


def best_scale(uu: Tensor, ua: Tensor, vv: Tensor, va: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise ``|s u - u_a|^2 + |v / s - v_a|^2`` over real ``s != 0``, per head.

    The stationary points are the real roots of ``|u|^2 s^4 - <u,u_a> s^3 + <v,v_a> s - |v|^2``; the
    objective is evaluated at each of them. A head with ``u = 0`` or ``v = 0`` keeps ``s = 1``.

    Args:
        uu, ua, vv, va: ``|u|^2``, ``<u, u_a>``, ``|v|^2``, ``<v, v_a>``, each float64 ``[heads]``.

    Returns:
        The factors ``[heads]``, and the decrease of the squared distance by each, ``[heads]``.
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
