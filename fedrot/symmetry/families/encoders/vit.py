"""ViT and DeiT: pre-norm encoders of image patches."""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Family, Names, Stack, When
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_normed,
)
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import RESIDUAL, linear
from fedrot.symmetry.describe.task_heads import UNMEASURED, AfterNorm, read_out

_TOKEN = (None, None, RESIDUAL)
_PATCHES = "embeddings.patch_embeddings.projection"


def _layer(config: Config, names: Names, p: str) -> Block:
    bias = config.get("qkv_bias", True)
    projections = Projections.separate(
        f"{p}attention.", "q_proj k_proj v_proj o_proj", bias, output_bias=True
    )
    neurons = config["intermediate_size"]
    return pre_normed(
        p,
        layernorm_before=attention(p, Heads.of(config), projections),
        layernorm_after=feed_forward_of(p, neurons, "mlp.fc1 mlp.fc2"),
    )


FAMILY = Family(
    name="vit",
    model_types=("vit", "deit"),
    body=(
        {"embeddings.cls_token": _TOKEN, "embeddings.position_embeddings": _TOKEN},
        When(
            lambda config, names: config["model_type"] == "deit",
            ({"embeddings.distillation_token": _TOKEN},),
        ),
        {
            f"{_PATCHES}.weight": (RESIDUAL, None, None, None),
            f"{_PATCHES}.bias": (RESIDUAL,),
        },
        Stack("layers", "num_hidden_layers", _layer),
        last_norm("layernorm"),
    ),
    task_heads=(
        linear("pooler.dense", "pooler", RESIDUAL),
        read_out(modules="classifier cls_classifier distillation_classifier"),
        {"embeddings.mask_token": _TOKEN},
    ),
    inside=("pooler",),
    features={"vit": AfterNorm("vit.layernorm"), "deit": UNMEASURED},
)
