"""Models and encoded text: a small BERT with the bundled tokenizer, or a pretrained encoder."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data import Split, TextData
from fedrot.simulations.objectives import OBJECTIVES

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """Token ids and segment ids of variable length, with labels; row ``i`` is ``ids[i]``."""

    ids: list[np.ndarray]
    segments: list[np.ndarray]
    labels: np.ndarray
    pad_id: int

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the given rows padded to their longest, as model inputs without labels."""
        width = max(len(self.ids[row]) for row in rows)
        ids = np.full((len(rows), width), self.pad_id, dtype=np.int64)
        mask = np.zeros_like(ids)
        segments = np.zeros_like(ids)
        for i, row in enumerate(rows):
            n = len(self.ids[row])
            ids[i, :n], mask[i, :n], segments[i, :n] = self.ids[row], 1, self.segments[row]
        arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def tokenizer_for(config: SimulationConfig) -> Tokenizer:
    """Return the bundled tokenizer, or that of the pretrained model."""
    if config.model is None:
        from fedrot.simulations.tokenizer import bundled_tokenizer

        return bundled_tokenizer()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model).backend_tokenizer


def encode(split: Split, tokenizer: Tokenizer, max_length: int, pad_id: int) -> Encoded:
    """Tokenise a split, cut to ``max_length`` tokens."""
    tokenizer = copy.deepcopy(tokenizer)  # the bundled one is shared by the process
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    texts: Any = split.texts if split.pairs is None else list(zip(split.texts, split.pairs, strict=True))
    encodings = tokenizer.encode_batch(list(texts))
    return Encoded(
        ids=[np.asarray(e.ids, dtype=np.int64) for e in encodings],
        segments=[np.asarray(e.type_ids, dtype=np.int64) for e in encodings],
        labels=split.labels,
        pad_id=pad_id,
    )


def settings_of(config: SimulationConfig) -> Any:
    """Return the transformers configuration of the encoder, whatever the task."""
    if config.model is not None:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(config.model)
    from transformers import BertConfig

    return BertConfig(
        vocab_size=tokenizer_for(config).get_vocab_size(),
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.width,
        max_position_embeddings=config.max_length,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
    )


def model_config(config: SimulationConfig, data: TextData) -> Any:
    """Return the transformers configuration of the model."""
    settings = settings_of(config)
    OBJECTIVES[config.task].configure(settings, data)
    return settings


def build_model(config: SimulationConfig, data: TextData, seed: int) -> torch.nn.Module:
    """Return the model with what is not pretrained drawn from ``seed``."""
    import transformers

    torch.manual_seed(seed)
    settings = model_config(config, data)
    auto_model = getattr(transformers, OBJECTIVES[config.task].auto_model)
    if config.model is None:
        return auto_model.from_config(settings)
    return auto_model.from_pretrained(config.model, config=settings)
