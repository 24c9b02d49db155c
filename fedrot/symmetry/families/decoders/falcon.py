"""Falcon: 7B (one key head), 40B and 11B (groups of queries with their key and value), RW (ALiBi).

Query, key and value lie in one projection: the query heads of a key head, their key, and their value,
once per key head.
"""

from __future__ import annotations

from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _norms(config: Config) -> tuple[str, ...]:
    if not config["parallel_attn"]:
        return ("input_layernorm", "post_attention_layernorm")
    default = 2 if config["new_decoder_architecture"] else 1
    two = (config.get("num_ln_in_parallel_attn") or default) == 2
    return ("ln_attn", "ln_mlp") if two else ("input_layernorm",)


def _layer(config: Config, layer: int) -> Block:
    p, count, bias = f"h.{layer}.", config["num_attention_heads"], config["bias"]
    dim, keys = config["hidden_size"] // count, 1 if config["multi_query"] else count
    if config["new_decoder_architecture"]:
        keys = config["num_kv_heads"]
    shared, fused = count // keys, f"{p}self_attention.query_key_value"
    heads = Heads(count, dim, keys, 0 if config["alibi"] else dim, alibi=config["alibi"])
    query, key, value = (
        Units(fused, bias, start * dim, (shared + 2) * dim, together)
        for start, together in ((0, shared), (shared, 1), (shared + 1, 1))
    )
    up, down = (Units(f"{p}mlp.{name}", bias) for name in ("dense_h_to_4h", "dense_4h_to_h"))
    return together(
        *(norm(f"{p}{name}") for name in _norms(config)),
        attention(p, layer, heads, query, key, value, Units(f"{p}self_attention.dense", bias)),
        feed_forward(p, layer, config["ffn_hidden_size"], up, down),
    )


def _body(config: Config, names: Names) -> Block:
    layers = range(config["num_hidden_layers"])
    return together(embedding("word_embeddings"), *(_layer(config, i) for i in layers), norm("ln_f"))


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("lm_head", None, RESIDUAL),
        linear("score", None, RESIDUAL),
        linear("classifier", None, RESIDUAL),
        linear("qa_outputs", None, RESIDUAL),
    )


FAMILY = Family("falcon", ("falcon",), ("h",), _body, _heads, ("word_embeddings", "h", "ln_f"))
