"""Images as inputs of models: ``encoded_images`` loads and encodes them."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from PIL import Image, ImageOps

from fedrot.simulations.data.encode import Encoded
from fedrot.simulations.data.labels import (
    DataSet,
    Inputs,
    Rows,
    Split,
    label_columns,
    labelled,
)
from fedrot.simulations.data.read import Content, find, refuse
from fedrot.simulations.pretrained import pretrained_settings, source_of
from fedrot.simulations.scenario import Scenario, Settings
from fedrot.simulations.tasks.objective import Batch, EncodedData

#: Largest side of a small model's images, in pixels; larger images are scaled down.
LARGEST_SIDE = 64
#: Pillow's modes of whole numbers and others of 32 bits.
DEEP = ("I", "F")
BILINEAR = Image.Resampling.BILINEAR
IMAGE: Content = (
    "image file",
    ("image", "img"),
    lambda kind: "binary" in str(kind),
    "whole files as bytes, or a folder CLASS/IMAGE",
)


@dataclass(frozen=True)
class EncodedImages(Encoded):
    """Images, of which batches have standardised ``pixel_values``.

    These are float32 ``[rows, channels, side, side]``.

    Attributes:
        pixels: uint8 ``[rows, side, side, channels]``.
        mean, deviation: float32, mean and standard deviation of each channel, for
            values in [0, 1].
    """

    pixels: Any
    mean: ndarray
    deviation: ndarray

    def batch(self, rows: ndarray) -> Batch:
        values = self.pixels[rows] / np.float32(255)
        values = (values - self.mean) / self.deviation
        channels_first = values.transpose(0, 3, 1, 2).copy()
        return {"pixel_values": torch.from_numpy(channels_first)}


def encoded_images(
    scenario: Scenario,
) -> EncodedData:
    """Load images for a model's size, and encode them.

    They are standardised by the numbers of the model's processor, or by one half.

    Without a model, their side is that of the largest image, at most ``LARGEST_SIDE``;
    above 8 it is a multiple of 4, since patches cannot divide a prime number. There is
    one channel if all are grey.
    """
    side, channels, processor = _model_reads(scenario.model)
    source = find(scenario.data, scenario.data_dir)
    column = source.column(IMAGE, scenario.text_column)

    def read(rows: Rows) -> Inputs:
        return [_images(rows, column, side or LARGEST_SIDE)]

    data = labelled(
        source,
        scenario,
        label_columns(source, scenario),
        [column],
        read,
    )
    images = [*data.train.inputs, *data.test.inputs]
    deep = [image for image in images if image.mode in DEEP]
    values = [value for image in deep for value in image.getextrema()]
    low = min(values, default=0)
    high = max(values, default=0)
    remarks = [data.remarks]
    if deep:
        remarks.append(
            f"{len(deep)} of {len(images)} images have more than 8 bits: {low:g} to "
            f"{high:g}, in all of these together, become 0 to 255."
        )
        if len(deep) < len(images):
            remarks.append("The other images have 8 bits, and are not on this range.")
    if not side:
        side = max(max(image.size) for image in images)
        if side > 8:
            side = -(-side // 4) * 4
        modes = {image.mode for image in images}
        channels = 3 if "RGB" in modes else 1
    shape = (side, side, channels)
    data = replace(data, shape=shape, remarks=" ".join(remarks))
    mean, deviation = _standard(processor, channels)
    train, test = (
        EncodedImages(split.labels, _pixels(data, split, low, high), mean, deviation)
        for split in (data.train, data.test)
    )
    return data, train, test


def _model_reads(model: str | None) -> tuple[int, int, Settings]:
    """Return side and channels of a model's images, and its processor's settings.

    Without a model, they are 0, 0 and empty.
    """
    if model is None:
        return 0, 0, {}
    from transformers.image_processing_base import ImageProcessingMixin

    settings = pretrained_settings(model)
    side = getattr(settings, "image_size", None)
    channels = getattr(settings, "num_channels", 3)
    if not isinstance(side, int) or channels not in (1, 3):
        refuse(
            f"model '{model}'",
            f"takes no square images of 1 or 3 channels (image_size {side}, "
            f"{channels} channels)",
            "choose a vision transformer, or another task",
        )
    processor: Settings = {}
    with suppress(OSError):  # saved without a processor
        # Not the processor itself, which needs torchvision.
        processor, _ = ImageProcessingMixin.get_image_processor_dict(source_of(model))
    return side, channels, processor


def _standard(processor: Settings, channels: int) -> ndarray:
    """Return mean and deviation of each channel for values in [0, 1], float32.

    Raises ``DataError`` if the processor's numbers are no such numbers.
    """
    fields: dict[str, Any] = {
        "image_mean": 0.5,
        "image_std": 0.5,
        "rescale_factor": 1 / 255,
    }
    for name in fields:
        if processor.get(name) is not None:
            fields[name] = processor[name]
    if processor.get("do_rescale") is False:
        fields["rescale_factor"] = 1
    if processor.get("do_normalize") is False:
        fields |= {"image_mean": 0, "image_std": 1}
    values = np.zeros((3, channels))
    with suppress(TypeError, ValueError, OverflowError):
        for row, number in zip(values, fields.values(), strict=True):
            row[:] = number
    if not np.isfinite(values).all() or values[1:].min() <= 0:
        refuse(
            "preprocessor_config.json of the model",
            f"has {fields!s:.300}",
            f"give one number or {channels}, finite, and of the last two above 0",
        )
    return (values[:2] / values[2] / 255).astype(np.float32)


def _pixels(data: DataSet, split: Split, low: float, high: float) -> ndarray:
    """Return the images of a split, uint8 ``[rows, side, side, channels]``."""
    *size, channels = data.shape
    mode = "L" if channels == 1 else "RGB"
    images = []
    for image in split.inputs:
        shown = _scaled(image, low, high).convert(mode)
        images.append(np.asarray(shown.resize(size, BILINEAR)))
    return np.stack(images).reshape(-1, *data.shape)


def _images(
    rows: Rows,
    column: str,
    bound: int,
) -> list[Image.Image]:
    """Return images of the modes L, RGB, I or F without a side above ``bound``."""
    images = []
    for number, value in zip(rows.numbers, rows.table[column], strict=True):
        where = f"{rows.where}, row {number}"
        content: Any = value.as_py()
        file: Any = None
        if isinstance(content, dict):
            file = content.get("path")
            content = content.get("bytes")
        if content is None:
            where = file or where
        else:
            file = io.BytesIO(content)
        try:
            image = _image(file)
        except Exception as error:  # Pillow raises many unrelated kinds
            refuse(
                where,
                f"cannot be read as an image ({error})",
                "remove it or replace it",
            )
        size = [min(side, bound) for side in image.size]
        images.append(image.resize(size, BILINEAR))
    return images


def _image(file: Any) -> Image.Image:
    with Image.open(file) as image:
        image.load()
        # Damaged EXIF is no reason to refuse a picture.
        with suppress(Exception):
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode[0] in "IF":
            return _deep(image)
        return _on_white(image)


def _on_white(image: Image.Image) -> Image.Image:
    mode = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    if image.has_transparency_data:
        # Pillow converts premultiplied grey (La) to LA alone.
        shown = image.convert("LA") if image.mode == "La" else image
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, shown.convert("RGBA"))
    return image.convert(mode)


def _deep(image: Image.Image) -> Image.Image:
    """Return whole numbers (I) or others (F); infinite ones become the next finite."""
    values = np.asarray(image)
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise ValueError("it has no finite number")
    low = finite.min()
    known = np.nan_to_num(values, nan=low, posinf=finite.max(), neginf=low)
    return Image.fromarray(known.astype(np.float32 if image.mode == "F" else np.int32))


def _scaled(image: Image.Image, low: float, high: float) -> Image.Image:
    """Return whole numbers or others as a grey image, ``low`` as 0, ``high`` as 255."""
    if image.mode not in DEEP:
        return image
    shares = (np.asarray(image, np.float64) - low) / ((high - low) or 1)
    return Image.fromarray(np.rint(255 * shares).astype(np.uint8))
