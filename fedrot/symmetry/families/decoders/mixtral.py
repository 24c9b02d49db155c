"""Mixtral: LLaMA with a mixture of experts, which are permuted together with the
router's rows.

Before version 5, transformers stored each expert as three modules. Such experts are not
permuted.
"""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Names
from fedrot.symmetry.describe.layers import Block, attention, feed_forward, together
from fedrot.symmetry.describe.mixture import mixture
from fedrot.symmetry.describe.projections import Units
from fedrot.symmetry.describe.spaces import RESIDUAL, read
from fedrot.symmetry.families.decoders.llama import (
    decoder,
    heads_of,
    pre_normed,
    projections,
)


def _experts(config: Config, names: Names, p: str) -> Block:
    count, neurons = config["num_local_experts"], config["intermediate_size"]
    old = f"{p}block_sparse_moe."
    if f"{old}gate.weight" not in names:
        tensors = (
            f"{p}mlp.{n}"
            for n in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
        )
        return mixture(p, count, neurons, *tensors)
    found = []
    for i in range(count):
        up, down, gate = (Units(f"{old}experts.{i}.w{n}", False) for n in (3, 2, 1))
        found.append(feed_forward(f"{p}{i}.", neurons, up, down, gate))
    return together({f"{old}gate.weight": (None, read(RESIDUAL))}, *found)


def _layer(config: Config, names: Names, p: str) -> Block:
    attending = attention(p, heads_of(config), projections(p, False, False))
    return pre_normed(p, attending, _experts(config, names, p))


FAMILY = decoder("mixtral", ("mixtral",), _layer)
