"""GPT-J: rotary positions that turn neighbouring units, and one norm for attention and feed-forward."""

from __future__ import annotations

from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _layer(config: Config, layer: int) -> Block:
    p, width, count = f"h.{layer}.", config["n_embd"], config["n_head"]
    dim = width // count
    heads = Heads(count, dim, rotary=config.get("rotary_dim") or dim, interleaved=True)
    query, key, value, output = (Units(f"{p}attn.{name}_proj", False) for name in ("q", "k", "v", "out"))
    up, down = Units(f"{p}mlp.fc_in"), Units(f"{p}mlp.fc_out")
    return together(
        norm(f"{p}ln_1"),
        attention(p, layer, heads, query, key, value, output),
        feed_forward(p, layer, config.get("n_inner") or 4 * width, up, down),
    )


def _body(config: Config, names: Names) -> Block:
    layers = range(config["n_layer"])
    return together(embedding("wte"), *(_layer(config, layer) for layer in layers), norm("ln_f"))


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("lm_head", None, RESIDUAL),
        linear("score", None, RESIDUAL),
        linear("classifier", None, RESIDUAL),
        linear("qa_outputs", None, RESIDUAL),
    )


FAMILY = Family("gptj", ("gptj",), ("h",), _body, _heads, ("wte", "h", "ln_f"))
