"""Phi-3: LLaMA with fused projections, and rotary positions on a part of each head if
so configured.
"""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.describe.family import Config, Names, rotary_units
from fedrot.symmetry.describe.layers import Block, attention, feed_forward
from fedrot.symmetry.describe.projections import Projections, Units
from fedrot.symmetry.families.decoders.llama import decoder, heads_of, pre_normed


def _layer(config: Config, names: Names, p: str) -> Block:
    whole, neurons = heads_of(config), config["intermediate_size"]
    heads = replace(whole, rotary=rotary_units(config, whole.dim))
    output, down = (
        Units(f"{p}self_attn.o_proj", False),
        Units(f"{p}mlp.down_proj", False),
    )
    gate, up = (Units(f"{p}mlp.gate_up_proj", False, start) for start in (0, neurons))
    return pre_normed(
        p,
        attention(
            p,
            heads,
            Projections.fused(f"{p}self_attn.qkv_proj", heads, output, bias=False),
        ),
        feed_forward(p, neurons, up, down, gate),
    )


FAMILY = decoder("phi3", ("phi3",), _layer)
