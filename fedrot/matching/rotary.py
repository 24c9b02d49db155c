"""The solver inside heads with rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrot.matching.inside_heads import HeadSolver
from fedrot.matching.pairs import Pairs
from fedrot.matching.problem import solves
from fedrot.options import AlignmentOptions
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns

Rotary = RotaryPhases | RotarySigns


class RotarySolver(HeadSolver):
    """Rotary phases and signs: the evidence is ``s_f``.

    It is complex128 ``[heads, dim / 2]``. With the two coordinates of a frequency as
    real and imaginary part, ``s_f = sum a_f conj(c_f)`` over queries, keys and their
    biases. The best phase is the angle of ``s_f``, the best sign the sign of its real
    part; a frequency with ``s_f = 0`` does not move.
    """

    def similarity(
        self,
        action: Rotary,
        blocks: Pairs,
    ) -> Tensor:
        terms = []
        for a, c in blocks:
            a0, a1 = action.pairs(a).unbind(2)
            c0, c1 = action.pairs(c).unbind(2)
            real = (a0 * c0).add_(a1 * c1).sum((1, 3))
            imaginary = (a1 * c0).sub_(a0 * c1).sum((1, 3))
            terms.append(torch.complex(real.double(), imaginary.double()))
        total = torch.stack(terms).sum(0)
        # Frequencies below the rounding error do not determine their phase and stay as
        # they are.
        eps = torch.finfo(blocks[0][1].dtype).eps
        return total + eps * torch.linalg.vector_norm(total, dim=1)[:, None]

    def of_cross(
        self,
        action: Rotary,
        cross: Tensor,
    ) -> Tensor:
        units = torch.arange(action.heads * action.dim, device=cross.device)
        first, second = action.pairs(units)[0, 0, :, :, 0]
        real = cross[..., first, first] + cross[..., second, second]
        imaginary = cross[..., second, first] - cross[..., first, second]
        return torch.complex(real, imaginary)

    def best(
        self,
        action: Rotary,
        evidence: Tensor,
        options: AlignmentOptions,
        precise: bool = True,
    ) -> Tensor:
        if options.within_heads == "permutation":
            # Under rotary positions, permutations of a head's units are no symmetry:
            # nothing moves.
            evidence = torch.ones_like(evidence)
        if isinstance(action, RotaryPhases):
            return evidence.angle()
        return torch.where(evidence.real < 0, -1, 1)

    def value(
        self,
        action: Rotary,
        element: Tensor,
        evidence: Tensor,
    ) -> Tensor:
        if isinstance(action, RotarySigns):
            return (element * evidence.real).sum(-1)
        return (element.cos() * evidence.real + element.sin() * evidence.imag).sum(-1)

    def still(
        self,
        action: Rotary,
        evidence: Tensor,
    ) -> Tensor:
        return evidence.real.sum(-1)


solves(RotaryPhases, RotarySigns)(RotarySolver())
