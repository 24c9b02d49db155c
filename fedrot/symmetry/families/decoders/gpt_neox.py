"""GPT-NeoX and Pythia: query, key and value of each head side by side, partial rotary positions, biases.

The first units of a head are turned by rotary positions and keep one phase per frequency; the others
keep a full rotation. Left unused: the rest of ``GL`` (scales per frequency, ``GL`` of what is not
turned and of values), redundant biases of values, redundant parameters of pre-norm streams as in
GPT-2, and a constant
that attention and feed-forward of a layer trade. The key bias is redundant in the units that are not
turned, and only there.
"""

from __future__ import annotations

from fedrot.symmetry.family import Config, Family, Names, rotary_units
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _layer(config: Config, layer: int) -> Block:
    p, heads = f"layers.{layer}.", config["num_attention_heads"]
    dim, bias = config["hidden_size"] // heads, config.get("attention_bias", True)
    query, key, value = (
        Units(f"{p}attention.query_key_value", bias, start=i * dim, every=3 * dim) for i in range(3)
    )
    return together(
        norm(f"{p}input_layernorm"),
        attention(
            p,
            layer,
            Heads(heads, dim, rotary=rotary_units(config, dim, default=0.25)),
            query=query,
            key=key,
            value=value,
            output=Units(f"{p}attention.dense", bias),
        ),
        norm(f"{p}post_attention_layernorm"),
        feed_forward(
            p,
            layer,
            config["intermediate_size"],
            up=Units(f"{p}mlp.dense_h_to_4h"),
            down=Units(f"{p}mlp.dense_4h_to_h"),
        ),
    )


def _body(config: Config, names: Names) -> Block:
    layers = range(config["num_hidden_layers"])
    # Buffers of earlier versions of transformers.
    buffers = {"bias": (None,) * 4, "masked_bias": (), "rotary_emb.inv_freq": (None,)}
    found = [
        {f"layers.{layer}.attention.{name}": axes for name, axes in buffers.items()} for layer in layers
    ]
    return together(
        embedding("embed_in"),
        *(_layer(config, layer) for layer in layers),
        {name: axes for name, axes in merged(*found).items() if name in names},
        norm("final_layer_norm"),
    )


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("lm_head", None, RESIDUAL),
        linear("embed_out", None, RESIDUAL),
        linear("score", None, RESIDUAL),
        linear("classifier", None, RESIDUAL),
        linear("qa_outputs", None, RESIDUAL),
    )


FAMILY = Family(
    name="gpt-neox",
    model_types=("gpt_neox",),
    stacks=("layers",),
    body=_body,
    heads=_heads,
    encoder=("embed_in", "layers", "final_layer_norm"),
)
