"""Mixtral: LLaMA's attention, and a mixture of experts that change order with the router's rows."""

from __future__ import annotations

from fedrot.symmetry.families.decoders.llama import ENCODER, NORMS, attended, decoder, heads, spaces
from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, mixture, together
from fedrot.symmetry.spaces import norm


def _body(config: Config, names: Names) -> Block:
    def layer(i: int) -> Block:
        p, count, neurons = f"layers.{i}.", config["num_local_experts"], config["intermediate_size"]
        experts = (f"{p}mlp.{n}" for n in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"))
        norms = (norm(f"{p}{name}") for name in NORMS)
        return together(
            attended(config, p, i, False), mixture(p, i, count, neurons, *experts), *norms
        )

    return decoder(config, names, map(layer, range(config["num_hidden_layers"])))


FAMILY = Family("mixtral", ("mixtral",), ("layers",), _body, heads, ENCODER, spaces)
