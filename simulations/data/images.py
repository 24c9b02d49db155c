"""Image data sets: folders of classes, Parquet files of encoded images, and scikit-learn's digits."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as types
from PIL import Image

from fedrot.simulations.data import DIGITS
from fedrot.simulations.data.data_set import METRICS_OF_KIND, DataSet, Split
from fedrot.simulations.data.labels import complete, label_columns, labels_of
from fedrot.simulations.data.sources import (
    Catalogue,
    Content,
    DataError,
    Selection,
    Source,
    find,
    other_columns,
)

Pixels: TypeAlias = npt.NDArray[np.uint8]


def _is_image(kind: pa.DataType) -> bool:
    parts = {kind.field(i).name for i in range(kind.num_fields)} if types.is_struct(kind) else set()
    return types.is_binary(kind) or types.is_large_binary(kind) or {"bytes", "path"} <= parts


IMAGE = Content(
    "image", "whole image files (PNG, JPEG) as bytes", ("image", "img"), "--text-column", _is_image
)

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
HELD_OUT_FOLDERS = ("test", "validation", "val", "valid")
#: Largest side of a small model's images, in pixels; larger images are scaled down.
LARGEST_SIDE = 64
_GREY = frozenset({"1", "L", "LA", "I", "F"})


@dataclass(frozen=True)
class ImageSplit(Split):
    """Rows of images, uint8 ``[height, width, channels]``; no side is above the data set's ``side``."""

    pixels: Sequence[Pixels]


@dataclass(frozen=True)
class ImageData(DataSet[ImageSplit]):
    """A data set of images; inputs of models are squares with sides of ``side`` pixels."""

    side: int
    channels: int


def load_image_data(
    name: str = DIGITS,
    data_dir: Path | None = None,
    *,
    side: int | None = None,
    channels: int | None = None,
    **selection: Unpack[Selection],
) -> ImageData:
    """Load images by name: a folder, a Parquet file, ``digits``, or a data set of the hub.

    A folder has files ``CLASS/IMAGE``, or ``train/CLASS/IMAGE`` and ``test/CLASS/IMAGE``. It is looked
    up in ``data_dir``, below ``data_dir/images``, and as a path. A Parquet file has a column of encoded
    images (bytes, or the hub's bytes and path) and a column ``label``. All else is as for texts.

    Args:
        side: side of the model's square inputs, in pixels; default: of the largest image, at most 64.
        channels: 1 or 3; default: 1 if every image is grey, else 3.

    Raises:
        DataError: as for texts; also if a folder is empty, or a file is no image.
    """
    folder = _folder(name, data_dir)
    source = _from_folder(folder) if folder else find(name, data_dir, IMAGES)
    column = source.column(IMAGE, selection.get("text_column"))
    chosen = label_columns(source, selection.get("label_column"))
    # In a folder every image has a class, even if its name is that of a missing label.
    whole = complete(source, IMAGE, [column], () if folder else chosen, selection).divided(chosen)
    source = whole.limited(name, selection)
    labels = labels_of(source, chosen, selection.get("label_kind", ""), whole)
    train, test = (
        _pixels(table, column, side or LARGEST_SIDE, f"{name} ({split})")
        for split, table in source.tables.items()
    )
    channels = channels or (1 if all(image.ndim == 2 for image in (*train, *test)) else 3)

    def split(table: pa.Table, classes: npt.NDArray[Any], images: list[Pixels]) -> ImageSplit:
        others = other_columns(table, column, *chosen)
        return ImageSplit(classes, others, [_with_channels(image, channels) for image in images])

    return ImageData(
        name=name,
        kind=labels.kind,
        label_names=labels.names,
        metrics=METRICS_OF_KIND[labels.kind],
        train=split(source.train, labels.train, train),
        test=split(source.test, labels.test, test),
        side=side or side_of([*train, *test]),
        channels=channels,
        note=source.note,
        said=" ".join(filter(None, (source.said, labels.said))),
    )


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


def digits() -> Source:
    """Return scikit-learn's 1,797 grey images of handwritten digits, 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    def encoded(image: npt.NDArray[Any]) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(file, "png")
        return file.getvalue()

    found = load_digits()
    table = pa.table({"image": [encoded(image) for image in found.images], "label": found.target})
    return Source(DIGITS, {DIGITS: table})


IMAGES = Catalogue((".", "images"), {DIGITS: digits})


def _folder(name: str, data_dir: Path | None) -> Path | None:
    places = [root / name for root in IMAGES.roots(data_dir)]
    places += [] if name in IMAGES.bundled else [Path(name)]
    return next((p for p in places if p.is_dir() and not (p / "train.parquet").exists()), None)


def _from_folder(folder: Path) -> Source:
    parts = [folder]
    if (folder / "train").is_dir():
        test = next((folder / name for name in HELD_OUT_FOLDERS if (folder / name).is_dir()), None)
        if test is None:
            wanted = ", ".join(HELD_OUT_FOLDERS)
            raise DataError(f"{folder / 'train'} has no held-out folder next to it; add one of {wanted}")
        parts = [folder / "train", test]
    return Source(folder.name, {str(part): _classes(part) for part in parts})


def _classes(folder: Path) -> pa.Table:
    """Return the paths and class names of the images in a folder of classes, as a table."""
    names = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = {path: sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES) for path in names}
    empty = [path for path, found in files.items() if not found]
    if empty or not files:
        raise DataError(
            f"{empty[0] if empty else folder} has no images; a folder of images has a sub-folder for "
            f"each class, as in {folder.name}/CLASS/IMAGE.png"
        )
    rows = [(str(file), path.name) for path, found in files.items() for file in found]
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = {
        "image": [{"bytes": None, "path": file} for file, _ in rows],
        "label": [label for _, label in rows],
    }
    return pa.table(columns, schema=pa.schema({"image": image, "label": pa.string()}))


def _pixels(table: pa.Table, column: str, bound: int, where: str) -> list[Pixels]:
    batches = table.select([column]).to_batches(max_chunksize=256)
    rows = enumerate(raw for batch in batches for raw in batch.column(0).to_pylist())
    return [_decoded(raw, bound, f"{where}, row {row}") for row, raw in rows]


def _decoded(raw: bytes | Mapping[str, Any] | None, bound: int, where: str) -> Pixels:
    """Return uint8 ``[height, width]`` (grey) or ``[height, width, 3]``; no side is above ``bound``."""
    parts: Mapping[str, Any] = {"bytes": raw} if isinstance(raw, bytes) else raw or {}
    content, path = parts.get("bytes"), parts.get("path")
    if content is None and path is None:
        raise DataError(f"{where} has no image; remove that row")
    try:
        with Image.open(str(path) if content is None else io.BytesIO(content)) as image:
            if image.mode.startswith("I;16"):  # convert() would clip values above 255
                pixels = (np.asarray(image) >> 8).astype(np.uint8)
            else:
                mode = "L" if image.mode in _GREY else "RGB"
                pixels = np.asarray(image.convert(mode), dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
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
