"""Texts, tagged words and images as inputs of models: ``read_encoded`` loads and
encodes them.
"""

from __future__ import annotations

import copy
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence

from fedrot.simulations.data.labels import DataSet, Rows, Split, label_columns, labelled
from fedrot.simulations.data.read import Content, find, refuse
from fedrot.simulations.data.texts import DOMAIN, load_domains, load_tags, load_texts
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.models import (
    loading,
    pad_id_of,
    pretrained_settings,
    settings_of,
    source_of,
)

#: Label of tokens that are not predicted.
IGNORED = -100
#: Largest side of a small model's images, in pixels; larger images are scaled down.
LARGEST_SIDE, BILINEAR = 64, Image.Resampling.BILINEAR
IMAGE: Content = ("image file", ("image", "img"), lambda kind: "binary" in str(kind))
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Encoded(ABC):
    """Rows of one split, encoded for a model; ``labels`` are those of the split."""

    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the lengths of the rows, int64; batches are made of rows with similar
        lengths.
        """
        return np.zeros(len(rows), dtype=np.int64)

    @abstractmethod
    def batch(self, rows: np.ndarray) -> Batch:
        """Return the given rows as model inputs without labels."""

    def targets(self, rows: np.ndarray) -> torch.Tensor:
        """Return the given rows' targets, the input ``labels`` of a model."""
        return torch.from_numpy(self.labels[rows])


@dataclass(frozen=True)
class EncodedText(Encoded):
    """Token ids and segment ids of each row.

    Attributes:
        domains: if there are several domains, those of the rows.
        tags: of tagged words by row, the tag of each token; only the first of a word is
            not ``IGNORED``.
    """

    ids: Sequence[np.ndarray]
    segments: Sequence[np.ndarray]
    pad_id: int
    domains: Sequence[str] = ()
    tags: Sequence[np.ndarray] = ()

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return np.array([len(self.ids[row]) for row in rows])

    def batch(self, rows: np.ndarray) -> Batch:
        """Return the given rows padded to their longest."""
        ids = [self.ids[row] for row in rows]
        return {
            "input_ids": padded(ids, self.pad_id),
            "attention_mask": padded([*map(np.ones_like, ids)], 0),
            "token_type_ids": padded([self.segments[row] for row in rows], 0),
        }

    def targets(self, rows: np.ndarray) -> torch.Tensor:
        return (
            padded([self.tags[row] for row in rows], IGNORED)
            if self.tags
            else super().targets(rows)
        )


@dataclass(frozen=True)
class EncodedImages(Encoded):
    """Images as standardised ``pixel_values``, float32 ``[rows, channels, side,
    side]``.

    Attributes:
        pixels: uint8 ``[rows, side, side, channels]``.
        mean, deviation: mean and standard deviation of each channel, for values in [0,
            1].
    """

    pixels: Any
    mean: Sequence[float]
    deviation: Sequence[float]

    def batch(self, rows: np.ndarray) -> Batch:
        mean, deviation = (
            np.array(v, dtype=np.float32) for v in (self.mean, self.deviation)
        )
        values = (self.pixels[rows] / np.float32(255) - mean) / deviation
        return {"pixel_values": torch.from_numpy(values.transpose(0, 3, 1, 2).copy())}


def padded(rows: Sequence[np.ndarray], value: int) -> torch.Tensor:
    """Return rows of numbers as int64 ``[rows, longest row]``, padded with ``value`` at
    the end.
    """
    return pad_sequence(
        [*map(torch.from_numpy, rows)], batch_first=True, padding_value=value
    )


@lru_cache(maxsize=1)
def bundled_tokenizer() -> Tokenizer:
    """Return the package's uncased WordPiece tokenizer, trained on the training texts
    of GoEmotions.

    Texts become ``[CLS] A [SEP]``, pairs ``[CLS] A [SEP] B [SEP]`` with type ids 0 and
    1. The object is shared: copy it before enabling padding or truncation. See
    ``tests/simulations/data/wordpiece.py``.
    """
    return Tokenizer.from_file(
        str(Path(__file__).with_name("bundled") / "tokenizer.json")
    )


def tokenizer_for(experiment: Experiment) -> Tokenizer:
    """Return the bundled tokenizer, or that of the pretrained model."""
    if experiment.model is None:
        return bundled_tokenizer()
    from transformers import AutoTokenizer

    with loading(experiment.model):
        found = AutoTokenizer.from_pretrained(source_of(experiment.model))
        if set(found.get_vocab()) <= set(
            found.all_special_tokens
        ):  # transformers makes an empty one
            refuse(
                f"model '{experiment.model}'",
                "has no tokenizer",
                "save tokenizer.json beside it",
            )
        return found.backend_tokenizer


def encode(
    split: Split, tokenizer: Tokenizer, max_length: int, pad_id: int, tagged: bool
) -> EncodedText:
    """Tokenise texts or tagged words, truncated to ``max_length`` tokens; see
    ``EncodedText``.
    """
    tokenizer = copy.deepcopy(
        tokenizer
    )  # the bundled tokenizer is shared in the process
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    before: Any = tokenizer.pre_tokenizer
    if tagged and hasattr(
        before, "add_prefix_space"
    ):  # in byte-level vocabularies, words start so
        before.add_prefix_space = True
        tokenizer.pre_tokenizer = before
    second, rows = split.second or (), [*split.inputs]
    texts: Any = [*zip(rows, second, strict=True)] if second and not tagged else rows
    encodings = tokenizer.encode_batch(texts, is_pretokenized=tagged)
    ids = [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]
    segments = [np.asarray(encoding.type_ids, dtype=np.int64) for encoding in encodings]
    tags = []
    for encoding, of_words in zip(encodings, second, strict=True) if tagged else ():
        words = np.array(
            [-1 if word is None else word for word in encoding.word_ids], dtype=np.int64
        )
        first = (words >= 0) & (np.diff(words, prepend=-1) != 0)
        tags.append(np.full(len(words), IGNORED, dtype=np.int64))
        tags[-1][first] = of_words[words[first]]
    domains = tuple(map(str, split.columns.get(DOMAIN, ())))
    return EncodedText(split.labels, ids, segments, pad_id, domains, tags)


