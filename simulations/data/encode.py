"""Texts, tagged words and images as inputs of models: ``read_encoded`` loads and encodes them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch.nn.utils.rnn import pad_sequence

from fedrot.simulations.data.images import Pixels, load_images, resized
from fedrot.simulations.data.labels import DataSet, Split
from fedrot.simulations.data.read import refuse
from fedrot.simulations.data.texts import DOMAIN, load_domains, load_tags, load_texts
from fedrot.simulations.models import pad_id_of, pretrained_settings, settings_of
from fedrot.simulations.packaged import loading, loading_of, source_of
from fedrot.simulations.settings import Experiment

#: Label of tokens that are not predicted.
IGNORED = -100
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Encoded(ABC):
    """Rows of one split, encoded for a model; ``labels`` are those of the split."""

    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the lengths of the rows, int64; batches are made of rows with similar lengths."""
        return np.zeros(len(rows), dtype=np.int64)

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
        ids = [self.ids[row] for row in rows]
        return {
            "input_ids": padded(ids, self.pad_id),
            "attention_mask": padded([*map(np.ones_like, ids)], 0),
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
    mean: Sequence[float]
    deviation: Sequence[float]

    def batch(self, rows: np.ndarray) -> Batch:
        images = np.stack([resized(self.pixels[row], self.side, self.side) for row in rows])
        mean, deviation = (np.array(v, dtype=np.float32) for v in (self.mean, self.deviation))
        values = (images / np.float32(255) - mean) / deviation
        return {"pixel_values": torch.from_numpy(values.transpose(0, 3, 1, 2).copy())}


def padded(rows: Sequence[np.ndarray], value: int) -> torch.Tensor:
    """Return rows of numbers as int64 ``[rows, longest row]``, padded with ``value`` at the end."""
    return pad_sequence([*map(torch.from_numpy, rows)], batch_first=True, padding_value=value)


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
            where = f"model '{experiment.model}'"
            refuse(where, "has no tokenizer", "save tokenizer.json in the same folder")
        return found.backend_tokenizer


def encode_texts(split: Split, tokenizer: Tokenizer, max_length: int, pad_id: int) -> EncodedText:
    """Tokenise a split, truncated to ``max_length`` tokens."""
    texts: Any = [*split.inputs]
    if split.second is not None:
        texts = [*zip(texts, split.second, strict=True)]
    encodings = _cut(tokenizer, max_length).encode_batch(texts)
    domains = tuple(map(str, split.columns.get(DOMAIN, ())))
    return EncodedText(split.labels, *_numbers(encodings), pad_id, domains=domains)


def encode_tags(split: Split, tokenizer: Tokenizer, max_length: int, pad_id: int) -> EncodedTags:
    """Tokenise tagged words, truncated to ``max_length`` tokens; see ``EncodedTags`` for the tags."""
    tokenizer = _cut(tokenizer, max_length)
    before: Any = tokenizer.pre_tokenizer
    if hasattr(before, "add_prefix_space"):  # in byte-level vocabularies, words start with a space
        before.add_prefix_space = True
        tokenizer.pre_tokenizer = before
    encodings = tokenizer.encode_batch([*split.inputs], is_pretokenized=True)
    tags, places = [], []
    for encoding, of_words in zip(encodings, split.second or (), strict=True):
        words = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int64)
        first = (words >= 0) & (np.diff(words, prepend=-1) != 0)
        tags.append(np.full(len(words), IGNORED, dtype=np.int64))
        places.append(words[first])
        tags[-1][first] = of_words[words[first]]
    return EncodedTags(split.labels, *_numbers(encodings), pad_id, tags, places, split.second or ())


def _cut(tokenizer: Tokenizer, max_length: int) -> Tokenizer:
    tokenizer = copy.deepcopy(tokenizer)  # the bundled tokenizer is shared in the process
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer


def _numbers(encodings: Sequence[Encoding]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    ids = [np.asarray(e.ids, dtype=np.int64) for e in encodings]
    return ids, [np.asarray(e.type_ids, dtype=np.int64) for e in encodings]


def read_encoded(experiment: Experiment) -> tuple[DataSet, Any, Any]:
    """Return the data of an experiment, and its training and held-out rows encoded for its model."""
    if experiment.task == "image":
        return _encoded_images(experiment)
    load = {"classification": load_domains, "ner": load_tags}.get(experiment.task, load_texts)
    data = load(experiment)
    encode: Any = encode_tags if data.tags else encode_texts
    how = tokenizer_for(experiment), experiment.max_length, pad_id_of(settings_of(experiment, data))
    return data, encode(data.train, *how), encode(data.test, *how)


def _encoded_images(experiment: Experiment) -> tuple[DataSet, EncodedImages, EncodedImages]:
    """Load images for a model's size; standardise them by its processor's numbers, or by one half."""
    found: Mapping[str, Any] = {}
    side = channels = None
    if (model := experiment.model) is not None:
        from transformers.image_processing_base import ImageProcessingMixin

        settings = pretrained_settings(model)
        side, channels = getattr(settings, "image_size", None), getattr(settings, "num_channels", 3)
        sides = {*side} if isinstance(side, list | tuple) else {side}
        side = sides.pop()
        if sides or not isinstance(side, int) or channels not in (1, 3):
            what = "takes no square images of 1 or 3 channels (image_size, num_channels)"
            refuse(f"model '{model}'", what, "choose a vision transformer, or another task")
        with suppress(OSError):  # saved without a processor
            # Not the processor itself, which needs torchvision.
            found, _ = ImageProcessingMixin.get_image_processor_dict(source_of(model))
    data = load_images(experiment, side, channels)
    of_pixels = [(found.get(key) or (0.5,))[: data.channels] for key in ("image_mean", "image_std")]
    train, test = (
        EncodedImages(s.labels, s.inputs, data.side, *of_pixels) for s in (data.train, data.test)
    )
    return data, train, test
