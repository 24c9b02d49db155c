"""ViT and DeiT: pre-norm encoders of image patches, with BERT's groups.

Left unused as in BERT: the rest of ``GL(d_h)``, redundant biases of keys and values, and those of
LayerNorm;
redundant parameters of pre-norm streams as in GPT-2.
"""

from __future__ import annotations

from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, linear, merged, norm

_TOKEN = (None, None, RESIDUAL)


def _layer(config: Config, layer: int) -> Block:
    p, heads = f"layers.{layer}.", config["num_attention_heads"]
    bias = config.get("qkv_bias", True)
    return together(
        norm(f"{p}layernorm_before"),
        attention(
            p,
            layer,
            Heads(heads, config["hidden_size"] // heads),
            query=Units(f"{p}attention.q_proj", bias),
            key=Units(f"{p}attention.k_proj", bias),
            value=Units(f"{p}attention.v_proj", bias),
            output=Units(f"{p}attention.o_proj"),
        ),
        norm(f"{p}layernorm_after"),
        feed_forward(
            p, layer, config["intermediate_size"], up=Units(f"{p}mlp.fc1"), down=Units(f"{p}mlp.fc2")
        ),
    )


def _body(config: Config, names: Names) -> Block:
    distilled = {"embeddings.distillation_token": _TOKEN}
    patches = "embeddings.patch_embeddings.projection"
    return together(
        {"embeddings.cls_token": _TOKEN, "embeddings.position_embeddings": _TOKEN},
        distilled if config["model_type"] == "deit" else {},
        {f"{patches}.weight": (RESIDUAL, None, None, None), f"{patches}.bias": (RESIDUAL,)},
        *(_layer(config, layer) for layer in range(config["num_hidden_layers"])),
        norm("layernorm"),
    )


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("pooler.dense", "pooler", RESIDUAL),
        linear("classifier", None, RESIDUAL),
        linear("cls_classifier", None, RESIDUAL),
        linear("distillation_classifier", None, RESIDUAL),
        {"embeddings.mask_token": _TOKEN},
    )


FAMILY = Family(
    name="vit",
    model_types=("vit", "deit"),
    stacks=("layers",),
    body=_body,
    heads=_heads,
    encoder=("embeddings", "layers", "layernorm", "pooler"),
)
