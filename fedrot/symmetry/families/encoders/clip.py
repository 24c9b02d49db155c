"""CLIP: two pre-norm towers, for texts and images, each with its residual stream."""

from __future__ import annotations

from functools import partial

from fedrot.symmetry.describe.family import (
    NORM_IN_FRONT,
    ROTATED,
    Config,
    Family,
    Names,
    Pieces,
    Stack,
    When,
)
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_normed,
)
from fedrot.symmetry.describe.projections import Q_K_V_OUT, Heads, Projections
from fedrot.symmetry.describe.spaces import embedding, linear, norm
from fedrot.symmetry.describe.task_heads import Unbounded, read_out

_TEXT = "text"
_IMAGE = "image"


def _layer(config: Config, names: Names, p: str, space: str) -> Block:
    projections = Projections.separate(f"{p}self_attn.", Q_K_V_OUT)
    neurons = config["intermediate_size"]
    return pre_normed(
        p,
        space,
        layer_norm1=attention(p, Heads.of(config), projections, space=space),
        layer_norm2=feed_forward_of(p, neurons, "mlp.fc1 mlp.fc2", space=space),
    )


def _stack(p: str, section: str, space: str) -> Stack:
    return Stack(
        f"{p}encoder.layers", "num_hidden_layers", partial(_layer, space=space), section
    )


def _text(p: str = "", section: str = "") -> Pieces:
    return (
        embedding(f"{p}embeddings.token_embedding", _TEXT),
        embedding(f"{p}embeddings.position_embedding", _TEXT),
        _stack(p, section, _TEXT),
        last_norm(f"{p}final_layer_norm", _TEXT),
    )


def _image(p: str = "", section: str = "") -> Pieces:
    return (
        {
            f"{p}embeddings.class_embedding": (_IMAGE,),
            f"{p}embeddings.patch_embedding.weight": (_IMAGE, None, None, None),
        },
        embedding(f"{p}embeddings.position_embedding", _IMAGE),
        norm(f"{p}pre_layrnorm", _IMAGE),
        _stack(p, section, _IMAGE),
        last_norm(f"{p}post_layernorm", _IMAGE),
    )


def _has_text(config: Config, names: Names) -> bool:
    return any(name.startswith("text_model.") for name in names)


_TEXT_HEADS = linear("text_projection", None, _TEXT)
_IMAGE_HEADS = read_out(_IMAGE, "visual_projection classifier")
_IMAGE_FEATURES = Unbounded("the classifier of images reads the stream without a norm")

FAMILY = Family(
    name="clip",
    model_types=("clip",),
    body=(
        When(_has_text, _text("text_model.", "text_config")),
        *_image("vision_model.", "vision_config"),
    ),
    task_heads=(_TEXT_HEADS, _IMAGE_HEADS, {"logit_scale": ()}),
    stream=f"text {ROTATED}, image {NORM_IN_FRONT}",
    features=_IMAGE_FEATURES,
)

TEXT_FAMILY = Family(
    name="clip-text",
    model_types=("clip_text_model",),
    body=_text(),
    task_heads=(read_out(_TEXT, "text_projection classifier"),),
    features=Unbounded("texts have no classifier"),
)

IMAGE_FAMILY = Family(
    name="clip-image",
    model_types=("clip_vision_model",),
    body=_image(),
    task_heads=(_IMAGE_HEADS,),
    stream=NORM_IN_FRONT,
    features=_IMAGE_FEATURES,
)
