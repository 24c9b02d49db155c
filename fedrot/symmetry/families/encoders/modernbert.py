"""ModernBERT: fused projections, rotary positions and a gated feed-forward."""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.describe.family import NORM_IN_FRONT, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import Block, attention, feed_forward, together
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from fedrot.symmetry.describe.spaces import RESIDUAL, Space, embedding, linear, norm
from fedrot.symmetry.describe.task_heads import UNMEASURED, AfterNorm, read_out


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = Heads.of(config)
    neurons = config["intermediate_size"]
    bias = config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    gate, up = (Units(f"{p}mlp.Wi", mlp_bias, start) for start in (0, neurons))
    down = Units(f"{p}mlp.Wo", mlp_bias)
    output = Units(f"{p}attn.Wo", bias)
    projections = Projections.fused(f"{p}attn.Wqkv", heads, output, bias)
    return together(
        # The first layer has no norm: it reads the embeddings' norm.
        norm(f"{p}attn_norm") if p != "layers.0." else {},
        attention(p, replace(heads, rotary=heads.dim), projections),
        norm(f"{p}mlp_norm"),
        feed_forward(p, neurons, up, down, gate),
    )


FAMILY = Family(
    name="modernbert",
    model_types=("modernbert",),
    stream=NORM_IN_FRONT,
    body=(
        embedding("embeddings.tok_embeddings"),
        norm("embeddings.norm"),
        Stack("layers", "num_hidden_layers", _layer),
        norm("final_norm"),
    ),
    task_heads=(
        linear("head.dense", "head", RESIDUAL),
        norm("head.norm", "head"),
        read_out("head", "decoder classifier qa_outputs"),
    ),
    # The decoder is tied to the embeddings' table; a classifier reads its own hidden
    # units, a pooled one the stream.
    spaces={"head": Space(present="head.dense.weight", absent="decoder.weight")},
    hidden=AfterNorm("final_norm"),
    features=UNMEASURED,
)
