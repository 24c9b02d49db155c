"""``token_counts``: how often each token occurs in batches of texts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.tensors import Tensors


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
