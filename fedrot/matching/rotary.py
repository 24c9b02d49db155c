"""The best rotary phases or signs, in closed form: one complex number per frequency says it all.

With the two coordinates of a frequency taken as real and imaginary part, ``s_f = sum a_f conj(c_f)``
over queries, keys and their biases; the best phase is that of ``s_f``, the best sign that of its real
part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrot.matching.pairs import Pair
from fedrot.options import AlignmentOptions
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns

Kind = RotaryPhases | RotarySigns


def similarity(kind: Kind, blocks: Sequence[Pair]) -> Tensor:
    """Return ``s_f`` as complex128 ``[heads, dim / 2]``, in one pass over the blocks."""
    found = []
    for pair in blocks:
        (a0, a1), (c0, c1) = (kind.pairs(x).unbind(2) for x in pair)
        real, imaginary = (a0 * c0).add_(a1 * c1), (a1 * c0).sub_(a0 * c1)
        found.append(torch.complex(real.sum((1, 3)).double(), imaginary.sum((1, 3)).double()))
    total = torch.stack(found).sum(0)
    # The size of rounding: frequencies below it carry no information about their phase.
    return total + torch.finfo(blocks[0][1].dtype).eps * torch.linalg.vector_norm(total, dim=1)[:, None]


def of_cross(kind: Kind, cross: Tensor) -> Tensor:
    """Return ``s_f`` of cross matrices ``A C^T``, ``[..., dim, dim]`` to complex ``[..., dim / 2]``."""
    first, second = kind.pairs(torch.arange(kind.heads * kind.dim))[0, 0, :, :, 0]
    upper, lower = cross[..., first, second], cross[..., second, first]
    return torch.complex(cross[..., first, first] + cross[..., second, second], lower - upper)


def best(kind: Kind, s: Tensor, options: AlignmentOptions, precise: bool = True) -> Tensor:
    """Return the best elements ``[..., dim / 2]``; a frequency with ``s_f = 0`` does not move.

    ``ridge`` times a head's largest ``|s_f|`` pulls towards the identity, as for rotations. Orders of
    the units inside a head are no symmetry under rotary positions.
    """
    if options.within_heads == "permutation":
        return (
            torch.zeros_like(s.real)
            if isinstance(kind, RotaryPhases)
            else torch.ones_like(s.real).long()
        )
    if options.ridge > 0:
        s = s + options.ridge * s.abs().amax(-1, keepdim=True)
    return s.angle() if isinstance(kind, RotaryPhases) else torch.where(s.real < 0, -1, 1)


def value(kind: Kind, element: Tensor, s: Tensor) -> Tensor:
    """Return ``<R, M>`` of elements, summed over the frequencies, ``[..., dim / 2]`` to ``[...]``."""
    if isinstance(kind, RotarySigns):
        return (element * s.real).sum(-1)
    return (element.cos() * s.real + element.sin() * s.imag).sum(-1)


def still(kind: Kind, s: Tensor) -> Tensor:
    """Return ``<I, M>``, of the identity."""
    return s.real.sum(-1)


def worth(kind: Kind, s: Tensor, options: AlignmentOptions) -> Tensor:
    """Return ``<R, M>`` of the best element, ``[..., dim / 2]`` to ``[...]``."""
    return value(kind, best(kind, s, options), s)
