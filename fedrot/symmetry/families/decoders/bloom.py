"""BLOOM: ALiBi, query, key and value in one module, and a norm of the embeddings."""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.describe.family import NORM_IN_FRONT, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_normed,
)
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import embedding, norm
from fedrot.symmetry.describe.task_heads import UNMEASURED


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = replace(Heads.of(config, "n_head"), ordered=True)
    projections = Projections.query_key_value(f"{p}self_attention.", heads)
    modules = "mlp.dense_h_to_4h mlp.dense_4h_to_h"
    return pre_normed(
        p,
        input_layernorm=attention(p, heads, projections),
        post_attention_layernorm=feed_forward_of(p, 4 * config["hidden_size"], modules),
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
    features=UNMEASURED,
)
