"""Configurations of small models from scratch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.encoding import bundled_tokenizer
from fedrot.simulations.data.images import load_image_data
from fedrot.simulations.models.architectures import pad_id_of, patch_of, settings_of

SIZES: dict[str, Any] = {"layers": 3, "width": 48, "heads": 6, "max_length": 24, "dropout": 0.25}
TOKENS = bundled_tokenizer().get_vocab_size()
ENDS = {
    name: bundled_tokenizer().token_to_id(token)
    for name, token in (("bos_token_id", "[CLS]"), ("eos_token_id", "[SEP]"))
}

#: What a small model of these sizes has, by architecture.
EXPECTED: dict[str, dict[str, Any]] = {
    "bert": {
        **{"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": TOKENS},
        **{"intermediate_size": 192, "max_position_embeddings": 24, "pad_token_id": 0},
        **{"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.25},
    },
    "distilbert": {
        **{"n_layers": 3, "dim": 48, "n_heads": 6, "hidden_dim": 192, "vocab_size": TOKENS},
        **{"max_position_embeddings": 24, "pad_token_id": 0},
        **{"dropout": 0.25, "attention_dropout": 0.25, "seq_classif_dropout": 0.25},
    },
    "gpt2": {
        **{"n_layer": 3, "n_embd": 48, "n_head": 6, "vocab_size": TOKENS, "n_positions": 24},
        **{"resid_pdrop": 0.25, "embd_pdrop": 0.25, "attn_pdrop": 0.25, "tie_word_embeddings": False},
        **{"pad_token_id": 0, **ENDS},
    },
    "llama": {
        **{"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": TOKENS},
        **{"intermediate_size": 128, "max_position_embeddings": 24, "attention_dropout": 0.25},
        **{"tie_word_embeddings": False, "pad_token_id": 0, **ENDS},
    },
    "vit": {
        **{
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "intermediate_size": 192,
        },
        **{"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.25},
        **{"image_size": 8, "patch_size": 2, "num_channels": 1},
    },
}


@pytest.mark.parametrize("architecture", EXPECTED)
def test_a_small_model_has_the_sizes_that_were_asked_for(architecture: str) -> None:
    task = {"vit": "image", "gpt2": "clm", "llama": "clm"}.get(architecture, "classification")
    config = SimulationConfig.from_flat({**SIZES, "task": task, "architecture": architecture})
    data: Any = load_image_data() if task == "image" else None
    settings = settings_of(config, data)
    assert settings.model_type == architecture
    expected = EXPECTED[architecture]
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("tokens", "padding"),
    [
        ({"pad_token_id": 0, "eos_token_id": 5}, 0),
        ({"pad_token_id": None, "eos_token_id": 5}, 5),
        ({"pad_token_id": None, "eos_token_id": [7, 8]}, 7),
        ({}, 0),
    ],
)
def test_rows_are_padded_with_the_padding_or_the_end_of_texts(
    tokens: dict[str, Any], padding: int
) -> None:
    assert pad_id_of(SimpleNamespace(**tokens)) == padding


def test_patches_divide_an_image_into_about_as_many_as_they_have_pixels() -> None:
    sides = {1: 1, 7: 1, 8: 2, 9: 3, 12: 3, 28: 4, 32: 4, 64: 8}
    assert {side: patch_of(side) for side in sides} == sides
