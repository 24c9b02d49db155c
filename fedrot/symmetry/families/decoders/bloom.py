"""BLOOM: ALiBi, query, key and value of each head side by side, a norm of the embeddings."""

from __future__ import annotations

from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _layer(config: Config, layer: int) -> Block:
    p, width, count = f"h.{layer}.", config["hidden_size"], config["n_head"]
    dim, fused = width // count, f"{p}self_attention.query_key_value"
    query, key, value = (Units(fused, start=i * dim, every=3 * dim) for i in range(3))
    output, heads = Units(f"{p}self_attention.dense"), Heads(count, dim, alibi=True)
    up, down = Units(f"{p}mlp.dense_h_to_4h"), Units(f"{p}mlp.dense_4h_to_h")
    return together(
        norm(f"{p}input_layernorm"),
        attention(p, layer, heads, query, key, value, output),
        norm(f"{p}post_attention_layernorm"),
        feed_forward(p, layer, 4 * width, up, down),
    )


def _body(config: Config, names: Names) -> Block:
    layers = (_layer(config, layer) for layer in range(config["n_layer"]))
    first = (embedding("word_embeddings"), norm("word_embeddings_layernorm"))
    return together(*first, *layers, norm("ln_f"))


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("lm_head", None, RESIDUAL),
        linear("score", None, RESIDUAL),
        linear("classifier", None, RESIDUAL),
        linear("qa_outputs", None, RESIDUAL),
    )


_OWN = ("word_embeddings", "word_embeddings_layernorm", "h", "ln_f")
FAMILY = Family("bloom", ("bloom",), ("h",), _body, _heads, _OWN)
