"""Random inputs from a model's configuration, and forward inputs from a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fedrot.collect.hooks import DECODER_INPUTS
from fedrot.errors import SymmetryError
from fedrot.tensors import TensorDict

#: Dictionary of a transformers configuration.
Config = Mapping[str, Any]

#: Number of random texts; enough to distinguish units.
_ROWS = 2048


def random_inputs(
    config: Config,
    rows: int | None = None,
    length: int = 16,
    batch_size: int = 128,
    seed: int = 0,
) -> Iterator[TensorDict]:
    """Yield batches of random tokens, random images or both, as the model needs.

    A model needs text if the configuration or its ``text_config`` has a ``vocab_size``;
    images if its ``vision_config``, or a configuration without ``vocab_size``, has an
    ``image_size``.

    Args:
        config: dictionary of a transformers configuration.
        rows: number of texts or images; None for 2048 texts, or for so many images that
            their patches are as many as the tokens of 2048 texts.
        length: tokens per text; at most the model's number of positions.
        batch_size: texts per batch; for images fewer, so that a batch has no more
            patches than tokens.
        seed: the same seed gives the same inputs.

    Yields:
        ``input_ids`` and ``attention_mask`` (ones), int64 ``[batch, length]``, ids
        uniform; ``decoder_input_ids`` of the same shape; ``pixel_values``, standard
        normal, float32 ``[batch, channels, height, width]``. If the configuration has
        an end-of-text token, every text ends with it, and no other position has this
        token or padding.

    Raises:
        SymmetryError: the configuration has neither a ``vocab_size`` nor an
            ``image_size``.
    """
    text = _described(config, "text_config", "vocab_size")
    image = _described(config, "vision_config", "image_size")
    # The configuration itself, if it has both, describes a model that reads text.
    if image is text:
        image = {}
    if not text and not image:
        raise SymmetryError(
            "The config has neither a 'vocab_size' nor an 'image_size', so no inputs "
            "can be drawn. Pass a complete transformers configuration, or batches of "
            "your own."
        )
    generator = torch.Generator().manual_seed(seed)
    share = max(1, _patches(image) // length)
    if rows is None:
        rows = max(1, _ROWS // share)
    batch_size = max(1, batch_size // share)
    for start in range(0, rows, batch_size):
        count = min(batch_size, rows - start)
        batch = {}
        if text:
            ids = _random_ids(text, count, length, generator)
            batch["input_ids"] = ids
            batch["attention_mask"] = torch.ones_like(ids)
        if config.get("is_encoder_decoder"):
            # The same length as the encoder's inputs, so that one mask fits both.
            batch["decoder_input_ids"] = _random_ids(text, count, length, generator)
        if image:
            channels = int(image.get("num_channels") or 3)
            shape = (count, channels, *_pair(image["image_size"]))
            batch["pixel_values"] = torch.randn(shape, generator=generator)
        yield batch


def forward_inputs(
    model: Module,
    batch: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a batch without ``labels``.

    They become ``decoder_input_ids`` if a decoder has none.
    """
    inputs = dict(batch)
    labels = inputs.pop("labels", None)
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if callable(shifted) and "labels" in batch and DECODER_INPUTS.isdisjoint(batch):
        inputs["decoder_input_ids"] = shifted(labels=labels)
        inputs.setdefault("decoder_attention_mask", (labels != -100).long())
    return inputs


def reads_text(config: Config) -> bool:
    """Return whether a model reads tokens.

    Random images are no evidence about an image model.
    """
    return bool(_described(config, "text_config", "vocab_size"))


def _described(
    config: Config,
    nested: str,
    key: str,
) -> Config:
    """Return the configuration that has ``key``: nested, whole, or an empty one."""
    inner = config.get(nested)
    if inner and inner.get(key):
        return inner
    return config if config.get(key) else {}


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, Sequence) else (size, size)
    return int(height), int(width)


def _patches(image: Config) -> int:
    """Return the number of patches of an image."""
    if not image:
        return 0
    height, width = _pair(image["image_size"])
    down, across = _pair(image.get("patch_size") or 16)
    return (height // down) * (width // across)


def _random_ids(
    text: Config,
    count: int,
    length: int,
    generator: torch.Generator,
) -> Tensor:
    """Return ``[count, length]`` token ids."""
    size = int(text["vocab_size"])
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    if positions:
        # RoBERTa's positions start after the padding index.
        length = max(1, min(length, int(positions) - 2))
    end = text.get("eos_token_id")
    # The first CLIP configurations say 2, but the model reads the position of the
    # largest id.
    if end == 2 and text.get("model_type") == "clip_text_model":
        end = size - 1
    ends = _tokens(end, size)
    # Classifiers and CLIP read the last token before the end or the padding: neither
    # may occur earlier. Without an end-of-text token, padding may occur anywhere.
    special = []
    if ends:
        special = sorted({*ends, *_tokens(text.get("pad_token_id"), size)})
    ids = torch.randint(size - len(special), (count, length), generator=generator)
    for token in special:
        ids += ids >= token
    if ends:
        ids[:, -1] = ends[0]
    return ids


def _tokens(
    named: Any,
    size: int,
) -> list[int]:
    """Return a list of the named tokens that are in the vocabulary."""
    if named is None:
        return []
    listed = named if isinstance(named, Sequence) else [named]
    return [int(token) for token in listed if 0 <= token < size]
