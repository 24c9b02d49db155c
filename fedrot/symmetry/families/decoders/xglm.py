"""XGLM: fixed sinusoidal positions, so the residual stream cannot be moved."""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_normed,
    together,
)
from fedrot.symmetry.describe.projections import Q_K_V_OUT, Heads, Projections
from fedrot.symmetry.describe.spaces import embedding
from fedrot.symmetry.describe.task_heads import UNMEASURED

#: Why the residual stream is not moved.
_FIXED = (
    "the model adds sinusoidal positions to it, which are not in the state dict and "
    "cannot be moved."
)


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = Heads.of(config, "attention_heads", "d_model")
    projections = Projections.separate(f"{p}self_attn.", Q_K_V_OUT)
    layer = pre_normed(
        p,
        self_attn_layer_norm=attention(p, heads, projections),
        final_layer_norm=feed_forward_of(p, config["ffn_dim"], "fc1 fc2"),
    )
    return together(layer, Block(refused={"residual": _FIXED}))


FAMILY = Family(
    name="xglm",
    model_types=("xglm",),
    stream="fixed: its sinusoidal positions are not in the state dict",
    body=(
        embedding("embed_tokens"),
        Stack("layers", "num_layers", _layer),
        last_norm("layer_norm"),
    ),
    features=UNMEASURED,
)
