"""Decoders with LayerNorm: GPT-2, GPT-J, GPT-NeoX and Pythia, BLOOM, Falcon, OPT."""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.family import BUFFERS, Config, Family, Names, Stack, When, optional, rotary_units
from fedrot.symmetry.layers import Block, Heads, Projections, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Space, embedding, norm
from fedrot.symmetry.task_heads import PLAIN, read_out


def _gpt2_layer(config: Config, names: Names, p: str) -> Block:
    """GPT-2: pre-norm, with projections that are ``Conv1D``; one holds query, key and value."""
    heads = Heads.of(config, "n_head", "n_embd")
    output, up, down = (Units(f"{p}{n}", conv1d=True) for n in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
    return together(
        norm(f"{p}ln_1"),
        attention(p, heads, Projections.fused(f"{p}attn.c_attn", heads, output)),
        norm(f"{p}ln_2"),
        feed_forward(p, config.get("n_inner") or 4 * config["n_embd"], up, down),
    )


GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    body=(embedding("wte"), embedding("wpe"), Stack("h", "n_layer", _gpt2_layer), norm("ln_f")),
    task_heads=(PLAIN, read_out(modules="multiple_choice_head.summary")),
    buffers={**BUFFERS, "attn.bias": 4, "attn.masked_bias": 0},
)


def _gptj_layer(config: Config, names: Names, p: str) -> Block:
    """GPT-J: rotary positions turn neighbouring units; attention and feed-forward read one norm."""
    whole, modules = Heads.of(config, "n_head", "n_embd"), ("q_proj", "k_proj", "v_proj", "out_proj")
    heads = replace(whole, rotary=config.get("rotary_dim") or whole.dim, interleaved=True)
    neurons = config.get("n_inner") or 4 * config["n_embd"]
    return together(
        norm(f"{p}ln_1"),
        attention(p, heads, Projections.separate(f"{p}attn.", modules, bias=False)),
        feed_forward(p, neurons, Units(f"{p}mlp.fc_in"), Units(f"{p}mlp.fc_out")),
    )


GPTJ = Family(
    name="gptj",
    model_types=("gptj",),
    body=(embedding("wte"), Stack("h", "n_layer", _gptj_layer), norm("ln_f")),
    buffers={**BUFFERS, "attn.bias": 4, "attn.masked_bias": 0},
)


def _gpt_neox_layer(config: Config, names: Names, p: str) -> Block:
    """GPT-NeoX: query, key and value fused head by head; partial rotary positions."""
    whole, bias = Heads.of(config), config.get("attention_bias", True)
    heads = replace(whole, rotary=rotary_units(config, whole.dim, default=0.25))
    output = Units(f"{p}attention.dense", bias)
    fused = f"{p}attention.query_key_value"
    up, down = Units(f"{p}mlp.dense_h_to_4h"), Units(f"{p}mlp.dense_4h_to_h")
    return together(
        norm(f"{p}input_layernorm"),
        attention(p, heads, Projections.fused(fused, heads, output, bias, by_head=True)),
        norm(f"{p}post_attention_layernorm"),
        feed_forward(p, config["intermediate_size"], up, down),
    )


GPT_NEOX = Family(
    name="gpt-neox",
    model_types=("gpt_neox",),
    body=(
        embedding("embed_in"),
        Stack("layers", "num_hidden_layers", _gpt_neox_layer),
        norm("final_layer_norm"),
    ),
    task_heads=(PLAIN, read_out(modules="embed_out")),
    buffers={**BUFFERS, "attention.bias": 4, "attention.masked_bias": 0},
)


