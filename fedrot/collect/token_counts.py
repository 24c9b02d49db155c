"""Token counts: from batches of texts, or assumed from the tokenizer's order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.tensors import Tensors

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
