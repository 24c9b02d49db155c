"""BERT and the encoders that share its module names: RoBERTa, XLM-R, ELECTRA.

The claimed group of one layer is ``S_H ⋉ (O(d_h) x O(d_h) x R*^2)^H`` on the heads and ``S_{d_ff}``
on the neurons. Left unused on purpose: the rest of ``GL(d_h)`` per head and the key-bias gauge,
because moving along them changes what weight decay and Adam see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedrot.symmetry.blocks import attention, feed_forward
from fedrot.symmetry.description import Group
from fedrot.symmetry.family import Family


def _layer(config: Mapping[str, Any], layer: int) -> tuple[Group, ...]:
    prefix, heads = f"encoder.layer.{layer}.", config["num_attention_heads"]
    return (
        *attention(
            layer,
            prefix,
            query="attention.self.query",
            key="attention.self.key",
            value="attention.self.value",
            output="attention.output.dense",
            heads=heads,
            dim=config["hidden_size"] // heads,
        ),
        *feed_forward(
            layer,
            prefix,
            up="intermediate.dense",
            down="output.dense",
            neurons=config["intermediate_size"],
        ),
    )


FAMILY = Family(
    name="bert",
    model_types=("bert", "roberta", "xlm-roberta", "electra"),
    layers_key="num_hidden_layers",
    stack="encoder.layer",
    describe=_layer,
    unmoved=(
        "attention.output.dense.bias",
        "attention.output.LayerNorm.weight",
        "attention.output.LayerNorm.bias",
        "output.dense.bias",
        "output.LayerNorm.weight",
        "output.LayerNorm.bias",
    ),
)
