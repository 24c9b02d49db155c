"""Settings of a tiny model and padded batches, for the tests of collectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.fedrot.oracles import seeded
from tests.models import VOCABULARY

Batch = Mapping[str, Tensor]

#: Settings of models of one layer, or of one layer that is run often.
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}


#: Settings that other families name otherwise.
OTHER: dict[str, Any] = {
    "distilbert": {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12},
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "pad_token_id": 0},
}


def tiny_classifier(kind: str, **settings: Any) -> Any:
    """Return a classifier of sequences of a ``model_type``."""
    config = transformers.AutoConfig.for_model(kind, **{**TINY, **OTHER.get(kind, {}), **settings})
    return transformers.AutoModelForSequenceClassification.from_config(config)


def batch_of(
    seed: int, rows: int = 3, length: int = 8, padding: int = 3, vocabulary: int = VOCABULARY
) -> dict[str, Tensor]:
    """Return token sequences, the first one padded."""
    ids = torch.randint(4, vocabulary, (rows, length), generator=seeded(seed))
    mask = torch.ones_like(ids)
    mask[0, length - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask}
