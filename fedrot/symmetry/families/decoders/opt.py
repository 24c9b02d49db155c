"""OPT: BERT's groups in a pre-norm decoder (350m: post-norm, with small embeddings in their own space).

Left unused as in BERT: the rest of ``GL(d_h)``, redundant biases of keys and values. Besides: scales of
ReLU's neurons and, where embeddings are projected, the linear maps between embeddings and stream.
"""

from __future__ import annotations

from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _layer(config: Config, layer: int) -> Block:
    p, heads = f"decoder.layers.{layer}.", config["num_attention_heads"]
    bias = config.get("enable_bias", True)
    query, key, value, output = (Units(f"{p}self_attn.{n}_proj", bias) for n in ("q", "k", "v", "out"))
    up, down = Units(f"{p}fc1", bias), Units(f"{p}fc2", bias)
    return together(
        norm(f"{p}self_attn_layer_norm"),
        attention(p, layer, Heads(heads, config["hidden_size"] // heads), query, key, value, output),
        norm(f"{p}final_layer_norm"),
        feed_forward(p, layer, config["ffn_dim"], up, down),
    )


def _embedded(names: Names) -> str:
    return "embedding" if "decoder.project_in.weight" in names else RESIDUAL


def _body(config: Config, names: Names) -> Block:
    embedded = _embedded(names)
    between: Axes = {
        "decoder.project_in.weight": (RESIDUAL, embedded),
        "decoder.project_out.weight": (embedded, RESIDUAL),
    }
    last = config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False)
    return together(
        embedding("decoder.embed_tokens", embedded),
        embedding("decoder.embed_positions"),
        between if embedded != RESIDUAL else {},
        *(_layer(config, layer) for layer in range(config["num_hidden_layers"])),
        norm("decoder.final_layer_norm") if last else {},
    )


def _heads(config: Config, names: Names) -> Axes:
    embedded = _embedded(names)
    return merged(
        linear("lm_head", None, embedded),
        linear("score", None, embedded),
        linear("qa_outputs", None, embedded),
    )


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    stacks=("decoder.layers",),
    body=_body,
    heads=_heads,
    encoder=("decoder",),
)
