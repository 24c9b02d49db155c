"""GPT-2: a pre-norm decoder whose projections are ``Conv1D``; one holds query, key and
value.
"""

from __future__ import annotations

from fedrot.symmetry.describe.family import BUFFERS, Config, Family, Names, Stack
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
from fedrot.symmetry.describe.task_heads import PLAIN, read_out


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = Heads.of(config, "n_head", "n_embd")
    output, up, down = (
        Units(f"{p}{n}", conv1d=True) for n in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    )
    return together(
        pre_norm(
            f"{p}ln_1",
            attention(p, heads, Projections.fused(f"{p}attn.c_attn", heads, output)),
        ),
        pre_norm(
            f"{p}ln_2",
            feed_forward(p, config.get("n_inner") or 4 * config["n_embd"], up, down),
        ),
    )


FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    body=(
        embedding("wte"),
        embedding("wpe"),
        Stack("h", "n_layer", _layer),
        last_norm("ln_f"),
    ),
    task_heads=(PLAIN, read_out(modules="multiple_choice_head.summary")),
    buffers={**BUFFERS, "attn.bias": 4, "attn.masked_bias": 0},
)
