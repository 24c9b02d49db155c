"""MPNet: BERT's groups; one relative-position bias per head, which all layers share.

The bias ties the order of the heads of all layers: one head permutation serves the whole encoder. Left
unused as in BERT: the rest of ``GL(d_h)``, redundant biases of keys and values, and those of
LayerNorm; one
constant of each head's relative-position bias besides.
"""

from __future__ import annotations

from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.families.encoders.bert import neurons
from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, shared_heads, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm

_ORDER = "encoder.heads"


def _attention(config: Config, layer: int) -> Block:
    p, heads = f"encoder.layer.{layer}.attention.attn.", config["num_attention_heads"]
    return attention(
        f"encoder.layer.{layer}.",
        layer,
        Heads(heads, config["hidden_size"] // heads),
        query=Units(f"{p}q"),
        key=Units(f"{p}k"),
        value=Units(f"{p}v"),
        output=Units(f"{p}o"),
        order=_ORDER,
    )


def _rest(config: Config, layer: int) -> Block:
    p = f"encoder.layer.{layer}."
    return together(
        norm(f"{p}attention.LayerNorm"),
        neurons(config, p, layer),
    )


def _body(config: Config, names: Names) -> Block:
    layers = range(config["num_hidden_layers"])
    return together(
        embedding("embeddings.word_embeddings"),
        embedding("embeddings.position_embeddings"),
        norm("embeddings.LayerNorm"),
        shared_heads(
            _ORDER,
            config["num_attention_heads"],
            "encoder.relative_attention_bias.weight",
            [_attention(config, layer) for layer in layers],
        ),
        *(_rest(config, layer) for layer in layers),
    )


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("pooler.dense", "pooler", RESIDUAL),
        linear("classifier", None, "pooler" if "pooler.dense.weight" in names else RESIDUAL),
        linear("classifier.dense", "classifier", RESIDUAL),
        linear("classifier.out_proj", None, "classifier"),
        linear("qa_outputs", None, RESIDUAL),
        linear("lm_head.dense", RESIDUAL, RESIDUAL),
        norm("lm_head.layer_norm"),
        linear("lm_head.decoder", None, RESIDUAL),
        {"lm_head.bias": (None,), "embeddings.position_ids": (None, None)},
    )


FAMILY = Family(
    name="mpnet",
    model_types=("mpnet",),
    stacks=("encoder.layer",),
    body=_body,
    heads=_heads,
    encoder=("embeddings", "encoder", "pooler"),
    spaces=lambda config: {"pooler": SignedPermutation, "classifier": SignedPermutation},
)
