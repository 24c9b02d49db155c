"""BART: BERT's groups in encoder, decoder and cross attention.

Encoder and decoder share the table of embeddings, so that one permutation moves both streams. Left
unused as in BERT: the rest of ``GL(d_h)``, redundant biases of keys and values, and those of
LayerNorm (of
the last gains, the encoder's alone: the decoder's is read by the table).
"""

from __future__ import annotations

from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _attention(module: str, layer: int, heads: Heads) -> Block:
    return together(
        attention(
            f"{module}.",
            layer,
            heads,
            query=Units(f"{module}.q_proj"),
            key=Units(f"{module}.k_proj"),
            value=Units(f"{module}.v_proj"),
            output=Units(f"{module}.out_proj"),
        ),
        norm(f"{module}_layer_norm"),
    )


def _stack(config: Config, stack: str, first: int) -> Block:
    count = config[f"{stack}_attention_heads"]
    heads = Heads(count, config["d_model"] // count)
    layers = [(f"{stack}.layers.{i}.", first + i) for i in range(config[f"{stack}_layers"])]
    attended = ("self_attn", "encoder_attn") if stack == "decoder" else ("self_attn",)
    return together(
        embedding(f"{stack}.embed_tokens"),
        embedding(f"{stack}.embed_positions"),
        norm(f"{stack}.layernorm_embedding"),
        *(_attention(f"{p}{module}", layer, heads) for p, layer in layers for module in attended),
        *(
            feed_forward(p, layer, config[f"{stack}_ffn_dim"], Units(f"{p}fc1"), Units(f"{p}fc2"))
            for p, layer in layers
        ),
        *(norm(f"{p}final_layer_norm") for p, _ in layers),
    )


def _body(config: Config, names: Names) -> Block:
    return together(
        embedding("shared"),
        _stack(config, "encoder", 0),
        _stack(config, "decoder", config["encoder_layers"]),
    )


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("lm_head", None, RESIDUAL),
        {"final_logits_bias": (None, None)},
        linear("classification_head.dense", "classifier", RESIDUAL),
        linear("classification_head.out_proj", None, "classifier"),
        linear("qa_outputs", None, RESIDUAL),
    )


FAMILY = Family(
    name="bart",
    model_types=("bart",),
    stacks=("encoder.layers", "decoder.layers"),
    body=_body,
    heads=_heads,
    encoder=("shared", "encoder", "decoder"),
    spaces=lambda config: {"classifier": SignedPermutation},
)
