"""GPT-J: rotary positions rotate adjacent units; both blocks read one norm."""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.describe.family import BUFFERS, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_norm,
)
from fedrot.symmetry.describe.projections import Q_K_V_OUT, Heads, Projections
from fedrot.symmetry.describe.spaces import embedding
from fedrot.symmetry.describe.task_heads import UNMEASURED


def _layer(config: Config, names: Names, p: str) -> Block:
    whole = Heads.of(config, "n_head", "n_embd")
    rotary = config.get("rotary_dim") or whole.dim
    heads = replace(whole, rotary=rotary, interleaved=True)
    projections = Projections.separate(f"{p}attn.", Q_K_V_OUT, bias=False)
    neurons = config.get("n_inner") or 4 * config["n_embd"]
    return pre_norm(
        f"{p}ln_1",
        attention(p, heads, projections),
        feed_forward_of(p, neurons, "mlp.fc_in mlp.fc_out"),
    )


FAMILY = Family(
    name="gptj",
    model_types=("gptj",),
    body=(embedding("wte"), Stack("h", "n_layer", _layer), last_norm("ln_f")),
    buffers={**BUFFERS, "attn.bias": 4, "attn.masked_bias": 0},
    features=UNMEASURED,
)
