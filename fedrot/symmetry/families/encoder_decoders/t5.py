"""T5 1.0, T5 1.1, Flan-T5 and mT5: encoder, decoder, cross attention, no biases, RMSNorm.

Encoder and decoder share the table of embeddings, so that one signed permutation moves both streams
(RMSNorm lets signs pass). All self attention of a stack adds the same relative-position bias, so that
one head permutation serves it; cross attention has none and is free. T5 1.1's feed-forward is gated.

Left unused: the rest of ``GL(d_h)``, scales of up and down (and of ReLU's neurons), gains that what
reads them could hold, one constant of each head's relative-position bias, and, where the table is not
tied to the output, the orthogonal symmetry of a stream whose gains were folded away.
"""

from __future__ import annotations

from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, shared_heads, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _attention(config: Config, module: str, layer: int, order: str | None = None) -> Block:
    return attention(
        f"{module}.",
        layer,
        Heads(config["num_heads"], config["d_kv"]),
        query=Units(f"{module}.q", bias=False),
        key=Units(f"{module}.k", bias=False),
        value=Units(f"{module}.v", bias=False),
        output=Units(f"{module}.o", bias=False),
        order=order,
    )


def _feed_forward(config: Config, p: str, layer: int, names: Names) -> Block:
    module = f"{p}.DenseReluDense"
    gated = f"{module}.wi_0.weight" in names
    return feed_forward(
        f"{p}.",
        layer,
        config["d_ff"],
        up=Units(f"{module}.wi_1" if gated else f"{module}.wi", bias=False),
        down=Units(f"{module}.wo", bias=False),
        gate=Units(f"{module}.wi_0", bias=False) if gated else None,
    )


def _stack(config: Config, names: Names, stack: str, layers: int, first: int) -> Block:
    order, cross = f"{stack}.heads", stack == "decoder"
    p = f"{stack}.block."
    blocks = [(f"{p}{i}.layer.", first + i) for i in range(layers)]
    return together(
        embedding(f"{stack}.embed_tokens"),
        shared_heads(
            order,
            config["num_heads"],
            f"{p}0.layer.0.SelfAttention.relative_attention_bias.weight",
            [_attention(config, f"{b}0.SelfAttention", layer, order) for b, layer in blocks],
        ),
        *(_attention(config, f"{b}1.EncDecAttention", layer) for b, layer in blocks if cross),
        *(_feed_forward(config, f"{b}{1 + cross}", layer, names) for b, layer in blocks),
        *(norm(f"{b}{i}.layer_norm") for b, _ in blocks for i in range(2 + cross)),
        norm(f"{stack}.final_layer_norm"),
    )


def _body(config: Config, names: Names) -> Block:
    encoder = config["num_layers"]
    decoder = config.get("num_decoder_layers") or encoder
    alone = not config.get("is_encoder_decoder", True)
    return together(
        embedding("shared"),
        _stack(config, names, "encoder", encoder, 0),
        Block() if alone else _stack(config, names, "decoder", decoder, encoder),
    )


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("lm_head", None, RESIDUAL),
        linear("classification_head.dense", "classifier", RESIDUAL),
        linear("classification_head.out_proj", None, "classifier"),
        linear("classifier", None, RESIDUAL),
        linear("qa_outputs", None, RESIDUAL),
    )


FAMILY = Family(
    name="t5",
    model_types=("t5", "mt5"),
    stacks=("encoder.block", "decoder.block"),
    body=_body,
    heads=_heads,
    encoder=("shared", "encoder", "decoder"),
    spaces=lambda config: {RESIDUAL: SignedPermutation, "classifier": SignedPermutation},
)
