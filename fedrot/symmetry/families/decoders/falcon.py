"""Falcon: 7B (one key head), 40B and 11B (queries that share a key), RW (ALiBi)."""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_norm,
    pre_normed,
)
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import embedding
from fedrot.symmetry.describe.task_heads import UNMEASURED


def _heads(config: Config) -> Heads:
    count = config["num_attention_heads"]
    alibi = config["alibi"]
    keys = 1 if config["multi_query"] else count
    if config["new_decoder_architecture"]:
        keys = config["num_kv_heads"]
    dim = config["hidden_size"] // count
    return Heads(count, dim, keys, rotary=0 if alibi else dim, ordered=alibi)


def _norms(config: Config) -> tuple[str, ...]:
    if not config["parallel_attn"]:
        return ("input_layernorm", "post_attention_layernorm")
    count = config.get("num_ln_in_parallel_attn") or (
        2 if config["new_decoder_architecture"] else 1
    )
    return ("input_layernorm",) if count == 1 else ("ln_attn", "ln_mlp")


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = _heads(config)
    bias = config["bias"]
    projections = Projections.query_key_value(f"{p}self_attention.", heads, bias)
    modules = "mlp.dense_h_to_4h mlp.dense_4h_to_h"
    blocks = [
        attention(p, heads, projections),
        feed_forward_of(p, config["ffn_hidden_size"], modules, bias),
    ]
    norms = _norms(config)
    if len(norms) == 1:
        return pre_norm(p + norms[0], *blocks)
    return pre_normed(p, **dict(zip(norms, blocks, strict=True)))


FAMILY = Family(
    name="falcon",
    model_types=("falcon",),
    body=(
        embedding("word_embeddings"),
        Stack("h", "num_hidden_layers", _layer),
        last_norm("ln_f"),
    ),
    inside=("rotary_emb",),
    features=UNMEASURED,
)
