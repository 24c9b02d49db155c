"""BART and T5 (1.0, 1.1, Flan-T5, mT5): encoders with decoders.

Encoder and decoder share the embeddings' table and so one residual stream. The self attention of all
layers of a T5 stack adds one relative-position bias; cross attention has none. T5 1.1's feed-forward is
gated.
"""

from __future__ import annotations

from functools import partial

from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.family import Config, Family, Item, Names, Stack, When
from fedrot.symmetry.layers import Block, Heads, Projections, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, Space, embedding, norm
from fedrot.symmetry.task_heads import PLAIN, two_layers

_TWO_LAYERS = two_layers("classification_head", "classifier")


def _bart_layer(config: Config, names: Names, p: str, side: str) -> tuple[Block, Block, Block]:
    heads = Heads.of(config, f"{side}_attention_heads", "d_model")
    modules = ("q_proj", "k_proj", "v_proj", "out_proj")
    attentions = ("self_attn", "encoder_attn") if side == "decoder" else ("self_attn",)
    attended = [
        together(
            attention(f"{p}{name}.", heads, Projections.separate(f"{p}{name}.", modules)),
            norm(f"{p}{name}_layer_norm"),
        )
        for name in attentions
    ]
    return (
        together(*attended),
        feed_forward(p, config[f"{side}_ffn_dim"], Units(f"{p}fc1"), Units(f"{p}fc2")),
        together(norm(f"{p}final_layer_norm")),
    )


def _bart_side(side: str) -> tuple[Item, ...]:
    return (
        embedding(f"{side}.embed_tokens"),
        embedding(f"{side}.embed_positions"),
        norm(f"{side}.layernorm_embedding"),
        Stack(f"{side}.layers", f"{side}_layers", partial(_bart_layer, side=side)),
    )


BART = Family(
    name="bart",
    model_types=("bart",),
    body=(embedding("shared"), *_bart_side("encoder"), *_bart_side("decoder")),
    task_heads=(PLAIN, {"final_logits_bias": (None, None)}, _TWO_LAYERS),
    spaces={"classifier": Space(SignedPermutation)},
)


def _t5_attention(config: Config, module: str, order: str = "") -> Block:
    heads = Heads(config["num_heads"], config["d_kv"])
    projections = Projections.separate(f"{module}.", "qkvo", bias=False)
    return attention(f"{module}.", heads, projections, order=order)


def _t5_feed_forward(config: Config, names: Names, p: str) -> Block:
    q = f"{p}DenseReluDense."
    gated = f"{q}wi_0.weight" in names
    up, down, gate = (
        Units(f"{q}{name}", bias=False) for name in ("wi_1" if gated else "wi", "wo", "wi_0")
    )
    return feed_forward(p, config["d_ff"], up, down, gate if gated else None)


def _t5_layer(config: Config, names: Names, p: str) -> tuple[Block, ...]:
    side = p.partition(".")[0]
    cross = side == "decoder"
    return (
        _t5_attention(config, f"{p}layer.0.SelfAttention", f"{side}.heads"),
        *([_t5_attention(config, f"{p}layer.1.EncDecAttention")] if cross else []),
        _t5_feed_forward(config, names, f"{p}layer.{1 + cross}."),
        together(*(norm(f"{p}layer.{i}.layer_norm") for i in range(2 + cross))),
    )


def _t5_side(side: str, *count: str) -> tuple[Axes | Stack, ...]:
    p = f"{side}.block"
    bias = f"{p}.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return (
        embedding(f"{side}.embed_tokens"),
        Stack(p, count, _t5_layer, order=f"{side}.heads", head_bias=bias),
        norm(f"{side}.final_layer_norm"),
    )


T5 = Family(
    name="t5",
    model_types=("t5", "mt5"),
    body=(
        embedding("shared"),
        *_t5_side("encoder", "num_layers"),
        When(
            lambda config, names: config.get("is_encoder_decoder", True),
            _t5_side("decoder", "num_decoder_layers", "num_layers"),
        ),
    ),
    task_heads=(PLAIN, _TWO_LAYERS),
    spaces={RESIDUAL: Space(SignedPermutation), "classifier": Space(SignedPermutation)},
)
