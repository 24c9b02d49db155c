"""Closed forms for rotary phases and signs: one complex number of evidence per frequency.

With the two coordinates of a frequency as real and imaginary part, the evidence is
``s_f = sum a_f conj(c_f)`` over queries, keys and their biases. The best phase is the angle of ``s_f``,
the best sign that of its real part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrot.matching.inside_heads import HeadSolver
from fedrot.matching.pairs import Pair
from fedrot.matching.stages import solves
from fedrot.options import AlignmentOptions
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns

Rotary = RotaryPhases | RotarySigns


class RotarySolver(HeadSolver):
    """The phase or sign of each frequency that maximises ``Re sum e^(i phase) conj(s_f)``."""

    def similarity(self, action: Rotary, blocks: Sequence[Pair]) -> Tensor:
        """Return ``s_f`` as complex128 ``[heads, dim / 2]``."""
        found = []
        for pair in blocks:
            (a0, a1), (c0, c1) = (action.pairs(x).unbind(2) for x in pair)
            real, imaginary = (a0 * c0).add_(a1 * c1), (a1 * c0).sub_(a0 * c1)
            found.append(torch.complex(real.sum((1, 3)).double(), imaginary.sum((1, 3)).double()))
        total = torch.stack(found).sum(0)
        # Frequencies below the rounding error say nothing about their phase: they do not turn.
        eps = torch.finfo(blocks[0][1].dtype).eps
        return total + eps * torch.linalg.vector_norm(total, dim=1)[:, None]

    def of_cross(self, action: Rotary, cross: Tensor) -> Tensor:
        """Return ``s_f`` as complex ``[..., dim / 2]``."""
        first, second = action.pairs(torch.arange(action.heads * action.dim))[0, 0, :, :, 0]
        upper, lower = cross[..., first, second], cross[..., second, first]
        return torch.complex(cross[..., first, first] + cross[..., second, second], lower - upper)

    def best(
        self, action: Rotary, evidence: Tensor, options: AlignmentOptions, precise: bool = True
    ) -> Tensor:
        """Return the best elements ``[..., dim / 2]``; a frequency with ``s_f = 0`` does not move.

        ``ridge`` times a head's largest ``|s_f|`` is added to ``s_f``. With
        ``within_heads="permutation"`` nothing moves: orders of a head's units are no symmetry under
        rotary positions.
        """
        phases = isinstance(action, RotaryPhases)
        if options.within_heads == "permutation":
            return torch.zeros_like(evidence.real) if phases else torch.ones_like(evidence.real).long()
        if options.ridge > 0:
            evidence = evidence + options.ridge * evidence.abs().amax(-1, keepdim=True)
        return evidence.angle() if phases else torch.where(evidence.real < 0, -1, 1)

    def value(self, action: Rotary, element: Tensor, evidence: Tensor) -> Tensor:
        """Return ``<R, M>``, summed over the frequencies, ``[..., dim / 2]`` to ``[...]``."""
        if isinstance(action, RotarySigns):
            return (element * evidence.real).sum(-1)
        return (element.cos() * evidence.real + element.sin() * evidence.imag).sum(-1)

    def still(self, action: Rotary, evidence: Tensor) -> Tensor:
        """Return the sums of the real parts."""
        return evidence.real.sum(-1)


solves(RotaryPhases, RotarySigns)(RotarySolver())
