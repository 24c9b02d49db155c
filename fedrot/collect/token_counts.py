"""Token counts: from batches of texts, or assumed from the tokenizer's order.

``by_frequency`` weights the rows of embedding tables by these counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import Tensors, along_axis, compute_dtype

#: The offset in the law of Zipf and Mandelbrot, as a share of the vocabulary.
_FLAT = 1 / 40


def token_counts(batches: Iterable[Tensors], vocabulary: int) -> Tensor:
    """Return how often each token occurs, int64 ``[vocabulary]``, for ``fedrot.align``.

    Args:
        batches: keyword arguments of a model's forward: ``input_ids``, integers of any shape, and
            ``attention_mask`` of the same shape; tokens with mask 0 are not counted.
        vocabulary: the number of the model's tokens, ``config.vocab_size``.

    Example: ``counts = token_counts(loader, model.config.vocab_size)``

    Raises:
        FedrotError: a batch has no ``input_ids``, or a token lies outside of the vocabulary.
    """
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for batch in batches:
        if "input_ids" not in batch:
            raise FedrotError(f"A batch has no 'input_ids' to count, only: {', '.join(batch)}.")
        tokens, mask = batch["input_ids"].cpu(), batch.get("attention_mask")
        tokens = tokens.flatten() if mask is None else tokens[mask.cpu().bool()]
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise FedrotError(
                f"Tokens range from {int(tokens.min())} to {int(tokens.max())}, but the vocabulary has "
                f"{vocabulary}. Give the model's config.vocab_size, and texts of its tokenizer."
            )
        counts += torch.bincount(tokens, minlength=vocabulary)
    return counts


def counts_by_order(vocabulary: int) -> Tensor:
    """Return assumed token counts if no texts are available, float64 ``[vocabulary]``.

    The count of token ``t`` is ``1 / (t + vocabulary / 40)`` (the law of Zipf and Mandelbrot), divided
    by the last token's. Use it only if the tokenizer numbers frequent tokens first, as BPE and Unigram
    do by construction: counts in a wrong order match worse than no counts.

    Example: ``fedrot.align(update, anchor, symmetry, options, token_counts=counts_by_order(32_000))``

    Raises:
        FedrotError: the vocabulary has no token.
    """
    if vocabulary < 1:
        raise FedrotError(f"vocabulary is {vocabulary}; give the model's config.vocab_size.")
    places = torch.arange(vocabulary, dtype=torch.float64) + vocabulary * _FLAT
    return places[-1] / places


def by_frequency(tensors: Tensors, symmetry: Symmetry, counts: Tensor) -> dict[str, Tensor]:
    """Return tensors with scaled tables, so that squared distances weight tokens by frequency.

    Row ``t`` of a table is multiplied by ``sqrt(V f_t)``, where ``f_t`` is the share of token ``t``
    and ``V`` the number of tokens. No group moves the axis of the tokens (``tables_of``), so the factors
    are the same before and after every move.

    Args:
        counts: how often each token occurs, ``[V]``, not negative.

    Raises:
        FedrotError: ``counts`` is invalid (``check_counts``), or the model has no such table.
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
            f"There are counts of {len(weights)} tokens, but no table on the residual stream has this "
            "number of rows. Count every token of the vocabulary, config.vocab_size in all."
        )
    return {**tensors, **found}


def tables_of(symmetry: Symmetry) -> dict[str, int]:
    """Return the tables on the residual stream, with their token axis, which no group moves.

    These are embeddings of tokens, positions and token types, and task heads.
    """
    moved = {(slot.tensor, slot.axis) for group in symmetry.groups for slot in group.slots}
    streams = {s.tensor: s.axis for g in symmetry.groups if g.part == "residual" for s in g.slots}
    return {
        name: 1 - axis
        for name, axis in streams.items()
        if len(symmetry.shapes[name]) == 2 and (name, 1 - axis) not in moved
    }


def check_counts(counts: object) -> Tensor:
    """Return token counts as float64 ``[V]``; raise ``FedrotError`` for wrong shapes or values."""
    given = torch.as_tensor(counts)
    values = given.double()
    fits = values.ndim == 1 and bool(torch.isfinite(values).all()) and bool((values >= 0).all())
    if not fits or not float(values.sum()) > 0:
        raise FedrotError(
            f"Token counts of shape {list(given.shape)} are invalid: give one finite number per token, "
            "none negative, not all 0."
        )
    return values
