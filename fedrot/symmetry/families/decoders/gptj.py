"""GPT-J: rotary positions that rotate adjacent units; attention and feed-forward read
one norm.
"""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.describe.family import BUFFERS, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward,
    last_norm,
    pre_norm,
)
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from fedrot.symmetry.describe.spaces import embedding


def _layer(config: Config, names: Names, p: str) -> Block:
    whole, modules = (
        Heads.of(config, "n_head", "n_embd"),
        ("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    heads = replace(
        whole, rotary=config.get("rotary_dim") or whole.dim, interleaved=True
    )
    neurons = config.get("n_inner") or 4 * config["n_embd"]
    return pre_norm(
        f"{p}ln_1",
        attention(p, heads, Projections.separate(f"{p}attn.", modules, bias=False)),
        feed_forward(p, neurons, Units(f"{p}mlp.fc_in"), Units(f"{p}mlp.fc_out")),
    )


FAMILY = Family(
    name="gptj",
    model_types=("gptj",),
    body=(embedding("wte"), Stack("h", "n_layer", _layer), last_norm("ln_f")),
    buffers={**BUFFERS, "attn.bias": 4, "attn.masked_bias": 0},
)
