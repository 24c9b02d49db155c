"""Phi-3: LLaMA with fused projections; rotary positions may be partial."""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.describe.family import Config, Names, rotary_units
from fedrot.symmetry.describe.layers import Block, attention, feed_forward
from fedrot.symmetry.describe.projections import Projections, Units, units
from fedrot.symmetry.families.decoders.llama import (
    LAST_NORM,
    decoder,
    heads_of,
    two_blocks,
)


def _layer(config: Config, names: Names, p: str) -> Block:
    whole = heads_of(config)
    neurons = config["intermediate_size"]
    heads = replace(whole, rotary=rotary_units(config, whole.dim))
    output, down = units(p, "self_attn.o_proj mlp.down_proj", False)
    projections = Projections.fused(f"{p}self_attn.qkv_proj", heads, output, bias=False)
    gate, up = (Units(f"{p}mlp.gate_up_proj", False, start) for start in (0, neurons))
    feeding = feed_forward(p, neurons, up, down, gate)
    return two_blocks(p, attention(p, heads, projections), feeding)


FAMILY = decoder("phi3", ("phi3",), _layer, LAST_NORM)
