"""ModernBERT: a pre-norm encoder with fused projections, rotary positions and GeGLU.

Queries and keys keep one phase per frequency, values a rotation; up and down change order and sign,
the gate its order. LayerNorm allows the stream one permutation. Left unused: a scale per frequency, the
rest of ``GL(d_h)`` on values, scales of up and down, redundant biases of values, redundant parameters
of pre-norm streams as
in GPT-2, and the gain of the embeddings' norm, for which the table can make up.
"""

from __future__ import annotations

from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _layer(config: Config, layer: int) -> Block:
    p, width, heads = f"layers.{layer}.", config["hidden_size"], config["num_attention_heads"]
    dim, neurons = width // heads, config["intermediate_size"]
    bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    query, key, value = (Units(f"{p}attn.Wqkv", bias, i * width) for i in range(3))
    gate, up = (Units(f"{p}mlp.Wi", mlp_bias, i * neurons) for i in range(2))
    output, down = Units(f"{p}attn.Wo", bias), Units(f"{p}mlp.Wo", mlp_bias)
    return together(
        # The first layer reads the embeddings' norm.
        norm(f"{p}attn_norm") if layer else {},
        attention(p, layer, Heads(heads, dim, rotary=dim), query, key, value, output),
        norm(f"{p}mlp_norm"),
        feed_forward(p, layer, neurons, up, down, gate),
    )


def _body(config: Config, names: Names) -> Block:
    return together(
        embedding("embeddings.tok_embeddings"),
        norm("embeddings.norm"),
        *(_layer(config, layer) for layer in range(config["num_hidden_layers"])),
        norm("final_norm"),
    )


def _heads(config: Config, names: Names) -> Axes:
    # The decoder shares the embeddings' table; a classifier reads hidden units of its own.
    hidden = RESIDUAL if "decoder.weight" in names else "head"
    return merged(
        linear("head.dense", hidden, RESIDUAL),
        norm("head.norm", hidden),
        linear("decoder", None, hidden),
        linear("classifier", None, hidden),
        linear("qa_outputs", None, hidden),
    )


FAMILY = Family(
    name="modernbert",
    model_types=("modernbert",),
    stacks=("layers",),
    body=_body,
    heads=_heads,
    encoder=("embeddings", "layers", "final_norm"),
)
