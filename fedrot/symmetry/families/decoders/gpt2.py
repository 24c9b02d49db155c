"""GPT-2: a pre-norm decoder whose projections are ``Conv1D``, query, key and value side by side.

Left unused as in BERT: the rest of ``GL(d_h)``, redundant biases of keys and values, and those of
LayerNorm;
before the layers' parts, norms let what reads them hold all gains and biases, and the stream then
rotate.
"""

from __future__ import annotations

from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _layer(config: Config, layer: int) -> Block:
    p, width = f"h.{layer}.", config["n_embd"]
    query, key, value = (Units(f"{p}attn.c_attn", start=i * width, conv1d=True) for i in range(3))
    return together(
        norm(f"{p}ln_1"),
        attention(
            p,
            layer,
            Heads(config["n_head"], width // config["n_head"]),
            query=query,
            key=key,
            value=value,
            output=Units(f"{p}attn.c_proj", conv1d=True),
        ),
        norm(f"{p}ln_2"),
        feed_forward(
            p,
            layer,
            config.get("n_inner") or 4 * width,
            up=Units(f"{p}mlp.c_fc", conv1d=True),
            down=Units(f"{p}mlp.c_proj", conv1d=True),
        ),
    )


def _body(config: Config, names: Names) -> Block:
    layers = range(config["n_layer"])
    # Buffers of earlier versions of transformers.
    masks = [
        {f"h.{layer}.attn.bias": (None,) * 4, f"h.{layer}.attn.masked_bias": ()} for layer in layers
    ]
    return together(
        embedding("wte"),
        embedding("wpe"),
        *(_layer(config, layer) for layer in layers),
        {name: axes for name, axes in merged(*masks).items() if name in names},
        norm("ln_f"),
    )


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("lm_head", None, RESIDUAL),
        linear("score", None, RESIDUAL),
        linear("classifier", None, RESIDUAL),
        linear("qa_outputs", None, RESIDUAL),
        linear("multiple_choice_head.summary", None, RESIDUAL),
    )


FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    stacks=("h",),
    body=_body,
    heads=_heads,
    encoder=("wte", "wpe", "h", "ln_f"),
)
