"""T5 1.0, T5 1.1, Flan-T5 and mT5: encoder, decoder, cross attention, no biases,
RMSNorm.

Encoder and decoder share the embeddings' table, and therefore one residual stream. All
self attentions of a stack share one relative-position bias; cross attention has none.
T5 1.1's feed-forward is gated.
"""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Family, Names, Pieces, Stack, When
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_norm,
    together,
)
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import RESIDUAL, Space, embedding
from fedrot.symmetry.describe.task_heads import (
    PLAIN,
    UNMEASURED,
    AfterTanh,
    two_layers,
)
from fedrot.symmetry.signs import SignedPermutation


def _attention(config: Config, module: str, order: str = "") -> Block:
    heads = Heads(config["num_heads"], config["d_kv"])
    projections = Projections.separate(f"{module}.", "q k v o", bias=False)
    return attention(f"{module}.", heads, projections, order=order)


def _cross_attention(config: Config, p: str) -> Block:
    module = f"{p}EncDecAttention"
    memory = tuple(f"{module}.{name}.weight" for name in "kv")
    return together(
        pre_norm(f"{p}layer_norm", _attention(config, module), memory=memory),
        Block(norms={"encoder.final_layer_norm": memory}),
    )


def _feed_forward(config: Config, names: Names, p: str) -> Block:
    modules = "DenseReluDense.wi DenseReluDense.wo"
    if f"{p}DenseReluDense.wi_0.weight" in names:
        modules = "DenseReluDense.wi_1 DenseReluDense.wo DenseReluDense.wi_0"
    return feed_forward_of(p, config["d_ff"], modules, bias=False)


def _layer(config: Config, names: Names, p: str) -> tuple[Block, ...]:
    side = p.partition(".")[0]
    cross = side == "decoder"
    last = f"{p}layer.{1 + cross}."
    return (
        pre_norm(
            f"{p}layer.0.layer_norm",
            _attention(config, f"{p}layer.0.SelfAttention", f"{side}.heads"),
        ),
        *([_cross_attention(config, f"{p}layer.1.")] if cross else []),
        pre_norm(f"{last}layer_norm", _feed_forward(config, names, last)),
    )


def _side(side: str, *count: str) -> Pieces:
    p = f"{side}.block"
    bias = f"{p}.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return (
        embedding(f"{side}.embed_tokens"),
        Stack(p, count, _layer, order=f"{side}.heads", head_bias=bias),
        last_norm(f"{side}.final_layer_norm"),
    )


FAMILY = Family(
    name="t5",
    model_types=("t5", "mt5"),
    body=(
        embedding("shared"),
        *_side("encoder", "num_layers"),
        When(
            lambda config, names: config.get("is_encoder_decoder", True),
            _side("decoder", "num_decoder_layers", "num_layers"),
        ),
    ),
    task_heads=(PLAIN, two_layers("classification_head", "classifier")),
    spaces={RESIDUAL: Space(SignedPermutation), "classifier": Space(SignedPermutation)},
    features={"t5": AfterTanh("classification_head.dense"), "mt5": UNMEASURED},
)
