"""LLaMA and the decoders that differ from it in little: Mixtral, Qwen3, Gemma 3 and Phi-3."""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.family import Config, Family, Layer, Names, Stack, rotary_units
from fedrot.symmetry.layers import Block, Heads, Projections, Units, attention, feed_forward, together
from fedrot.symmetry.mixture import mixture
from fedrot.symmetry.spaces import RESIDUAL, Space, embedding, norm

NORMS = ("input_layernorm", "post_attention_layernorm")


def heads_of(config: Config, normed: bool = False) -> Heads:
    """Return the heads of a decoder's attention, which rotary positions turn as a whole."""
    count = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // count
    return Heads(count, dim, config.get("num_key_value_heads") or count, dim, normed)


def gated(config: Config, p: str) -> Block:
    """Return a gated feed-forward block of three modules."""
    bias = config.get("mlp_bias", False)
    gate, up, down = (Units(f"{p}mlp.{name}_proj", bias) for name in ("gate", "up", "down"))
    return feed_forward(p, config["intermediate_size"], up, down, gate)


def projections(p: str, bias: bool, output_bias: bool) -> Projections:
    """Return the projections of four modules."""
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    return Projections.separate(f"{p}self_attn.", modules, bias, output_bias)


def decoder(name: str, model_types: tuple[str, ...], layer: Layer) -> Family:
    """Return a family with LLaMA's modules around the layers."""
    body = (embedding("embed_tokens"), Stack("layers", "num_hidden_layers", layer), norm("norm"))
    spaces = {RESIDUAL: Space(SignedPermutation)}
    return Family(name, model_types, body, spaces=spaces, inside=("rotary_emb",))


def _llama_layer(config: Config, names: Names, p: str) -> Block:
    """LLaMA, Mistral and Qwen2: rotary positions, grouped queries, gated feed-forward, RMSNorm."""
    bias = config.get("attention_bias", False)
    qkv_bias = bias or config["model_type"] == "qwen2"
    return together(
        attention(p, heads_of(config), projections(p, qkv_bias, bias)),
        gated(config, p),
        *(norm(f"{p}{name}") for name in NORMS),
    )


LLAMA = decoder("llama", ("llama", "mistral", "qwen2"), _llama_layer)


def _mixtral_experts(config: Config, names: Names, p: str) -> Block:
    """Experts change their order with the router's rows.

    Before version 5, transformers stored each expert as three modules. There they keep their order.
    """
    count, neurons = config["num_local_experts"], config["intermediate_size"]
    old = f"{p}block_sparse_moe."
    if f"{old}gate.weight" not in names:
        tensors = (f"{p}mlp.{n}" for n in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"))
        return mixture(p, count, neurons, *tensors)
    found = []
    for i in range(count):
        up, down, gate = (Units(f"{old}experts.{i}.w{n}", False) for n in (3, 2, 1))
        found.append(feed_forward(f"{p}{i}.", neurons, up, down, gate))
    return together({f"{old}gate.weight": (None, RESIDUAL)}, *found)


def _mixtral_layer(config: Config, names: Names, p: str) -> Block:
    return together(
        attention(p, heads_of(config), projections(p, False, False)),
        _mixtral_experts(config, names, p),
        *(norm(f"{p}{name}") for name in NORMS),
    )


MIXTRAL = decoder("mixtral", ("mixtral",), _mixtral_layer)


_MORE_NORMS = {"gemma3_text": ("pre_feedforward_layernorm", "post_feedforward_layernorm")}


def _qwen3_layer(config: Config, names: Names, p: str) -> Block:
    """Qwen3 and Gemma 3: a norm on queries and keys leaves only a sign per rotary frequency."""
    bias = config.get("attention_bias", False)
    return together(
        attention(p, heads_of(config, normed=True), projections(p, bias, bias)),
        # One gain per unit of a head, the same for all heads: it stays.
        {f"{p}self_attn.{name}_norm.weight": (None,) for name in "qk"},
        gated(config, p),
        *(norm(f"{p}{name}") for name in NORMS + _MORE_NORMS.get(config["model_type"], ())),
    )


QWEN3 = decoder("qwen3", ("qwen3", "gemma3_text"), _qwen3_layer)


def _phi3_layer(config: Config, names: Names, p: str) -> Block:
    """Phi-3: fused projections, and rotary positions on a part of each head if so configured."""
    whole, neurons = heads_of(config), config["intermediate_size"]
    heads = replace(whole, rotary=rotary_units(config, whole.dim))
    output, down = Units(f"{p}self_attn.o_proj", False), Units(f"{p}mlp.down_proj", False)
    gate, up = (Units(f"{p}mlp.gate_up_proj", False, start) for start in (0, neurons))
    return together(
        attention(p, heads, Projections.fused(f"{p}self_attn.qkv_proj", heads, output, bias=False)),
        feed_forward(p, neurons, up, down, gate),
        *(norm(f"{p}{name}") for name in NORMS),
    )


PHI3 = decoder("phi3", ("phi3",), _phi3_layer)
