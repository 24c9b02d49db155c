"""Readers: how each kind of data is loaded and encoded for the models of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.data_set import DataSet
from fedrot.simulations.data.encoding import (
    Encoded,
    EncodedImages,
    encode_tags,
    encode_texts,
    tokenizer_for,
)
from fedrot.simulations.data.images import ImageData, load_image_data
from fedrot.simulations.data.table_files import DataError
from fedrot.simulations.data.tagged import load_tag_data
from fedrot.simulations.data.texts import load_text_data
from fedrot.simulations.models.architectures import pad_id_of, pretrained_settings, settings_of

#: Of pixel values between 0 and 1, for models without a processor.
MEAN, DEVIATION = (0.5,), (0.5,)


@dataclass(frozen=True)
class Reader:
    """A kind of data.

    Attributes:
        load: returns the data set of a configuration; raises ``DataError``.
        encode: returns its splits as inputs of the configuration's model, training first.
    """

    load: Callable[[SimulationConfig], DataSet[Any]]
    encode: Callable[[SimulationConfig, Any], tuple[Any, Any]]


def _loaded(
    load: Callable[..., DataSet[Any]], size: Callable[[SimulationConfig], dict[str, int]] | None = None
) -> Callable[[SimulationConfig], DataSet[Any]]:
    def loaded(config: SimulationConfig) -> DataSet[Any]:
        return load(
            config.data,
            config.data_dir,
            text_column=config.text_column,
            label_column=config.label_column,
            train_limit=config.train_limit,
            test_limit=config.test_limit,
            **(size(config) if size else {}),
        )

    return loaded


def _tokenised(encode: Callable[..., Encoded]) -> Callable[[SimulationConfig, Any], tuple[Any, Any]]:
    def encoded(config: SimulationConfig, data: DataSet[Any]) -> tuple[Encoded, Encoded]:
        how = tokenizer_for(config), config.max_length, pad_id_of(settings_of(config, data))
        return encode(data.train, *how), encode(data.test, *how)

    return encoded


def _image_size(config: SimulationConfig) -> dict[str, int]:
    """Return ``side`` and ``channels`` of the inputs of a pretrained model."""
    if config.model is None:
        return {}
    settings = pretrained_settings(config.model)
    side, channels = getattr(settings, "image_size", None), getattr(settings, "num_channels", 3)
    sides = list(dict.fromkeys(side)) if isinstance(side, list | tuple) else [side]
    if len(sides) != 1 or not isinstance(sides[0], int):
        raise DataError(
            f"model '{config.model}' of type '{settings.model_type}' reads no square images "
            f"(image_size is {side}); choose a vision transformer, or another task"
        )
    return {"side": sides[0], "channels": channels}


def _encode_images(config: SimulationConfig, data: ImageData) -> tuple[EncodedImages, EncodedImages]:
    mean, deviation = (values[: data.channels] for values in _standardisation(config.model))
    train, test = (
        EncodedImages(split.labels, split.pixels, data.side, mean, deviation)
        for split in (data.train, data.test)
    )
    return train, test


def _standardisation(model: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of pixel values, by channel, from a pretrained model's processor."""
    if model is None:
        return MEAN, DEVIATION
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        # Not the processor itself, which needs torchvision.
        found, _ = ImageProcessingMixin.get_image_processor_dict(model)
    except OSError:  # saved without a processor
        return MEAN, DEVIATION
    mean, deviation = found.get("image_mean") or MEAN, found.get("image_std") or DEVIATION
    return tuple(mean), tuple(deviation)


TEXT = Reader(_loaded(load_text_data), _tokenised(encode_texts))
TAGGED = Reader(_loaded(load_tag_data), _tokenised(encode_tags))
IMAGE = Reader(_loaded(load_image_data, _image_size), _encode_images)
