"""Texts, tagged words and images as inputs of models: ``read_encoded`` loads and encodes them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer

from fedrot.simulations.data.domains import DOMAIN, load_domains
from fedrot.simulations.data.images import ImageData, Pixels, load_images, resized
from fedrot.simulations.data.labels import DataSet
from fedrot.simulations.data.read import DataError
from fedrot.simulations.data.texts import TagData, TagSplit, TextSplit, load_tags, load_texts
from fedrot.simulations.models import pad_id_of, pretrained_settings, settings_of
from fedrot.simulations.packaged import loading, loading_of, source_of

if TYPE_CHECKING:
    from fedrot.simulations.settings import Experiment

#: Characters that are read for each token of a text, and words of a row; of a pair of texts. Only a text
#: with longer tokens on average loses some. The time for a pair is the product of both lengths.
PER_TOKEN, PER_TOKEN_OF_PAIR = 1000, 32
#: Label of tokens that are not predicted.
IGNORED = -100
Batch = dict[str, torch.Tensor]
#: Mean and standard deviation of pixel values in [0, 1], for models without a processor.
_HALF = (0.5,)


@dataclass(frozen=True)
class Encoded(ABC):
    """Rows of one split, encoded for a model; ``labels`` are those of the split."""

    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the lengths of the rows, int64; batches are made of rows with similar lengths."""

    @abstractmethod
    def batch(self, rows: np.ndarray) -> Batch:
        """Return the given rows as model inputs without labels."""

    def targets(self, rows: np.ndarray) -> torch.Tensor:
        """Return the given rows' targets, the input ``labels`` of a model."""
        return torch.from_numpy(self.labels[rows])


@dataclass(frozen=True)
class EncodedText(Encoded):
    """Token ids and segment ids of each row, and its domain if there are several domains."""

    ids: Sequence[np.ndarray]
    segments: Sequence[np.ndarray]
    pad_id: int
    domains: Sequence[str] = field(default=(), kw_only=True)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return np.array([len(self.ids[row]) for row in rows])

    def batch(self, rows: np.ndarray) -> Batch:
        """Return the given rows padded to their longest."""
        mask = [np.ones_like(self.ids[row]) for row in rows]
        return {
            "input_ids": padded([self.ids[row] for row in rows], self.pad_id),
            "attention_mask": padded(mask, 0),
            "token_type_ids": padded([self.segments[row] for row in rows], 0),
        }


@dataclass(frozen=True)
class EncodedTags(EncodedText):
    """Token ids of tagged words. The first token of a word has its tag, all others ``IGNORED``.

    Attributes:
        tags: by row, the tag of each token.
        places: by row, the numbers of the words that are not cut off.
        words: by row, the tags of all words.
    """

    tags: Sequence[np.ndarray]
    places: Sequence[np.ndarray]
    words: Sequence[np.ndarray]

    def targets(self, rows: np.ndarray) -> torch.Tensor:
        return padded([self.tags[row] for row in rows], IGNORED)


