"""BLOOM: ALiBi, one module for query, key and value head by head, and a norm of the
embeddings.
"""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.describe.family import NORM_IN_FRONT, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward,
    last_norm,
    pre_norm,
    together,
)
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from fedrot.symmetry.describe.spaces import embedding, norm


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = replace(Heads.of(config, "n_head"), ordered=True)
    fused, output = (
        f"{p}self_attention.query_key_value",
        Units(f"{p}self_attention.dense"),
    )
    up, down = Units(f"{p}mlp.dense_h_to_4h"), Units(f"{p}mlp.dense_4h_to_h")
    return together(
        pre_norm(
            f"{p}input_layernorm",
            attention(p, heads, Projections.fused(fused, heads, output, by_head=True)),
        ),
        pre_norm(
            f"{p}post_attention_layernorm",
            feed_forward(p, 4 * config["hidden_size"], up, down),
        ),
    )


FAMILY = Family(
    name="bloom",
    model_types=("bloom",),
    stream=NORM_IN_FRONT,
    body=(
        embedding("word_embeddings"),
        norm("word_embeddings_layernorm"),
        Stack("h", "n_layer", _layer),
        last_norm("ln_f"),
    ),
)
