"""Token frequencies: rows of embedding tables count by how often their token occurs."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import Tensors, along_axis, compute_dtype


def by_frequency(tensors: Tensors, symmetry: Symmetry, counts: Tensor) -> dict[str, Tensor]:
    """Return tensors whose tables are scaled so that squared distances count tokens by frequency.

    Row ``t`` of a table is multiplied by ``sqrt(V f_t)``, where ``f_t`` is the share of token ``t``
    and ``V`` the number of tokens. Tables are the tensors with one axis on the residual
    stream and another of ``V`` entries that nothing moves, so that the factors follow every move.

    Args:
        counts: how often each token occurs, ``[V]``, not negative.

    Raises:
        FedrotError: the counts are none, or the model has no such table.
    """
    weights = _weights(counts)
    moved = {(slot.tensor, slot.axis) for group in symmetry.groups for slot in group.slots}
    streams = {s.tensor: s.axis for g in symmetry.groups if g.part == "residual" for s in g.slots}
    found = {}
    for name, axis in streams.items():
        shape = symmetry.shapes[name]
        other = 1 - axis
        if len(shape) == 2 and shape[other] == len(weights) and (name, other) not in moved:
            table = tensors[name].detach()
            wide = table.to(compute_dtype(table))
            found[name] = wide * along_axis(weights, other, wide)
    if not found:
        raise FedrotError(
            f"There are counts of {len(weights)} tokens, but no table of so many rows on the residual "
            "stream. Count every token of the model's vocabulary, config.vocab_size in all."
        )
    return {**tensors, **found}


def _weights(counts: Tensor) -> Tensor:
    given = torch.as_tensor(counts)
    values = given.double()
    fits = values.ndim == 1 and bool(torch.isfinite(values).all()) and bool((values >= 0).all())
    if not fits or not float(values.sum()) > 0:
        raise FedrotError(
            f"Token counts of shape {list(given.shape)} are no counts: give one number per token, none "
            "negative, not all 0."
        )
    return (values / values.mean()).sqrt()
