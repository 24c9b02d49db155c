"""LLaMA, Mistral and Qwen2: rotary positions, grouped queries, gated feed-forward,
RMSNorm.

Similar families use the helper functions.
"""

from __future__ import annotations

from fedrot.symmetry.describe.family import ROTATED, Config, Family, Layer, Names, Stack
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_normed,
)
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import RESIDUAL, Space, embedding
from fedrot.symmetry.describe.task_heads import AfterNorm, FeaturesByType
from fedrot.symmetry.signs import SignedPermutation


def heads_of(config: Config, normed: bool = False) -> Heads:
    """Return the heads of a decoder; rotary positions rotate all of their units."""
    count = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // count
    return Heads(count, dim, config.get("num_key_value_heads") or count, dim, normed)


def gated(config: Config, p: str) -> Block:
    """Return a gated feed-forward block of three modules."""
    bias = config.get("mlp_bias", False)
    return feed_forward_of(
        p, config["intermediate_size"], "mlp.up_proj mlp.down_proj mlp.gate_proj", bias
    )


def two_blocks(p: str, attending: Block, feeding: Block) -> Block:
    """Return the layer of these blocks, each with its norm before it."""
    return pre_normed(p, input_layernorm=attending, post_attention_layernorm=feeding)


def projections(p: str, bias: bool, output_bias: bool) -> Projections:
    """Return the projections of four modules."""
    return Projections.separate(
        f"{p}self_attn.", "q_proj k_proj v_proj o_proj", bias, output_bias
    )


#: The norm before a classifier of LLaMA's modules.
LAST_NORM = AfterNorm("model.norm")

#: The norm after the last layer, without the model's prefix.
LAST_HIDDEN = AfterNorm("norm")


def decoder(
    name: str,
    model_types: tuple[str, ...],
    layer: Layer,
    features: FeaturesByType,
    stream: str = ROTATED,
    hidden: FeaturesByType = LAST_HIDDEN,
) -> Family:
    """Return a family with LLaMA's modules around the layers."""
    return Family(
        name,
        model_types,
        body=(
            embedding("embed_tokens"),
            Stack("layers", "num_hidden_layers", layer),
            last_norm("norm"),
        ),
        spaces={RESIDUAL: Space(SignedPermutation)},
        inside=("rotary_emb",),
        stream=stream,
        hidden=hidden,
        features=features,
    )


def _layer(config: Config, names: Names, p: str) -> Block:
    bias = config.get("attention_bias", False)
    qkv_bias = bias or config["model_type"] == "qwen2"
    attending = attention(p, heads_of(config), projections(p, qkv_bias, bias))
    return two_blocks(p, attending, gated(config, p))


FAMILY = decoder("llama", ("llama", "mistral", "qwen2"), _layer, LAST_NORM)
