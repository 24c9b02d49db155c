"""Inputs of models: token ids of texts and tagged words, and pixels of images."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.images import Pixels, resized
from fedrot.simulations.data.tagged import TagSplit
from fedrot.simulations.data.texts import TextSplit
from fedrot.simulations.tasks.masking import IGNORED

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Encoded(ABC):
    """Rows of one split, ready for a model; ``labels`` are those of the split."""

    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the lengths of the rows; a batch wants rows of similar lengths."""

    @abstractmethod
    def batch(self, rows: np.ndarray) -> Batch:
        """Return the given rows as model inputs without labels."""

    def targets(self, rows: np.ndarray) -> torch.Tensor:
        """Return the given rows' targets, the input ``labels`` of a model."""
        return torch.from_numpy(self.labels[rows])


@dataclass(frozen=True)
class EncodedText(Encoded):
    """Token ids and segment ids of variable length; row ``i`` is ``ids[i]``."""

    ids: Sequence[np.ndarray]
    segments: Sequence[np.ndarray]
    pad_id: int

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
    """Token ids with the tag of every word at its first piece, ``IGNORED`` at all other tokens.

    Attributes:
        tags: per row, the tag of each token.
        places: per row, the number of the word of each tagged token. Words that were cut off, and
            words without a piece, are missing.
        words: per row, the tags of all words.
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
        mean: per channel, of values between 0 and 1.
        deviation: the same.
    """

    pixels: Sequence[Pixels]
    side: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return 0 for all rows: images have one size."""
        return np.zeros(len(rows), dtype=np.int64)

    def batch(self, rows: np.ndarray) -> Batch:
        images = np.stack([resized(self.pixels[row], self.side, self.side) for row in rows])
        mean, deviation = (np.array(v, dtype=np.float32) for v in (self.mean, self.deviation))
        values = (images / np.float32(255) - mean) / deviation
        return {"pixel_values": torch.from_numpy(values.transpose(0, 3, 1, 2).copy())}


def padded(rows: Sequence[np.ndarray], value: int) -> torch.Tensor:
    """Return rows of numbers as int64 ``[rows, longest]``, padded with ``value`` at the end."""
    filled = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for line, row in zip(filled, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(filled)


def tokenizer_for(config: SimulationConfig) -> Tokenizer:
    """Return the bundled tokenizer, or that of the pretrained model."""
    if config.model is None:
        from fedrot.simulations.data.tokenizer import bundled_tokenizer

        return bundled_tokenizer()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model).backend_tokenizer


def encode_texts(split: TextSplit, tokenizer: Tokenizer, max_length: int, pad_id: int) -> EncodedText:
    """Tokenise a split, cut to ``max_length`` tokens."""
    texts: Any = split.texts if split.pairs is None else list(zip(split.texts, split.pairs, strict=True))
    encodings = _cut(tokenizer, max_length).encode_batch(list(texts))
    return EncodedText(split.labels, *_numbers(encodings), pad_id)


def encode_tags(split: TagSplit, tokenizer: Tokenizer, max_length: int, pad_id: int) -> EncodedTags:
    """Tokenise tagged words, cut to ``max_length`` tokens; the first piece of a word has its tag."""
    tokenizer = _cut(tokenizer, max_length)
    before: Any = tokenizer.pre_tokenizer
    if hasattr(before, "add_prefix_space"):  # words of byte-level vocabularies start with a space
        before.add_prefix_space = True
        tokenizer.pre_tokenizer = before
    encodings = tokenizer.encode_batch(list(map(list, split.words)), is_pretokenized=True)
    tags, places = [], []
    for encoding, words in zip(encodings, split.tags, strict=True):
        begins = first_pieces(encoding.word_ids)
        of_row = np.full(len(encoding.ids), IGNORED, dtype=np.int64)
        of_row[list(begins)] = words[list(begins.values())]
        tags.append(of_row)
        places.append(np.array(list(begins.values()), dtype=np.int64))
    return EncodedTags(split.labels, *_numbers(encodings), pad_id, tags, places, split.tags)


def first_pieces(word_ids: Sequence[int | None]) -> dict[int, int]:
    """Return the numbers of words by the tokens at which they begin; special tokens have no word."""
    begins: dict[int, int] = {}
    last = None
    for token, word in enumerate(word_ids):
        if word is not None and word != last:
            begins[token] = word
        last = word
    return begins


def _cut(tokenizer: Tokenizer, max_length: int) -> Tokenizer:
    tokenizer = copy.deepcopy(tokenizer)  # the bundled one is shared by the process
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer


def _numbers(encodings: Sequence[Encoding]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    ids = [np.asarray(e.ids, dtype=np.int64) for e in encodings]
    return ids, [np.asarray(e.type_ids, dtype=np.int64) for e in encodings]
