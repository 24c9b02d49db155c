"""Two-stage head matching: nuclear-norm cost, then one assignment (Verma & Elbayad 2024, Alg. 1).

The score of client head ``j`` at anchor slot ``i`` is what the best rotation of that pair is worth:
the nuclear norm of its cross matrix. All slots of a layer share one permutation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping

import torch
from torch import Tensor

from fedrot.matching.blocks import Pair


def head_scores(
    heads: int,
    slots: Iterable[tuple[Pair, Hashable]],
    value: Callable[[Tensor], Tensor],
    factor: float = 1.0,
    extra: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the score of every pair of heads, float64 ``[heads (anchor), heads (client)]``.

    Args:
        heads: the number of heads.
        slots: each pair with the name of the rotation that also moves it, or None when no rotation
            follows; the cross matrices of one rotation are added before its value is taken.
        value: ``[..., d, d]`` to ``[...]``, what the rotation that follows will be worth.
        factor: of the weights' cross matrices.
        extra: further cross matrices ``[n, n]`` by rotation.
    """
    cross: dict[Hashable, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for (a, c), rotation in slots:
        blocks = factor * _by_head((a @ c.mT).double(), heads)
        cross[rotation] = cross[rotation].to(blocks.device) + (
            torch.diagonal(blocks, dim1=-2, dim2=-1).sum(-1) if rotation is None else blocks
        )
    for rotation, matrix in (extra or {}).items():
        cross[rotation] = cross[rotation] + _by_head(matrix, heads)
    scores = [m if rotation is None else value(m) for rotation, m in cross.items()]
    return torch.stack(scores).sum(0)


def _by_head(matrix: Tensor, heads: int) -> Tensor:
    """Return ``[heads, heads, d, d]`` of a matrix ``[heads * d, heads * d]``."""
    return matrix.unflatten(1, (heads, -1)).unflatten(0, (heads, -1)).transpose(1, 2)
