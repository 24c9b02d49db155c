"""Phi-3: LLaMA with fused projections, and rotary positions on a part of each head if so configured."""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.families.decoders.llama import NORMS, decoder, heads_of
from fedrot.symmetry.family import Config, Names, rotary_units
from fedrot.symmetry.layers import Block, Projections, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import norm


def _layer(config: Config, names: Names, p: str) -> Block:
    whole, neurons = heads_of(config), config["intermediate_size"]
    heads = replace(whole, rotary=rotary_units(config, whole.dim))
    output, down = Units(f"{p}self_attn.o_proj", False), Units(f"{p}mlp.down_proj", False)
    gate, up = (Units(f"{p}mlp.gate_up_proj", False, start) for start in (0, neurons))
    return together(
        attention(p, heads, Projections.fused(f"{p}self_attn.qkv_proj", heads, output, bias=False)),
        feed_forward(p, neurons, up, down, gate),
        *(norm(f"{p}{name}") for name in NORMS),
    )


FAMILY = decoder("phi3", ("phi3",), _layer)
