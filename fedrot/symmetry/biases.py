"""Attention biases that change nothing, brought to one value before models are compared."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrot.precision import full_float32
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import check_update, compute_dtype


@full_float32()
def canonical_biases(tensors: Mapping[str, Tensor], symmetry: Symmetry) -> dict[str, Tensor]:
    """Return the same function with every attention bias that is redundant set to 0.

    A key's bias adds the same to every score of a softmax, and goes; a value's bias adds a constant to
    the block's output, ``b_O <- b_O + sum_h O_h b_V``, and is taken up there (Zhang et al. 2025, Theorem
    4.1, prints the biases inside the match; they say nothing about the function). Only where this is so:
    a key's bias is seen under rotary positions and where positions attend to content, and a value's
    bias stays where the output has none.

    The input is never changed; tensors without a redundant bias are returned as the same objects.

    Raises:
        UpdateError: the tensors are not the symmetry's.
    """
    check_update(tensors, symmetry.shapes)
    out = dict(tensors)
    with torch.no_grad():
        for redundant in symmetry.redundant_biases:
            name, stretch = redundant.bias.tensor, redundant.bias.slice
            before = out[name]
            after = before.detach().clone()
            stretch.write(after, 0, torch.zeros_like(stretch.of(after, 0)))
            out[name] = after
            if redundant.read is not None:
                old = out[redundant.taken_up]
                dtype = compute_dtype(old)
                units = redundant.read.rows(out[redundant.read.tensor], dtype)
                bias = stretch.of(before.detach(), 0).to(dtype)
                shared = len(units) // len(bias)
                heads = redundant.heads
                per_query = bias.unflatten(0, (heads, -1)).repeat_interleave(shared, 0).flatten()
                out[redundant.taken_up] = (old.to(dtype) + per_query @ units).to(old.dtype)
    return out
