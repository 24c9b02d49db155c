"""How a kind of data gets from a configuration into what a model reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.encoding import (
    EncodedImages,
    EncodedTags,
    EncodedText,
    encode_images,
    encode_tags,
    encode_texts,
    tokenizer_for,
)
from fedrot.simulations.data.images import ImageData, load_image_data
from fedrot.simulations.data.sources import DataError
from fedrot.simulations.data.tagged import TagData, load_tag_data
from fedrot.simulations.data.texts import DataSet, TextData, load_text_data
from fedrot.simulations.models.architectures import pad_id_of, pretrained_settings, settings_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Of pixel values between 0 and 1, where no pretrained model says otherwise.
MEAN, DEVIATION = (0.5,), (0.5,)


@dataclass(frozen=True)
class Reader:
    """A kind of data.

    Attributes:
        load: returns the data set of a configuration; raises ``DataError``.
        encode: returns its splits as a model of the configuration reads them, training first.
    """

    load: Callable[[SimulationConfig], DataSet[Any]]
    encode: Callable[[SimulationConfig, Any], tuple[Any, Any]]


def _limits(config: SimulationConfig) -> dict[str, int | None]:
    return {"train_limit": config.train_limit, "test_limit": config.test_limit}


def _load_texts(config: SimulationConfig) -> TextData:
    return load_text_data(
        config.data,
        config.data_dir,
        text_column=config.text_column,
        label_column=config.label_column,
        **_limits(config),
    )


def _token_options(config: SimulationConfig, data: DataSet[Any]) -> tuple[Tokenizer, int, int]:
    return tokenizer_for(config), config.max_length, pad_id_of(settings_of(config, data))


def _encode_texts(config: SimulationConfig, data: TextData) -> tuple[EncodedText, EncodedText]:
    how = _token_options(config, data)
    return encode_texts(data.train, *how), encode_texts(data.test, *how)


def _load_tags(config: SimulationConfig) -> TagData:
    return load_tag_data(
        config.data,
        config.data_dir,
        token_column=config.text_column,
        tag_column=config.label_column,
        **_limits(config),
    )


def _encode_tags(config: SimulationConfig, data: TagData) -> tuple[EncodedTags, EncodedTags]:
    how = _token_options(config, data)
    return encode_tags(data.train, *how), encode_tags(data.test, *how)


def _load_images(config: SimulationConfig) -> ImageData:
    size = _size_of(config.model) if config.model is not None else {}
    return load_image_data(
        config.data,
        config.data_dir,
        image_column=config.text_column,
        label_column=config.label_column,
        **_limits(config),
        **size,
    )


def _size_of(model: str) -> dict[str, int]:
    """The images that a pretrained model reads."""
    settings = pretrained_settings(model)
    side, channels = getattr(settings, "image_size", None), getattr(settings, "num_channels", 3)
    sides = list(dict.fromkeys(side)) if isinstance(side, list | tuple) else [side]
    if len(sides) != 1 or not isinstance(sides[0], int):
        raise DataError(
            f"model '{model}' of type '{settings.model_type}' reads no square images (image_size is "
            f"{side}); choose a vision transformer, or another task"
        )
    return {"side": sides[0], "channels": channels}


def _encode_images(config: SimulationConfig, data: ImageData) -> tuple[EncodedImages, EncodedImages]:
    mean, deviation = (values[: data.channels] for values in _standardisation(config.model))
    how = data.side, mean, deviation
    return encode_images(data.train, *how), encode_images(data.test, *how)


def _standardisation(model: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of pixel values, as a pretrained model's processor has them."""
    if model is None:
        return MEAN, DEVIATION
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        # The processors themselves want torchvision.
        found, _ = ImageProcessingMixin.get_image_processor_dict(model)
    except OSError:  # saved without a processor
        return MEAN, DEVIATION
    mean, deviation = found.get("image_mean") or MEAN, found.get("image_std") or DEVIATION
    return tuple(mean), tuple(deviation)


TEXT = Reader(_load_texts, _encode_texts)
TAGGED = Reader(_load_tags, _encode_tags)
IMAGE = Reader(_load_images, _encode_images)
