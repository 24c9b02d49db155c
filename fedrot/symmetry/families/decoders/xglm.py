"""XGLM: a pre-norm decoder with fixed sinusoidal positions, so the residual stream
cannot be moved.
"""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward,
    last_norm,
    pre_norm,
    together,
)
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from fedrot.symmetry.describe.spaces import embedding

#: Why the residual stream is not moved.
_FIXED = (
    "the model adds sinusoidal positions to it, which are not in the state dict and "
    "cannot be moved."
)


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = Heads.of(config, "attention_heads", "d_model")
    modules = ("q_proj", "k_proj", "v_proj", "out_proj")
    return together(
        pre_norm(
            f"{p}self_attn_layer_norm",
            attention(p, heads, Projections.separate(f"{p}self_attn.", modules)),
        ),
        pre_norm(
            f"{p}final_layer_norm",
            feed_forward(p, config["ffn_dim"], Units(f"{p}fc1"), Units(f"{p}fc2")),
        ),
        Block(refused={"residual": _FIXED}),
    )


FAMILY = Family(
    name="xglm",
    model_types=("xglm",),
    stream="fixed: its sinusoidal positions are not in the state dict",
    body=(
        embedding("embed_tokens"),
        Stack("layers", "num_layers", _layer),
        last_norm("layer_norm"),
    ),
)
