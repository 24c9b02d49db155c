"""GPT-NeoX and Pythia: query, key and value in one module; partial rotary positions."""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.describe.family import (
    BUFFERS,
    Config,
    Family,
    Names,
    Stack,
    rotary_units,
)
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_normed,
)
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import embedding
from fedrot.symmetry.describe.task_heads import PLAIN, UNMEASURED, read_out


def _layer(config: Config, names: Names, p: str) -> Block:
    whole = Heads.of(config)
    bias = config.get("attention_bias", True)
    heads = replace(whole, rotary=rotary_units(config, whole.dim, default=0.25))
    projections = Projections.query_key_value(f"{p}attention.", heads, bias)
    feeding = feed_forward_of(
        p, config["intermediate_size"], "mlp.dense_h_to_4h mlp.dense_4h_to_h"
    )
    return pre_normed(
        p,
        input_layernorm=attention(p, heads, projections),
        post_attention_layernorm=feeding,
    )


FAMILY = Family(
    name="gpt-neox",
    model_types=("gpt_neox",),
    body=(
        embedding("embed_in"),
        Stack("layers", "num_hidden_layers", _layer),
        last_norm("final_layer_norm"),
    ),
    task_heads=(PLAIN, read_out(modules="embed_out")),
    buffers={**BUFFERS, "attention.bias": 4, "attention.masked_bias": 0},
    features=UNMEASURED,
)
