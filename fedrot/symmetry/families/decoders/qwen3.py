"""Qwen3 and Gemma 3 (text): LLaMA with a norm with gains on queries and keys.

The norm leaves only a sign per rotary frequency. Gemma 3 has two more norms per layer.
"""

from __future__ import annotations

from fedrot.symmetry.families.decoders.llama import NORMS, decoder, gated, heads_of, projections
from fedrot.symmetry.family import Config, Names
from fedrot.symmetry.layers import Block, attention, together
from fedrot.symmetry.spaces import norm

_MORE_NORMS = {"gemma3_text": ("pre_feedforward_layernorm", "post_feedforward_layernorm")}


def _layer(config: Config, names: Names, p: str) -> Block:
    bias = config.get("attention_bias", False)
    return together(
        attention(p, heads_of(config, normed=True), projections(p, bias, bias)),
        # One gain per unit of a head, the same for all heads: it stays.
        {f"{p}self_attn.{name}_norm.weight": (None,) for name in "qk"},
        gated(config, p),
        *(norm(f"{p}{name}") for name in NORMS + _MORE_NORMS.get(config["model_type"], ())),
    )


FAMILY = decoder("qwen3", ("qwen3", "gemma3_text"), _layer)
