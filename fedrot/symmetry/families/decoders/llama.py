"""LLaMA, Mistral and Qwen2: rotary phases on queries and keys, grouped queries, SwiGLU, RMSNorm.

``decoder`` serves the families that differ in little. The claimed group of a layer permutes groups of
heads, and the query heads inside each; a key head and its queries keep one phase per frequency, its
values a rotation; the neurons of up and down change order and sign, those of the gate their order; the
residual stream is permuted with signs.

Left unused: a scale per frequency, the rest of ``GL(d_h)`` on values, scales of up and down, gains that
what reads them could hold, and the orthogonal symmetry of a stream whose gains were folded away; the
redundant biases of values where outputs have a bias (Qwen2's have none).
"""

from __future__ import annotations

from collections.abc import Iterable

from fedrot.symmetry.actions import Permutation, SignedPermutation
from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm

NORMS = ("input_layernorm", "post_attention_layernorm")


def heads_of(config: Config, normed: bool = False) -> Heads:
    """Return the heads of a decoder's attention, which rotary positions turn as a whole."""
    count = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // count
    keys = config.get("num_key_value_heads") or count
    return Heads(count, dim, keys, dim, normed)


def gated(config: Config, p: str, layer: int) -> Block:
    """Return a decoder's gated feed-forward block of three modules."""
    bias = config.get("mlp_bias", False)
    gate, up, down = (Units(f"{p}mlp.{name}_proj", bias) for name in ("gate", "up", "down"))
    return feed_forward(p, layer, config["intermediate_size"], up, down, gate)


def decoder(config: Config, names: Names, layers: Iterable[Block]) -> Block:
    """Return embeddings, layers and last norm of a decoder."""
    frequencies = {name: (None,) for name in names if name.endswith("rotary_emb.inv_freq")}
    return together(embedding("embed_tokens"), *layers, norm("norm"), frequencies)


def heads(config: Config, names: Names) -> Axes:
    """Return the axes of a decoder's task heads."""
    return merged(
        linear("lm_head", None, RESIDUAL),
        linear("score", None, RESIDUAL),
        linear("classifier", None, RESIDUAL),
        linear("qa_outputs", None, RESIDUAL),
    )


def spaces(config: Config) -> dict[str, type[Permutation]]:
    """Signs pass through RMSNorm."""
    return {RESIDUAL: SignedPermutation}


ENCODER = ("embed_tokens", "layers", "norm", "rotary_emb")


def attended(
    config: Config, p: str, layer: int, bias: bool, out_bias: bool = False, normed: bool = False
) -> Block:
    """Return a decoder's attention of four modules."""
    query, key, value = (Units(f"{p}self_attn.{name}_proj", bias) for name in "qkv")
    output = Units(f"{p}self_attn.o_proj", out_bias)
    return attention(p, layer, heads_of(config, normed), query, key, value, output)


def _body(config: Config, names: Names) -> Block:
    bias = config.get("attention_bias", False)
    qkv_bias = config["model_type"] == "qwen2" or bias

    def layer(i: int) -> Block:
        p = f"layers.{i}."
        norms = (norm(f"{p}{name}") for name in NORMS)
        return together(attended(config, p, i, qkv_bias, bias), gated(config, p, i), *norms)

    return decoder(config, names, map(layer, range(config["num_hidden_layers"])))


FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2"),
    stacks=("layers",),
    body=_body,
    heads=heads,
    encoder=ENCODER,
    spaces=spaces,
)
