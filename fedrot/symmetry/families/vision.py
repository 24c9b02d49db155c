"""ViT and DeiT, pre-norm encoders of image patches; CLIP, two towers, each with its own stream."""

from __future__ import annotations

from functools import partial

from fedrot.symmetry.family import Config, Family, Names, Stack, When
from fedrot.symmetry.layers import Block, Heads, Projections, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, norm
from fedrot.symmetry.task_heads import read_out

_TOKEN = (None, None, RESIDUAL)
_PATCHES = "embeddings.patch_embeddings.projection"


def _vit_layer(config: Config, names: Names, p: str) -> Block:
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    bias = config.get("qkv_bias", True)
    projections = Projections.separate(f"{p}attention.", modules, bias, output_bias=True)
    up, down = Units(f"{p}mlp.fc1"), Units(f"{p}mlp.fc2")
    return together(
        norm(f"{p}layernorm_before"),
        attention(p, Heads.of(config), projections),
        norm(f"{p}layernorm_after"),
        feed_forward(p, config["intermediate_size"], up, down),
    )


VIT = Family(
    name="vit",
    model_types=("vit", "deit"),
    body=(
        {"embeddings.cls_token": _TOKEN, "embeddings.position_embeddings": _TOKEN},
        When(
            lambda config, names: config["model_type"] == "deit",
            ({"embeddings.distillation_token": _TOKEN},),
        ),
        {f"{_PATCHES}.weight": (RESIDUAL, None, None, None), f"{_PATCHES}.bias": (RESIDUAL,)},
        Stack("layers", "num_hidden_layers", _vit_layer),
        norm("layernorm"),
    ),
    task_heads=(
        linear("pooler.dense", "pooler", RESIDUAL),
        read_out(modules="classifier cls_classifier distillation_classifier"),
        {"embeddings.mask_token": _TOKEN},
    ),
    inside=("pooler",),
)

_TEXT, _IMAGE = "text", "image"


def _clip_layer(config: Config, names: Names, p: str, space: str) -> Block:
    projections = Projections.separate(f"{p}self_attn.", ("q_proj", "k_proj", "v_proj", "out_proj"))
    up, down = Units(f"{p}mlp.fc1"), Units(f"{p}mlp.fc2")
    return together(
        norm(f"{p}layer_norm1", space),
        attention(p, Heads.of(config), projections, space=space),
        norm(f"{p}layer_norm2", space),
        feed_forward(p, config["intermediate_size"], up, down, space=space),
    )


def _clip_stack(p: str, section: str, space: str) -> Stack:
    return Stack(f"{p}encoder.layers", "num_hidden_layers", partial(_clip_layer, space=space), section)


def _clip_text(p: str = "", section: str = "") -> tuple[Axes | Stack, ...]:
    return (
        embedding(f"{p}embeddings.token_embedding", _TEXT),
        embedding(f"{p}embeddings.position_embedding", _TEXT),
        _clip_stack(p, section, _TEXT),
        norm(f"{p}final_layer_norm", _TEXT),
    )


def _clip_image(p: str = "", section: str = "") -> tuple[Axes | Stack, ...]:
    return (
        {
            f"{p}embeddings.class_embedding": (_IMAGE,),
            f"{p}embeddings.patch_embedding.weight": (_IMAGE, None, None, None),
        },
        embedding(f"{p}embeddings.position_embedding", _IMAGE),
        norm(f"{p}pre_layrnorm", _IMAGE),
        _clip_stack(p, section, _IMAGE),
        norm(f"{p}post_layernorm", _IMAGE),
    )


def _clip_has_text(config: Config, names: Names) -> bool:
    return any(name.startswith("text_model.") for name in names)


_TEXT_HEADS: Axes = linear("text_projection", None, _TEXT)
_IMAGE_HEADS = read_out(_IMAGE, "visual_projection classifier")

CLIP = Family(
    name="clip",
    model_types=("clip",),
    body=(
        When(_clip_has_text, _clip_text("text_model.", "text_config")),
        *_clip_image("vision_model.", "vision_config"),
    ),
    task_heads=(_TEXT_HEADS, _IMAGE_HEADS, {"logit_scale": ()}),
)

CLIP_TEXT = Family("clip-text", ("clip_text_model",), _clip_text(), task_heads=(_TEXT_HEADS,))

CLIP_IMAGE = Family("clip-image", ("clip_vision_model",), _clip_image(), task_heads=(_IMAGE_HEADS,))
