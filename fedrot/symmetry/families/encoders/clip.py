"""CLIP: two pre-norm towers, a causal one for text and one for images, with BERT's groups.

Each tower has a residual stream of its own. Left unused: the rest of ``GL(d_h)``, the key- and
redundant biases of values, redundant parameters of pre-norm streams as in GPT-2 (the norm that begins
the image's holds it,
but for one direction), and one rotation of the space in which texts and images meet: similarities do not
change under it, but the embeddings that the model returns would.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import Axes, embedding, linear, merged, norm

_TEXT, _IMAGE = "text", "image"


def _layers(config: Config, p: str, space: str, first: int) -> Block:
    heads = config["num_attention_heads"]
    dim = config["hidden_size"] // heads

    def layer(i: int) -> Block:
        q = f"{p}encoder.layers.{i}."
        return together(
            norm(f"{q}layer_norm1", space),
            attention(
                q,
                first + i,
                Heads(heads, dim),
                query=Units(f"{q}self_attn.q_proj"),
                key=Units(f"{q}self_attn.k_proj"),
                value=Units(f"{q}self_attn.v_proj"),
                output=Units(f"{q}self_attn.out_proj"),
                space=space,
            ),
            norm(f"{q}layer_norm2", space),
            feed_forward(
                q,
                first + i,
                config["intermediate_size"],
                up=Units(f"{q}mlp.fc1"),
                down=Units(f"{q}mlp.fc2"),
                space=space,
            ),
        )

    return together(*(layer(i) for i in range(config["num_hidden_layers"])))


def _text(config: Config, names: Names, p: str = "", first: int = 0) -> Block:
    return together(
        embedding(f"{p}embeddings.token_embedding", _TEXT),
        embedding(f"{p}embeddings.position_embedding", _TEXT),
        _layers(config, p, _TEXT, first),
        norm(f"{p}final_layer_norm", _TEXT),
    )


def _image(config: Config, names: Names, p: str = "", first: int = 0) -> Block:
    return together(
        {
            f"{p}embeddings.class_embedding": (_IMAGE,),
            f"{p}embeddings.patch_embedding.weight": (_IMAGE, None, None, None),
        },
        embedding(f"{p}embeddings.position_embedding", _IMAGE),
        norm(f"{p}pre_layrnorm", _IMAGE),
        _layers(config, p, _IMAGE, first),
        norm(f"{p}post_layernorm", _IMAGE),
    )


def _both(config: Config, names: Names) -> Block:
    text, image = config["text_config"], config["vision_config"]
    if not any(name.startswith("text_model.") for name in names):
        return _image(image, names, "vision_model.")
    return together(
        _text(text, names, "text_model."),
        _image(image, names, "vision_model.", text["num_hidden_layers"]),
    )


def _heads(config: Config, names: Names, at: Mapping[str, str]) -> Axes:
    ids = {f"{p}embeddings.position_ids": (None, None) for p in at.values()}
    return merged(
        linear("text_projection", None, _TEXT) if _TEXT in at else {},
        linear("visual_projection", None, _IMAGE) if _IMAGE in at else {},
        linear("classifier", None, _IMAGE) if _IMAGE in at else {},
        {"logit_scale": ()},
        ids,
    )


FAMILY = Family(
    name="clip",
    model_types=("clip",),
    stacks=("text_model.encoder.layers", "vision_model.encoder.layers"),
    body=_both,
    heads=partial(_heads, at={_TEXT: "text_model.", _IMAGE: "vision_model."}),
    encoder=("text_model", "vision_model"),
)

TEXT_FAMILY = Family(
    name="clip-text",
    model_types=("clip_text_model",),
    stacks=("encoder.layers",),
    body=_text,
    heads=partial(_heads, at={_TEXT: ""}),
    encoder=("embeddings", "encoder", "final_layer_norm"),
)

IMAGE_FAMILY = Family(
    name="clip-image",
    model_types=("clip_vision_model",),
    stacks=("encoder.layers",),
    body=_image,
    heads=partial(_heads, at={_IMAGE: ""}),
    encoder=("embeddings", "pre_layrnorm", "encoder", "post_layernorm"),
)
