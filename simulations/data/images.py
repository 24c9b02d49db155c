"""Data sets of images, as they are seen: upright, on white, in eight bits."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as types
from PIL import Image, ImageOps

from fedrot.simulations.data.labels import DataSet, Rows, Split, label_columns, labelled
from fedrot.simulations.data.read import Content, DataError, find

if TYPE_CHECKING:
    from fedrot.simulations.settings import Experiment

Pixels: TypeAlias = npt.NDArray[np.uint8]
#: Largest side of a small model's images, in pixels; larger images are scaled down.
LARGEST_SIDE = 64


def _is_image(kind: pa.DataType) -> bool:
    parts = {kind.field(i).name for i in range(kind.num_fields)} if types.is_struct(kind) else set()
    return types.is_binary(kind) or types.is_large_binary(kind) or {"bytes", "path"} <= parts


IMAGE = Content(
    "image", ("image", "img"), "--text-column", "whole image files (PNG, JPEG) as bytes", _is_image
)


@dataclass(frozen=True)
class ImageSplit(Split):
    """Rows of images, uint8 ``[height, width, channels]``; no side is above the data set's ``side``."""

    pixels: Sequence[Pixels]


@dataclass(frozen=True)
class ImageData(DataSet[ImageSplit]):
    """A data set of images; inputs of models are squares with sides of ``side`` pixels."""

    side: int
    channels: int


def load_images(
    experiment: Experiment, *, side: int | None = None, channels: int | None = None
) -> ImageData:
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
    columns = label_columns(source, experiment)
    data = labelled(source, columns, experiment)
    parts = (data.train, data.test)
    pixels = [_pixels(rows, column, side or LARGEST_SIDE) for rows in parts]
    every = [image for images in pixels for image in images]
    channels = channels or (1 if all(image.ndim == 2 for image in every) else 3)
    train, test = (
        ImageSplit(r.labels, r.columns(column, *columns), [_with_channels(i, channels) for i in images])
        for r, images in zip(parts, pixels, strict=True)
    )
    changed: dict[str, Any] = {"train": train, "test": test, "side": side or side_of(every)}
    return ImageData(**{**vars(data), **changed, "channels": channels})


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


def _sixteen_bits(image: Image.Image) -> Pixels:
    return (np.asarray(image) >> 8).astype(np.uint8)


def _own_range(image: Image.Image) -> Pixels:
    """Scale from the smallest to the largest finite value; integers of PGM and PNG have 16 bits."""
    if image.format in ("PPM", "PNG"):
        return _sixteen_bits(image)
    values = np.asarray(image, dtype=np.float64)
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0, 0)
    scaled = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1)
    return np.rint(255 * scaled).astype(np.uint8)


#: Functions that return 8 bits, grey ``[h, w]`` or colours ``[h, w, 3]``, by the mode of Pillow.
RULES: Mapping[str, Callable[[Image.Image], Image.Image | Pixels]] = {
    **dict.fromkeys(("1", "L", "LA", "La"), partial(_on_white, mode="L")),
    **dict.fromkeys(("P", "PA", "RGB", "RGBA", "RGBa", "RGBX"), partial(_on_white, mode="RGB")),
    **dict.fromkeys(("CMYK", "YCbCr", "HSV", "LAB"), partial(_on_white, mode="RGB")),
    **dict.fromkeys(("I;16", "I;16L", "I;16B", "I;16N"), _sixteen_bits),
    **dict.fromkeys(("I", "F"), _own_range),
}


def _pixels(rows: Rows, column: str, bound: int) -> list[Pixels]:
    batches = rows.table.select([column]).to_batches(max_chunksize=256)
    cells = (cell for batch in batches for cell in batch.column(0).to_pylist())
    numbered = zip(rows.numbers, cells, strict=True)
    return [_decoded(cell, bound, f"{rows.where}, row {number}") for number, cell in numbered]


def _decoded(cell: bytes | Mapping[str, Any], bound: int, where: str) -> Pixels:
    """Return uint8 ``[height, width]`` (grey) or ``[height, width, 3]``; no side is above ``bound``."""
    parts: Mapping[str, Any] = {"bytes": cell} if isinstance(cell, bytes) else cell
    content, path = parts.get("bytes"), parts.get("path")
    if content is None and path is None:
        raise DataError(f"{where} has no image; remove that row")
    try:
        with Image.open(str(path) if content is None else io.BytesIO(content)) as image:
            if image.mode not in RULES:
                raise ValueError(f"there is no rule for its mode {image.mode}: save it as RGB")
            image.load()
            with suppress(Exception):  # damaged EXIF is no reason to refuse a picture
                ImageOps.exif_transpose(image, in_place=True)
            pixels = np.asarray(RULES[image.mode](image), dtype=np.uint8)
    except Exception as error:  # Pillow raises many unrelated kinds
        raise DataError(
            f"{path if content is None else where} cannot be read as an image ({error}); remove it or "
            "replace it"
        ) from error
    height, width = pixels.shape[:2]
    return resized(pixels, min(height, bound), min(width, bound))


def _with_channels(image: Pixels, channels: int) -> Pixels:
    """Return ``[height, width, channels]``; grey is repeated, or colours are converted to grey."""
    converted = Image.fromarray(image).convert("L" if channels == 1 else "RGB")
    return np.asarray(converted, dtype=np.uint8).reshape(*image.shape[:2], channels)
