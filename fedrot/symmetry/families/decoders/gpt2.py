"""GPT-2: projections are ``Conv1D`` modules; one holds query, key and value."""

from __future__ import annotations

from fedrot.symmetry.describe.family import BUFFERS, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward,
    last_norm,
    pre_normed,
)
from fedrot.symmetry.describe.projections import Heads, Projections, units
from fedrot.symmetry.describe.spaces import embedding
from fedrot.symmetry.describe.task_heads import PLAIN, AfterNorm, read_out


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = Heads.of(config, "n_head", "n_embd")
    output, up, down = units(p, "attn.c_proj mlp.c_fc mlp.c_proj", conv1d=True)
    projections = Projections.fused(f"{p}attn.c_attn", heads, output)
    neurons = config.get("n_inner") or 4 * config["n_embd"]
    return pre_normed(
        p,
        ln_1=attention(p, heads, projections),
        ln_2=feed_forward(p, neurons, up, down),
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
    hidden=AfterNorm("ln_f"),
    features=AfterNorm("transformer.ln_f"),
)
