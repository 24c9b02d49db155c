"""DistilBERT: BERT's groups under its own module names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedrot.symmetry.blocks import attention, feed_forward
from fedrot.symmetry.description import Group
from fedrot.symmetry.family import Family


def _layer(config: Mapping[str, Any], layer: int) -> tuple[Group, ...]:
    prefix, heads = f"transformer.layer.{layer}.", config["n_heads"]
    return (
        *attention(
            layer,
            prefix,
            query="attention.q_lin",
            key="attention.k_lin",
            value="attention.v_lin",
            output="attention.out_lin",
            heads=heads,
            dim=config["dim"] // heads,
        ),
        *feed_forward(layer, prefix, up="ffn.lin1", down="ffn.lin2", neurons=config["hidden_dim"]),
    )


FAMILY = Family(
    name="distilbert",
    model_types=("distilbert",),
    layers_key="n_layers",
    stack="transformer.layer",
    describe=_layer,
    unmoved=(
        "attention.out_lin.bias",
        "sa_layer_norm.weight",
        "sa_layer_norm.bias",
        "ffn.lin2.bias",
        "output_layer_norm.weight",
        "output_layer_norm.bias",
    ),
)
