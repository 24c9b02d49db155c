"""BART: post-norm encoder and decoder, with one table of embeddings and one residual
stream.
"""

from __future__ import annotations

from functools import partial

from fedrot.symmetry.describe.family import (
    POST_NORM,
    Config,
    Family,
    Item,
    Names,
    Stack,
)
from fedrot.symmetry.describe.layers import Block, attention, feed_forward, together
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from fedrot.symmetry.describe.spaces import Space, embedding, norm
from fedrot.symmetry.describe.task_heads import PLAIN, two_layers
from fedrot.symmetry.signs import SignedPermutation


def _layer(
    config: Config, names: Names, p: str, side: str
) -> tuple[Block, Block, Block]:
    heads = Heads.of(config, f"{side}_attention_heads", "d_model")
    modules = ("q_proj", "k_proj", "v_proj", "out_proj")
    attentions = ("self_attn", "encoder_attn") if side == "decoder" else ("self_attn",)
    attended = [
        together(
            attention(
                f"{p}{name}.", heads, Projections.separate(f"{p}{name}.", modules)
            ),
            norm(f"{p}{name}_layer_norm"),
        )
        for name in attentions
    ]
    return (
        together(*attended),
        feed_forward(p, config[f"{side}_ffn_dim"], Units(f"{p}fc1"), Units(f"{p}fc2")),
        together(norm(f"{p}final_layer_norm")),
    )


def _side(side: str) -> tuple[Item, ...]:
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
)
