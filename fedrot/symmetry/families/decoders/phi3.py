"""Phi-3: LLaMA's groups in fused projections, rotary positions on a part of each head if so configured.

Left unused as in LLaMA; ``GL`` of what is not turned, besides.
"""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.families.decoders.llama import ENCODER, NORMS, decoder, heads, heads_of, spaces
from fedrot.symmetry.family import Config, Family, Names, rotary_units
from fedrot.symmetry.layers import Block, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import norm


def _layer(config: Config, layer: int) -> Block:
    p, whole, neurons = f"layers.{layer}.", heads_of(config), config["intermediate_size"]
    shape = replace(whole, rotary=rotary_units(config, whole.dim))
    queries = shape.count * shape.dim
    query, key, value = (
        Units(f"{p}self_attn.qkv_proj", False, start)
        for start in (0, queries, queries + shape.keys * shape.dim)
    )
    gate, up = (Units(f"{p}mlp.gate_up_proj", False, start) for start in (0, neurons))
    output, down = Units(f"{p}self_attn.o_proj", False), Units(f"{p}mlp.down_proj", False)
    return together(
        attention(p, layer, shape, query, key, value, output),
        feed_forward(p, layer, neurons, up, down, gate),
        *(norm(f"{p}{name}") for name in NORMS),
    )


def _body(config: Config, names: Names) -> Block:
    return decoder(config, names, (_layer(config, i) for i in range(config["num_hidden_layers"])))


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    stacks=("layers",),
    body=_body,
    heads=heads,
    encoder=ENCODER,
    spaces=spaces,
)