def read_encoded(experiment: Experiment) -> tuple[DataSet, Any, Any]:
    """Return the data of an experiment, and its training and held-out rows encoded for
    its model.
    """
    if experiment.task == "image":
        return _encoded_images(experiment)
    load = {"classification": load_domains, "ner": load_tags}.get(
        experiment.task, load_texts
    )
    data = load(experiment)
    pad_id = pad_id_of(settings_of(experiment, data))
    how = tokenizer_for(experiment), experiment.max_length, pad_id, bool(data.tags)
    return data, encode(data.train, *how), encode(data.test, *how)


def _encoded_images(
    experiment: Experiment,
) -> tuple[DataSet, EncodedImages, EncodedImages]:
    """Load images for a model's size; standardise them by its processor's numbers, or
    by one half.

    Without a model, their side is that of the largest image, at most ``LARGEST_SIDE``;
    above 8 it is a multiple of 4, since patches cannot divide a prime number. There is
    one channel if all are grey.
    """
    found: Mapping[str, Any] = {}
    side = channels = None
    if (model := experiment.model) is not None:
        from transformers.image_processing_base import ImageProcessingMixin

        settings = pretrained_settings(model)
        side, channels = (
            getattr(settings, "image_size", None),
            getattr(settings, "num_channels", 3),
        )
        if not isinstance(side, int) or channels not in (1, 3):
            what = (
                f"takes no square images of 1 or 3 channels (image_size {side}, "
                f"{channels} channels)"
            )
            refuse(
                f"model '{model}'", what, "choose a vision transformer, or another task"
            )
        with suppress(OSError):  # saved without a processor
            # Not the processor itself, which needs torchvision.
            found, _ = ImageProcessingMixin.get_image_processor_dict(source_of(model))
    source = find(experiment.data, experiment.data_dir)
    column = source.column(IMAGE, experiment.text_column)
    read = partial(_images, column=column, bound=side or LARGEST_SIDE)
    data = labelled(
        source, experiment, label_columns(source, experiment), [column], read
    )
    every = [*data.train.inputs, *data.test.inputs]
    channels = channels or (1 if all(image.mode == "L" for image in every) else 3)
    largest = max(max(image.size) for image in every)
    side = side or (largest if largest <= 8 else -(-largest // 4) * 4)
    of_pixels = [
        (found.get(key) or (0.5,))[:channels] for key in ("image_mean", "image_std")
    ]
    splits = []
    for split in (data.train, data.test):
        images = [
            image.convert("L" if channels == 1 else "RGB") for image in split.inputs
        ]
        pixels = np.stack([image.resize((side, side), BILINEAR) for image in images])
        pixels = pixels.reshape(-1, side, side, channels)
        splits.append(EncodedImages(split.labels, pixels, *of_pixels))
    return replace(data, side=side, channels=channels), splits[0], splits[1]


def _images(rows: Rows, column: str, bound: int) -> list[list[Image.Image]]:
    """Return grey (mode L) or coloured (RGB) images, of which no side is above
    ``bound``.
    """
    found = []
    for number, value in zip(rows.numbers, rows.table[column], strict=True):
        cell: Any = value.as_py()
        content, path = (
            (cell.get("bytes"), cell.get("path"))
            if isinstance(cell, dict)
            else (cell, None)
        )
        file: Any = path if content is None else io.BytesIO(content)
        try:
            with Image.open(file) as image:
                image.load()
                with suppress(
                    Exception
                ):  # damaged EXIF is no reason to refuse a picture
                    ImageOps.exif_transpose(image, in_place=True)
                seen = _own_range(image) if image.mode[0] in "IF" else _on_white(image)
        except Exception as error:  # Pillow raises many unrelated kinds
            where = path if path and content is None else f"{rows.where}, row {number}"
            refuse(
                where,
                f"cannot be read as an image ({error})",
                "remove it or replace it",
            )
        found.append(
            seen.resize((min(seen.width, bound), min(seen.height, bound)), BILINEAR)
        )
    return [found]


def _on_white(image: Image.Image) -> Image.Image:
    mode = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    if image.has_transparency_data:
        shown = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), shown)
    return image.convert(mode)


def _own_range(image: Image.Image) -> Image.Image:
    """Scale 16 bits, and other numbers from the smallest to the largest finite
    value.
    """
    values = np.asarray(image)
    if image.mode.startswith("I;") or (
        image.mode == "I" and image.format in ("PPM", "PNG")
    ):
        return Image.fromarray((values >> 8).astype(np.uint8))
    finite = values[np.isfinite(values)].astype(np.float64)
    low, high = (finite.min(), finite.max()) if finite.size else (0, 0)
    known = np.nan_to_num(values.astype(np.float64), nan=low, posinf=high, neginf=low)
    scaled = np.rint(255 * ((known - low) / ((high - low) or 1)))
    return Image.fromarray(scaled.astype(np.uint8))
