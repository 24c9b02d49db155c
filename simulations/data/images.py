"""Data sets of images, as they are seen: upright, on white, in eight bits."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from fedrot.simulations.data.labels import DataSet, Rows, Split, label_columns, labelled
from fedrot.simulations.data.read import Content, find, is_bytes, refuse
from fedrot.simulations.settings import Experiment

Pixels: TypeAlias = npt.NDArray[np.uint8]
#: Largest side of a small model's images, in pixels; larger images are scaled down.
LARGEST_SIDE = 64


IMAGE = Content(
    "image",
    ("image", "img"),
    "--text-column",
    "whole image files (PNG, JPEG) as bytes",
    lambda kind: is_bytes(kind) or {"bytes", "path"} <= {field.name for field in kind.fields},
)


def load_images(experiment: Experiment, side: int | None = None, channels: int | None = None) -> DataSet:
    """Load the images of an experiment, see ``read.find``: a folder of classes, or a table.

    A table has a column of image files (bytes, or the hub's bytes and path).

    Args:
        side: side of the model's square inputs, in pixels; default: of the largest image, at most 64.
        channels: 1 or 3; default: 1 if every image is grey, else 3.

    Raises:
        DataError: as for texts; also if a file is no image, or has a mode that ``RULES`` lacks.
    """
    source = find(experiment.data, experiment.data_dir)
    column = source.column(IMAGE, experiment.text_column)
    read = partial(_pixels, column=column, bound=side or LARGEST_SIDE)
    data = labelled(source, experiment, label_columns(source, experiment), [column], read)
    every = [*data.train.inputs, *data.test.inputs]
    channels = channels or (1 if all(image.ndim == 2 for image in every) else 3)
    train, test = (_with_channels(split, channels) for split in (data.train, data.test))
    return replace(data, train=train, test=test, side=side or side_of(every), channels=channels)


def side_of(images: Sequence[Pixels]) -> int:
    """Return the largest side of the images, rounded up to a multiple of 4 if above 8."""
    # A square whose side is a prime number cannot be divided into patches.
    largest = max(max(image.shape[:2]) for image in images)
    return largest if largest <= 8 else -(-largest // 4) * 4


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resize an image ``[h, w]`` or ``[h, w, channels]`` to ``[height, width, ...]``, bilinearly."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if pixels.ndim == 3 and pixels.shape[2] == 1:  # Pillow's grey images have no axis of channels
        return resized(pixels[..., 0], height, width)[..., None]
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8)


def _on_white(image: Image.Image, mode: str) -> Image.Image:
    if image.has_transparency_data:
        shown = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), shown)
    return image.convert(mode)


def _own_range(image: Image.Image) -> Pixels:
    """Scale 16 bits, and other numbers from the smallest to the largest finite value."""
    values = np.asarray(image)
    if image.mode.startswith("I;") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        return (values >> 8).astype(np.uint8)
    finite = values[np.isfinite(values)].astype(np.float64)
    low, high = (finite.min(), finite.max()) if finite.size else (0, 0)
    known = np.nan_to_num(values.astype(np.float64), nan=low, posinf=high, neginf=low)
    return np.rint(255 * ((known - low) / ((high - low) or 1))).astype(np.uint8)


#: Functions that return 8 bits, grey ``[h, w]`` or colours ``[h, w, 3]``, by the mode of Pillow.
RULES: Mapping[str, Callable[[Image.Image], Image.Image | Pixels]] = {
    **dict.fromkeys(("1", "L", "LA", "La"), partial(_on_white, mode="L")),
    **dict.fromkeys(("P", "PA", "RGB", "RGBA", "RGBa", "RGBX"), partial(_on_white, mode="RGB")),
    **dict.fromkeys(("CMYK", "YCbCr", "HSV", "LAB"), partial(_on_white, mode="RGB")),
    **dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N", "I", "F"), _own_range),
}


def _pixels(rows: Rows, column: str, bound: int) -> list[list[Pixels]]:
    """Return uint8 ``[height, width]`` (grey) or ``[height, width, 3]``; no side is above ``bound``."""
    found = []
    for number, value in zip(rows.numbers, rows.table[column], strict=True):
        content, path = value.as_py(), None
        if isinstance(content, dict):
            content, path = content["bytes"], content["path"]
        try:
            pixels = _seen(path if content is None else io.BytesIO(content))
        except Exception as error:  # Pillow raises many unrelated kinds
            where = path if path and content is None else f"{rows.where}, row {number}"
            refuse(where, f"cannot be read as an image ({error})", "remove it or replace it")
        height, width = pixels.shape[:2]
        found.append(resized(pixels, min(height, bound), min(width, bound)))
    return [found]


def _seen(file: Any) -> Pixels:
    if file is None:
        raise ValueError("it is empty")
    with Image.open(file) as image:
        if image.mode not in RULES:
            raise ValueError(f"there is no rule for its mode {image.mode}: save it as RGB")
        image.load()
        with suppress(Exception):  # damaged EXIF is no reason to refuse a picture
            ImageOps.exif_transpose(image, in_place=True)
        return np.asarray(RULES[image.mode](image), dtype=np.uint8)


def _with_channels(split: Split, channels: int) -> Split:
    """Return images ``[height, width, channels]``; grey is repeated, colours are converted to grey."""
    mode = "L" if channels == 1 else "RGB"
    converted = [np.asarray(Image.fromarray(image).convert(mode)) for image in split.inputs]
    return replace(split, inputs=[image.reshape(*image.shape[:2], channels) for image in converted])
