"""Configurations of transformers for small models from scratch and for pretrained models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.models.packaged import loading, loading_of

if TYPE_CHECKING:
    from fedrot.simulations.data.labels import DataSet


def settings_of(config: SimulationConfig, data: DataSet[Any]) -> Any:
    """Return the transformers configuration of the encoder or decoder, without settings of the task."""
    if config.model is not None:
        return pretrained_settings(config.model)
    return ARCHITECTURES[config.architecture](config, data)


def pretrained_settings(model: str) -> Any:
    """Return the transformers configuration of ``SimulationConfig.model``."""
    from transformers import AutoConfig

    with loading(model):
        return AutoConfig.from_pretrained(**loading_of(model))


def pad_id_of(settings: Any) -> int:
    """Return the id of the token for padding: the padding token, else the end of text, else 0."""
    tokens = (getattr(settings, name, None) for name in ("pad_token_id", "eos_token_id"))
    token = next((token for token in tokens if token is not None), 0)
    return int(token[0] if isinstance(token, list) else token)


@lru_cache(maxsize=1)
def _bundled_ids() -> dict[str, Any]:
    from fedrot.simulations.data.encode import bundled_tokenizer

    vocabulary = bundled_tokenizer().get_vocab()
    return {
        "vocab_size": len(vocabulary),
        "pad_token_id": vocabulary["[PAD]"],
        "bos_token_id": vocabulary["[CLS]"],
        "eos_token_id": vocabulary["[SEP]"],
    }


def _sizes(config: SimulationConfig) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (config.width, config.layers, config.heads), strict=True))


def _encoder(config: SimulationConfig) -> dict[str, Any]:
    return {
        **_sizes(config),
        "intermediate_size": 4 * config.width,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
    }


def _bert(config: SimulationConfig, data: DataSet[Any]) -> Any:
    from transformers import BertConfig

    size = _bundled_ids()["vocab_size"]
    return BertConfig(vocab_size=size, max_position_embeddings=config.max_length, **_encoder(config))


def _distilbert(config: SimulationConfig, data: DataSet[Any]) -> Any:
    from transformers import DistilBertConfig

    ids = _bundled_ids()
    return DistilBertConfig(
        vocab_size=ids["vocab_size"],
        pad_token_id=ids["pad_token_id"],
        max_position_embeddings=config.max_length,
        dim=config.width,
        n_layers=config.layers,
        n_heads=config.heads,
        hidden_dim=4 * config.width,
        dropout=config.dropout,
        attention_dropout=config.dropout,
        seq_classif_dropout=config.dropout,
    )


def _gpt2(config: SimulationConfig, data: DataSet[Any]) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        **_bundled_ids(),
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        n_positions=config.max_length,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        # With untied tables the last norm can be folded, so that the residual stream can be rotated.
        tie_word_embeddings=False,
    )


def _llama(config: SimulationConfig, data: DataSet[Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **_bundled_ids(),
        **_sizes(config),
        # Three matrices of 8/3 times the width have as many entries as two of 4 times the width.
        intermediate_size=8 * config.width // 3,
        max_position_embeddings=config.max_length,
        attention_dropout=config.dropout,
    )


def _vit(config: SimulationConfig, data: DataSet[Any]) -> Any:
    from transformers import ViTConfig

    from fedrot.simulations.data.images import ImageData

    assert isinstance(data, ImageData), "a vision transformer reads images only"
    return ViTConfig(
        **_encoder(config),
        image_size=data.side,
        patch_size=patch_of(data.side),
        num_channels=data.channels,
    )


def patch_of(side: int) -> int:
    """Return the largest divisor of a side up to its square root: 2 for 8, 4 for 28 and 32, 8 for 64."""
    return next(patch for patch in range(math.isqrt(side), 0, -1) if side % patch == 0)


#: Functions that return configurations of small models, by ``SimulationConfig.architecture``.
ARCHITECTURES: Mapping[str, Callable[[SimulationConfig, DataSet[Any]], Any]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "gpt2": _gpt2,
    "llama": _llama,
    "vit": _vit,
}
