"""Mixtral: LLaMA with a mixture of experts, permuted together with the router's rows.

Before version 5, transformers stored each expert as three modules. Such experts are not
permuted.
"""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Names
from fedrot.symmetry.describe.layers import Block, attention, feed_forward, together
from fedrot.symmetry.describe.mixture import mixture
from fedrot.symmetry.describe.projections import units
from fedrot.symmetry.describe.spaces import RESIDUAL, read
from fedrot.symmetry.describe.task_heads import UNMEASURED
from fedrot.symmetry.families.decoders.llama import (
    decoder,
    heads_of,
    projections,
    two_blocks,
)


def _experts(config: Config, names: Names, p: str) -> Block:
    count = config["num_local_experts"]
    neurons = config["intermediate_size"]
    old = f"{p}block_sparse_moe."
    if f"{old}gate.weight" not in names:
        gate_up = f"{p}mlp.experts.gate_up_proj"
        down_proj = f"{p}mlp.experts.down_proj"
        return mixture(p, count, neurons, f"{p}mlp.gate.weight", gate_up, down_proj)
    experts = []
    for i in range(count):
        gate, down, up = units(f"{old}experts.{i}.", "w1 w2 w3", False)
        experts.append(feed_forward(f"{p}{i}.", neurons, up, down, gate))
    return together({f"{old}gate.weight": (None, read(RESIDUAL))}, *experts)


def _layer(config: Config, names: Names, p: str) -> Block:
    attending = attention(p, heads_of(config), projections(p, False, False))
    return two_blocks(p, attending, _experts(config, names, p))


FAMILY = decoder("mixtral", ("mixtral",), _layer, UNMEASURED)
