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
    and ``V`` the number of tokens. Nothing moves the axis of the tokens (``tables_of``), so that the
    factors follow every move.

    Args:
        counts: how often each token occurs, ``[V]``, not negative.

    Raises:
        FedrotError: the counts are none, or the model has no such table.
    """
    values = check_counts(counts)
    weights = (values / values.mean()).sqrt()
    found = {}
    for name, axis in tables_of(symmetry).items():
        if symmetry.shapes[name][axis] == len(weights):
            table = tensors[name].detach()
            wide = table.to(compute_dtype(table))
            found[name] = wide * along_axis(weights, axis, wide)
    if not found:
        raise FedrotError(
            f"There are counts of {len(weights)} tokens, but no table of so many rows on the residual "
            "stream. Count every token of the model's vocabulary, config.vocab_size in all."
        )
    return {**tensors, **found}


def tables_of(symmetry: Symmetry) -> dict[str, int]:
    """Return the tables on the residual stream, with the axis that nothing moves: that of their tokens.

    These are embeddings of tokens, positions and kinds, and task heads.
    """
    moved = {(slot.tensor, slot.axis) for group in symmetry.groups for slot in group.slots}
    streams = {s.tensor: s.axis for g in symmetry.groups if g.part == "residual" for s in g.slots}
    return {
        name: 1 - axis
        for name, axis in streams.items()
        if len(symmetry.shapes[name]) == 2 and (name, 1 - axis) not in moved
    }


def check_counts(counts: object) -> Tensor:
    """Return token counts as float64 ``[V]``; raise ``FedrotError`` if they are none."""
    given = torch.as_tensor(counts)
    values = given.double()
    fits = values.ndim == 1 and bool(torch.isfinite(values).all()) and bool((values >= 0).all())
    if not fits or not float(values.sum()) > 0:
        raise FedrotError(
            f"Token counts of shape {list(given.shape)} are no counts: give one number per token, none "
            "negative, not all 0."
        )
    return values
