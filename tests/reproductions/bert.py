"""A small BERT, and a federation of eight clients for the laboratory of heads."""

from __future__ import annotations

import copy

import numpy as np
import torch
from transformers import BertConfig, BertModel

from reproductions.heads import cell
from reproductions.heads.federation import Federation

torch.manual_seed(0)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 3,
}
BERT = BertModel(BertConfig(**SIZES, num_hidden_layers=4, initializer_range=0.3)).eval()


def small_federation():
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 40, (330, 8)) * (np.arange(8) < rng.integers(3, 9, (330, 1)))
    labels = np.where(rng.random(330) < 0.7, ids[:, 0] % 3, rng.integers(0, 3, 330))
    own = cell.Cell(
        ids, (ids > 0).sum(1), labels, cell.divided(labels[:230], 1.0, 5), 5
    )
    return Federation(own, copy.deepcopy(BERT), 2, "mean")
