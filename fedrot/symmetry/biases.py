"""Canonical biases: redundant attention biases are set to 0 before models are compared."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrot.precision import full_float32
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import check_update, compute_dtype


@full_float32()
def canonical_biases(tensors: Mapping[str, Tensor], symmetry: Symmetry) -> dict[str, Tensor]:
    """Return tensors of the same function with every redundant attention bias set to 0.

    A key's bias adds the same to every score of a softmax and is dropped. A value's bias adds a constant
    to the block's output, which the output's bias takes up: ``b_O <- b_O + sum_h O_h b_V``. (Zhang et
    al. 2025, Theorem 4.1, include both in the match, although they do not change the function.)

    A bias that has an effect stays: a key's bias under rotary positions or where positions attend to
    content, and a value's bias if the output projection has no bias.

    The input is not changed. Tensors without a redundant bias are returned as the same objects.

    Raises:
        UpdateError: the tensors are not the symmetry's.
    """
    check_update(tensors, symmetry.shapes)
    out = dict(tensors)
    with torch.no_grad():
        for redundant in symmetry.redundant_biases:
            name, entries = redundant.bias.tensor, redundant.bias.slice
            before = out[name]
            after = before.detach().clone()
            entries.write(after, 0, torch.zeros_like(entries.of(after, 0)))
            out[name] = after
            if redundant.read is not None:
                old = out[redundant.taken_up]
                dtype = compute_dtype(old)
                units = redundant.read.rows(out[redundant.read.tensor], dtype)
                bias = entries.of(before.detach(), 0).to(dtype)
                shared = len(units) // len(bias)
                heads = redundant.heads
                per_query = bias.unflatten(0, (heads, -1)).repeat_interleave(shared, 0).flatten()
                out[redundant.taken_up] = (old.to(dtype) + per_query @ units).to(old.dtype)
    return out