@dataclass(frozen=True)
class EncodedImages(Encoded):
    """Images as standardised ``pixel_values``, float32 ``[rows, channels, side, side]``.

    Attributes:
        pixels: uint8 ``[height, width, channels]`` of each image.
        mean, deviation: mean and standard deviation of each channel, for values in [0, 1].
    """

    pixels: Sequence[Pixels]
    side: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return 0 for all rows, because images have one size."""
        return np.zeros(len(rows), dtype=np.int64)

    def batch(self, rows: np.ndarray) -> Batch:
        images = np.stack([resized(self.pixels[row], self.side, self.side) for row in rows])
        mean, deviation = (np.array(v, dtype=np.float32) for v in (self.mean, self.deviation))
        values = (images / np.float32(255) - mean) / deviation
        return {"pixel_values": torch.from_numpy(values.transpose(0, 3, 1, 2).copy())}


def padded(rows: Sequence[np.ndarray], value: int) -> torch.Tensor:
    """Return rows of numbers as int64 ``[rows, longest row]``, padded with ``value`` at the end."""
    filled = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for line, row in zip(filled, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(filled)


@lru_cache(maxsize=1)
def bundled_tokenizer() -> Tokenizer:
    """Return the package's uncased WordPiece tokenizer, trained on the training texts of GoEmotions.

    Texts become ``[CLS] A [SEP]``, pairs ``[CLS] A [SEP] B [SEP]`` with type ids 0 and 1. The object is
    shared: copy it before enabling padding or truncation. See ``tests/simulations/data/wordpiece.py``.
    """
    source = resources.files("fedrot.simulations.data") / "bundled" / "tokenizer.json"
    return Tokenizer.from_str(source.read_text(encoding="utf-8"))


def tokenizer_for(experiment: Experiment) -> Tokenizer:
    """Return the bundled tokenizer, or that of the pretrained model."""
    if experiment.model is None:
        return bundled_tokenizer()
    from transformers import AutoTokenizer

    with loading(experiment.model):
        found = AutoTokenizer.from_pretrained(**loading_of(experiment.model))
        if set(found.get_vocab()) <= set(found.all_special_tokens):  # transformers makes an empty one
            raise DataError(
                f"model '{experiment.model}' has no tokenizer; save tokenizer.json in the same folder"
            )
        return found.backend_tokenizer


def encode_texts(split: TextSplit, tokenizer: Tokenizer, max_length: int, pad_id: int) -> EncodedText:
    """Tokenise a split, truncated to ``max_length`` tokens."""
    most = max_length * (PER_TOKEN if split.pairs is None else PER_TOKEN_OF_PAIR)
    both = [[text[:most] for text in texts] for texts in (split.texts, split.pairs) if texts is not None]
    texts: Any = both[0] if split.pairs is None else list(zip(*both, strict=True))
    encodings = _cut(tokenizer, max_length).encode_batch(texts)
    domains = tuple(map(str, split.columns.get(DOMAIN, ())))
    return EncodedText(split.labels, *_numbers(encodings), pad_id, domains=domains)


def encode_tags(split: TagSplit, tokenizer: Tokenizer, max_length: int, pad_id: int) -> EncodedTags:
    """Tokenise tagged words, truncated to ``max_length`` tokens; see ``EncodedTags`` for the tags."""
    tokenizer = _cut(tokenizer, max_length)
    before: Any = tokenizer.pre_tokenizer
    if hasattr(before, "add_prefix_space"):  # in byte-level vocabularies, words start with a space
        before.add_prefix_space = True
        tokenizer.pre_tokenizer = before
    most = PER_TOKEN * max_length
    rows = [[word[:most] for word in row[:most]] for row in split.words]
    encodings = tokenizer.encode_batch(rows, is_pretokenized=True)
    tags, places = [], []
    for encoding, words in zip(encodings, split.tags, strict=True):
        begins = first_pieces(encoding.word_ids)
        of_row = np.full(len(encoding.ids), IGNORED, dtype=np.int64)
        of_row[list(begins)] = words[list(begins.values())]
        tags.append(of_row)
        places.append(np.array(list(begins.values()), dtype=np.int64))
    return EncodedTags(split.labels, *_numbers(encodings), pad_id, tags, places, split.tags)


def first_pieces(word_ids: Sequence[int | None]) -> dict[int, int]:
    """Return the number of each word by the index of its first token; special tokens have no word."""
    steps = enumerate(zip(word_ids, (None, *word_ids), strict=False))
    return {token: word for token, (word, last) in steps if word is not None and word != last}


def _cut(tokenizer: Tokenizer, max_length: int) -> Tokenizer:
    tokenizer = copy.deepcopy(tokenizer)  # the bundled tokenizer is shared in the process
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer


def _numbers(encodings: Sequence[Encoding]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    ids = [np.asarray(e.ids, dtype=np.int64) for e in encodings]
    return ids, [np.asarray(e.type_ids, dtype=np.int64) for e in encodings]


def read_encoded(experiment: Experiment) -> tuple[DataSet[Any], Any, Any]:
    """Return the data of an experiment, and its training and held-out rows encoded for its model."""
    if experiment.task == "image":
        images = load_images(experiment, **_image_size(experiment.model))
        train, test = _encoded_images(images, experiment.model)
        return images, train, test
    data: DataSet[Any]
    if experiment.task == "ner":
        data = load_tags(experiment)
    elif experiment.task == "classification":
        data = load_domains(experiment)
    else:
        data = load_texts(experiment, labels_optional=True)
    encode: Any = encode_tags if isinstance(data, TagData) else encode_texts
    how = tokenizer_for(experiment), experiment.max_length, pad_id_of(settings_of(experiment, data))
    return data, encode(data.train, *how), encode(data.test, *how)


def _image_size(model: str | None) -> dict[str, int]:
    """Return ``side`` (in pixels) and ``channels`` of a pretrained model's inputs."""
    if model is None:
        return {}
    settings = pretrained_settings(model)
    side, channels = getattr(settings, "image_size", None), getattr(settings, "num_channels", 3)
    sides = list(dict.fromkeys(side)) if isinstance(side, list | tuple) else [side]
    if len(sides) != 1 or not isinstance(sides[0], int):
        raise DataError(
            f"model '{model}' of type '{settings.model_type}' does not take square images "
            f"(image_size is {side}); choose a vision transformer, or another task"
        )
    if channels not in (1, 3):
        raise DataError(
            f"model '{model}' takes images of {channels} channels; choose a model for 1 (grey) or 3 "
            "(colours)"
        )
    return {"side": sides[0], "channels": channels}


def _encoded_images(data: ImageData, model: str | None) -> list[EncodedImages]:
    """Standardise images by the mean and the deviation of the model's processor, by default one half."""
    found: Mapping[str, Any] = {}
    if model is not None:
        from transformers.image_processing_base import ImageProcessingMixin

        with suppress(OSError):  # saved without a processor
            # Not the processor itself, which needs torchvision.
            found, _ = ImageProcessingMixin.get_image_processor_dict(source_of(model))
    mean, deviation = (
        tuple((found.get(name) or _HALF)[: data.channels]) for name in ("image_mean", "image_std")
    )
    splits = (data.train, data.test)
    return [EncodedImages(s.labels, s.pixels, data.side, mean, deviation) for s in splits]
