"""Falcon: 7B (one key head), 40B and 11B (groups of queries with one key and value), RW
(ALiBi).
"""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward,
    last_norm,
    pre_norm,
    together,
)
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from fedrot.symmetry.describe.spaces import embedding


def _heads(config: Config) -> Heads:
    count, alibi = config["num_attention_heads"], config["alibi"]
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
    heads, bias = _heads(config), config["bias"]
    fused, output = (
        f"{p}self_attention.query_key_value",
        Units(f"{p}self_attention.dense", bias),
    )
    up, down = (Units(f"{p}mlp.dense_{name}", bias) for name in ("h_to_4h", "4h_to_h"))
    blocks = [
        attention(
            p, heads, Projections.fused(fused, heads, output, bias, by_head=True)
        ),
        feed_forward(p, config["ffn_hidden_size"], up, down),
    ]
    norms = [f"{p}{name}" for name in _norms(config)]
    if len(norms) == 1:
        return pre_norm(norms[0], *blocks)
    return together(
        *(pre_norm(name, block) for name, block in zip(norms, blocks, strict=True))
    )


FAMILY = Family(
    name="falcon",
    model_types=("falcon",),
    body=(
        embedding("word_embeddings"),
        Stack("h", "num_hidden_layers", _layer),
        last_norm("ln_f"),
    ),
    inside=("rotary_emb",),
)
