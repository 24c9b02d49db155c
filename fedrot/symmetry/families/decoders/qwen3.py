"""Qwen3 and Gemma 3 (text): LLaMA with a norm with gains on queries and keys.

Under this norm, only a sign per rotary frequency is a symmetry. Gemma 3 has two more
norms per layer.
"""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Names
from fedrot.symmetry.describe.layers import Block, attention, pre_norm, together
from fedrot.symmetry.describe.spaces import norm
from fedrot.symmetry.describe.task_heads import UNMEASURED, Unbounded
from fedrot.symmetry.families.decoders.llama import (
    LAST_HIDDEN,
    decoder,
    gated,
    heads_of,
    projections,
    two_blocks,
)


def _layer(config: Config, names: Names, p: str) -> Block:
    bias = config.get("attention_bias", False)
    attending = together(
        attention(p, heads_of(config, normed=True), projections(p, bias, bias)),
        # The gain of a unit is the same for all heads, so no group moves it.
        {f"{p}self_attn.{name}_norm.weight": (None,) for name in "qk"},
    )
    if config["model_type"] == "qwen3":
        return two_blocks(p, attending, gated(config, p))
    return together(
        pre_norm(f"{p}input_layernorm", attending),
        norm(f"{p}post_attention_layernorm"),
        pre_norm(f"{p}pre_feedforward_layernorm", gated(config, p)),
        norm(f"{p}post_feedforward_layernorm"),
    )


FAMILY = decoder(
    "qwen3",
    ("qwen3", "gemma3_text"),
    _layer,
    {
        "qwen3": UNMEASURED,
        "gemma3_text": Unbounded("the gain of its norms is 1 + weight, not the weight"),
    },
    "rotated; permuted in gemma3_text, which has norms after its blocks",
    {"qwen3": LAST_HIDDEN, "gemma3_text": UNMEASURED},
)
