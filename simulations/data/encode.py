"""Texts and tagged words as inputs of models."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedrot.simulations.data import IGNORED, Names
from fedrot.simulations.data.labels import DataSet, Split
from fedrot.simulations.data.texts import DOMAIN
from fedrot.simulations.data.tokenizers import tokenizer_for
from fedrot.simulations.models import settings_of
from fedrot.simulations.pretrained import pad_id_of
from fedrot.simulations.scenario import Scenario
from fedrot.simulations.tasks.objective import Batch, EncodedData


@dataclass(frozen=True)
class Encoded(ABC):
    """Rows of one split, encoded for a model; ``labels`` are those of the split."""

    labels: ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, rows: ndarray) -> ndarray:
        """Return the lengths of the rows, int64; a batch has rows of similar length."""
        return np.zeros(len(rows), dtype=np.int64)

    @abstractmethod
    def batch(self, rows: ndarray) -> Batch:
        """Return the given rows as model inputs without labels."""

    def targets(self, rows: ndarray) -> Tensor:
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

    ids: Sequence[ndarray]
    segments: Sequence[ndarray]
    pad_id: int
    domains: Names = ()
    tags: Sequence[ndarray] = ()

    def lengths(self, rows: ndarray) -> ndarray:
        return np.array([len(self.ids[row]) for row in rows])

    def batch(self, rows: ndarray) -> Batch:
        """Return the given rows padded to their longest."""
        ids = [self.ids[row] for row in rows]
        segments = [self.segments[row] for row in rows]
        ones = [*map(np.ones_like, ids)]
        return {
            "input_ids": padded(ids, self.pad_id),
            "attention_mask": padded(ones, 0),
            "token_type_ids": padded(segments, 0),
        }

    def targets(self, rows: ndarray) -> Tensor:
        if self.tags:
            return padded([self.tags[row] for row in rows], IGNORED)
        return super().targets(rows)


def padded(rows: Sequence[ndarray], value: int) -> Tensor:
    """Return rows as int64 ``[rows, longest row]``, padded with ``value`` behind."""
    tensors = [*map(torch.from_numpy, rows)]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


def encode(
    split: Split,
    tokenizer: Tokenizer,
    max_length: int,
    pad_id: int,
    tagged: bool,
) -> EncodedText:
    """Tokenise texts or tagged words, truncated to ``max_length`` tokens."""
    # The bundled tokenizer is shared in the process.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    before: Any = tokenizer.pre_tokenizer
    if tagged and hasattr(before, "add_prefix_space"):
        # In byte-level vocabularies, words start so.
        before.add_prefix_space = True
        tokenizer.pre_tokenizer = before
    texts: Any = split.inputs
    if split.second and not tagged:
        texts = [*zip(texts, split.second, strict=True)]
    ids = []
    segments = []
    tags = []
    encodings = tokenizer.encode_batch(texts, is_pretokenized=tagged)
    for row, encoding in enumerate(encodings):
        ids.append(np.asarray(encoding.ids, dtype=np.int64))
        segments.append(np.asarray(encoding.type_ids, dtype=np.int64))
        if tagged:
            tags.append(_tags_of_tokens(encoding.word_ids, split.second[row]))
    domains = tuple(map(str, split.columns.get(DOMAIN, ())))
    return EncodedText(split.labels, ids, segments, pad_id, domains, tags)


def _tags_of_tokens(words: Sequence[int | None], tags: ndarray) -> ndarray:
    """Return a tag at the first token of each word, and ``IGNORED`` elsewhere.

    ``words`` are the numbers of the tokens' words; special tokens have none.
    """
    numbers = np.array([-1 if word is None else word for word in words], dtype=np.int64)
    first = (numbers >= 0) & (np.diff(numbers, prepend=-1) != 0)
    of_tokens = np.full_like(numbers, IGNORED)
    of_tokens[first] = tags[numbers[first]]
    return of_tokens


def encoded_texts(
    scenario: Scenario,
    data: DataSet,
) -> EncodedData:
    """Return texts, and their training and held-out rows encoded for the model."""
    tokenizer = tokenizer_for(scenario)
    pad_id = pad_id_of(settings_of(scenario, data))
    train, test = (
        encode(split, tokenizer, scenario.max_length, pad_id, bool(data.tags))
        for split in (data.train, data.test)
    )
    return data, train, test
