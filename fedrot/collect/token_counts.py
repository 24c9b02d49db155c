"""Token counts: from batches of texts, or assumed from the tokenizer's order.

Rows of embedding tables count by how often their token occurs (``by_frequency``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import Tensors, along_axis, compute_dtype

#: Where Zipf's law becomes flat, as a share of the vocabulary.
_FLAT = 1 / 40


def token_counts(batches: Iterable[Tensors], vocabulary: int) -> Tensor:
    """Return how often each token occurs, int64 ``[vocabulary]``, for ``fedrot.align``.

    Args:
        batches: keyword arguments of a model's forward: ``input_ids``, integers of any shape, and
            ``attention_mask`` of the same shape, where it is 0 tokens do not count.
        vocabulary: the number of the model's tokens, ``config.vocab_size``.

    Example: ``counts = token_counts(loader, model.config.vocab_size)``

    Raises:
        FedrotError: a batch has no ``input_ids``, or a token lies outside of the vocabulary.
    """
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for batch in batches:
        if "input_ids" not in batch:
            raise FedrotError(f"A batch has no 'input_ids' to count, it has: {', '.join(batch)}.")
        tokens, mask = batch["input_ids"].cpu(), batch.get("attention_mask")
        tokens = tokens.flatten() if mask is None else tokens[mask.cpu().bool()]
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise FedrotError(
                f"The tokens {int(tokens.min())} to {int(tokens.max())} are not all of a vocabulary of "
                f"{vocabulary}. Give the model's config.vocab_size, and texts of its tokenizer."
            )
        counts += torch.bincount(tokens, minlength=vocabulary)
    return counts


def counts_by_order(vocabulary: int) -> Tensor:
    """Return assumed token counts where no texts are at hand, float64 ``[vocabulary]``.

    Token ``t`` counts ``1 / (t + vocabulary / 40)`` (the law of Zipf and Mandelbrot), in units of the
    last token's. Only for tokenizers that number frequent tokens first, as BPE and Unigram do by
    construction: counts in a wrong order match worse than none.

    Example: ``fedrot.align(update, anchor, symmetry, options, token_counts=counts_by_order(32_000))``

    Raises:
        FedrotError: the vocabulary has no token.
    """
    if vocabulary < 1:
        raise FedrotError(f"vocabulary is {vocabulary}; give the number of the model's tokens.")
    places = torch.arange(vocabulary, dtype=torch.float64) + vocabulary * _FLAT
    return places[-1] / places


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
