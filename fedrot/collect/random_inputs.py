"""Random inputs of a model from its configuration, and forward inputs from a labelled
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedrot.errors import SymmetryError

#: Number of random texts; enough to distinguish units.
_ROWS = 2048


def random_inputs(
    config: Mapping[str, Any],
    rows: int | None = None,
    length: int = 16,
    batch_size: int = 128,
    seed: int = 0,
) -> Iterator[dict[str, Tensor]]:
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
    image = {} if image is text else image
    if not text and not image:
        raise SymmetryError(
            "The config has neither a 'vocab_size' nor an 'image_size', so no inputs "
            "can be drawn. Pass a complete transformers configuration, or batches of "
            "your own."
        )
    generator = torch.Generator().manual_seed(seed)
    share = max(1, _patches(image) // length)
    rows = max(1, _ROWS // share) if rows is None else rows
    batch_size = max(1, batch_size // share)
    for start in range(0, rows, batch_size):
        count = min(batch_size, rows - start)
        batch = {}
        if text:
            batch["input_ids"] = ids = _random_ids(text, count, length, generator)
            batch["attention_mask"] = torch.ones_like(ids)
        if config.get("is_encoder_decoder"):
            # The same length as the encoder's inputs, so that one mask fits both.
            batch["decoder_input_ids"] = _random_ids(text, count, length, generator)
        if image:
            shape = (
                count,
                int(image.get("num_channels") or 3),
                *_pair(image["image_size"]),
            )
            batch["pixel_values"] = torch.randn(shape, generator=generator)
        yield batch


def forward_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without ``labels``, which become ``decoder_input_ids`` if a
    decoder has none.
    """
    found = {name: value for name, value in batch.items() if name != "labels"}
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & batch.keys()
    if callable(shifted) and "labels" in batch and not given:
        found["decoder_input_ids"] = shifted(labels=batch["labels"])
        found.setdefault("decoder_attention_mask", (batch["labels"] != -100).long())
    return found


def reads_text(config: Mapping[str, Any]) -> bool:
    """Return whether a model reads tokens; random images are no evidence about an image
    model.
    """
    return bool(_described(config, "text_config", "vocab_size"))


def _described(config: Mapping[str, Any], nested: str, key: str) -> Mapping[str, Any]:
    """Return the configuration that has ``key``: the nested one, the whole, or an empty
    one.
    """
    return next((c for c in (config.get(nested) or {}, config) if c.get(key)), {})


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, Sequence) else (size, size)
    return int(height), int(width)


def _patches(image: Mapping[str, Any]) -> int:
    """Return the number of patches of an image."""
    if not image:
        return 0
    height, width = _pair(image["image_size"])
    down, across = _pair(image.get("patch_size") or 16)
    return (height // down) * (width // across)


def _random_ids(
    text: Mapping[str, Any], count: int, length: int, generator: torch.Generator
) -> Tensor:
    """Return ``[count, length]`` token ids."""
    size = int(text["vocab_size"])
    # RoBERTa's positions start after the padding index.
    room = (
        int(
            text.get("max_position_embeddings") or text.get("n_positions") or length + 2
        )
        - 2
    )
    shape = (count, max(1, min(length, room)))
    # The first CLIP configurations say 2, but the model reads the position of the
    # largest id.
    first_clip = (
        text.get("eos_token_id") == 2 and text.get("model_type") == "clip_text_model"
    )
    ends = _tokens(size - 1 if first_clip else text.get("eos_token_id"), size)
    # Classifiers and CLIP read the last token before the end or the padding: neither
    # may occur earlier. Without an end-of-text token, padding may occur anywhere.
    special = sorted({*ends, *_tokens(text.get("pad_token_id"), size)}) if ends else []
    ids = torch.randint(size - len(special), shape, generator=generator)
    for token in special:
        ids += ids >= token
    if ends:
        ids[:, -1] = ends[0]
    return ids


def _tokens(named: Any, size: int) -> list[int]:
    """Return a list of the named tokens that are in the vocabulary."""
    listed = named if isinstance(named, Sequence) else [] if named is None else [named]
    return [int(token) for token in listed if 0 <= token < size]
