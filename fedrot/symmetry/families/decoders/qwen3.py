"""Qwen3 and Gemma 3 (text): LLaMA's groups, with a norm with gains on queries and keys.

The norm leaves only a sign per frequency of each key head and its queries. Gemma 3 has two more norms
per layer, whose gains hold the stream: no rotation of it is left. Left unused as in LLaMA, but for the
scales per frequency, of which gains of queries against those of keys take the place; scales of queries
and keys, which the norm undoes up to its epsilon, besides.
"""

from __future__ import annotations

from fedrot.symmetry.families.decoders.llama import (
    ENCODER,
    NORMS,
    attended,
    decoder,
    gated,
    heads,
    spaces,
)
from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, together
from fedrot.symmetry.spaces import norm

_MORE_NORMS = {"gemma3_text": ("pre_feedforward_layernorm", "post_feedforward_layernorm")}


def _body(config: Config, names: Names) -> Block:
    bias = config.get("attention_bias", False)
    norms = NORMS + _MORE_NORMS.get(config["model_type"], ())

    def layer(i: int) -> Block:
        p = f"layers.{i}."
        # One gain per unit of a head, the same for all heads: it stays.
        gains = {f"{p}self_attn.{name}_norm.weight": (None,) for name in "qk"}
        return together(
            attended(config, p, i, bias, bias, normed=True),
            gains,
            gated(config, p, i),
            *(norm(f"{p}{name}") for name in norms),
        )

    return decoder(config, names, map(layer, range(config["num_hidden_layers"])))


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3", "gemma3_text"),
    stacks=("layers",),
    body=_body,
    heads=heads,
    encoder=ENCODER,
    spaces=spaces,
)