def _bloom_layer(config: Config, names: Names, p: str) -> Block:
    """BLOOM: ALiBi, and query, key and value fused head by head."""
    heads = replace(Heads.of(config, "n_head"), ordered=True)
    fused, output = f"{p}self_attention.query_key_value", Units(f"{p}self_attention.dense")
    up, down = Units(f"{p}mlp.dense_h_to_4h"), Units(f"{p}mlp.dense_4h_to_h")
    return together(
        norm(f"{p}input_layernorm"),
        attention(p, heads, Projections.fused(fused, heads, output, by_head=True)),
        norm(f"{p}post_attention_layernorm"),
        feed_forward(p, 4 * config["hidden_size"], up, down),
    )


BLOOM = Family(
    name="bloom",
    model_types=("bloom",),
    body=(
        embedding("word_embeddings"),
        norm("word_embeddings_layernorm"),
        Stack("h", "n_layer", _bloom_layer),
        norm("ln_f"),
    ),
)


def _falcon_heads(config: Config) -> Heads:
    """7B has one key head, 40B and 11B groups of queries with one key and value, RW ALiBi."""
    count, alibi = config["num_attention_heads"], config["alibi"]
    keys = 1 if config["multi_query"] else count
    if config["new_decoder_architecture"]:
        keys = config["num_kv_heads"]
    dim = config["hidden_size"] // count
    return Heads(count, dim, keys, rotary=0 if alibi else dim, ordered=alibi)


def _falcon_norms(config: Config) -> tuple[str, ...]:
    if not config["parallel_attn"]:
        return ("input_layernorm", "post_attention_layernorm")
    count = config.get("num_ln_in_parallel_attn") or (2 if config["new_decoder_architecture"] else 1)
    return ("input_layernorm",) if count == 1 else ("ln_attn", "ln_mlp")


def _falcon_layer(config: Config, names: Names, p: str) -> Block:
    heads, bias = _falcon_heads(config), config["bias"]
    fused, output = f"{p}self_attention.query_key_value", Units(f"{p}self_attention.dense", bias)
    up, down = (Units(f"{p}mlp.dense_{name}", bias) for name in ("h_to_4h", "4h_to_h"))
    return together(
        *(norm(f"{p}{name}") for name in _falcon_norms(config)),
        attention(p, heads, Projections.fused(fused, heads, output, bias, by_head=True)),
        feed_forward(p, config["ffn_hidden_size"], up, down),
    )


FALCON = Family(
    name="falcon",
    model_types=("falcon",),
    body=(embedding("word_embeddings"), Stack("h", "num_hidden_layers", _falcon_layer), norm("ln_f")),
    inside=("rotary_emb",),
)


def _opt_layer(config: Config, names: Names, p: str) -> Block:
    """OPT: pre-norm; 350m is post-norm, with embeddings of fewer dimensions."""
    bias = config.get("enable_bias", True)
    modules = ("q_proj", "k_proj", "v_proj", "out_proj")
    up, down = Units(f"{p}fc1", bias), Units(f"{p}fc2", bias)
    return together(
        norm(f"{p}self_attn_layer_norm"),
        attention(p, Heads.of(config), Projections.separate(f"{p}self_attn.", modules, bias)),
        norm(f"{p}final_layer_norm"),
        feed_forward(p, config["ffn_dim"], up, down),
    )


def _opt_has_last_norm(config: Config, names: Names) -> bool:
    removed = config.get("_remove_final_layer_norm", False)
    return config.get("do_layer_norm_before", True) and not removed


OPT = Family(
    name="opt",
    model_types=("opt",),
    body=(
        embedding("decoder.embed_tokens", "embedding"),
        embedding("decoder.embed_positions"),
        *optional(
            {
                "decoder.project_in.weight": (RESIDUAL, "embedding"),
                "decoder.project_out.weight": ("embedding", RESIDUAL),
            }
        ),
        Stack("decoder.layers", "num_hidden_layers", _opt_layer),
        When(_opt_has_last_norm, (norm("decoder.final_layer_norm"),)),
    ),
    task_heads=(read_out("embedding"),),
    spaces={"embedding": Space(present="decoder.project_in.weight")},
)
