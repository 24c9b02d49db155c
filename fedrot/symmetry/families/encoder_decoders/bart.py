"""BART: post-norm encoder and decoder with one table of embeddings and one stream."""

from __future__ import annotations

from functools import partial

from fedrot.symmetry.describe.family import (
    POST_NORM,
    Config,
    Family,
    Names,
    Pieces,
    Stack,
)
from fedrot.symmetry.describe.layers import Block, attention, feed_forward_of, together
from fedrot.symmetry.describe.projections import Q_K_V_OUT, Heads, Projections
from fedrot.symmetry.describe.spaces import Axes, Space, embedding, norm
from fedrot.symmetry.describe.task_heads import PLAIN, AfterTanh, two_layers
from fedrot.symmetry.signs import SignedPermutation


def _layer(
    config: Config, names: Names, p: str, side: str
) -> tuple[Block, Block, Block]:
    heads = Heads.of(config, f"{side}_attention_heads", "d_model")
    attentions = ("self_attn", "encoder_attn") if side == "decoder" else ("self_attn",)
    attended: list[Block | Axes] = []
    for name in attentions:
        projections = Projections.separate(f"{p}{name}.", Q_K_V_OUT)
        attended.append(attention(f"{p}{name}.", heads, projections))
        attended.append(norm(f"{p}{name}_layer_norm"))
    return (
        together(*attended),
        feed_forward_of(p, config[f"{side}_ffn_dim"], "fc1 fc2"),
        together(norm(f"{p}final_layer_norm")),
    )


def _side(side: str) -> Pieces:
    return (
        embedding(f"{side}.embed_tokens"),
        embedding(f"{side}.embed_positions"),
        norm(f"{side}.layernorm_embedding"),
        Stack(f"{side}.layers", f"{side}_layers", partial(_layer, side=side)),
    )


FAMILY = Family(
    name="bart",
    model_types=("bart",),
    stream=POST_NORM,
    body=(embedding("shared"), *_side("encoder"), *_side("decoder")),
    task_heads=(
        PLAIN,
        {"final_logits_bias": (None, None)},
        two_layers("classification_head", "classifier"),
    ),
    spaces={"classifier": Space(SignedPermutation)},
    features=AfterTanh("classification_head.dense"),
)
