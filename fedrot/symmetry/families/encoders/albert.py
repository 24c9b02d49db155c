"""ALBERT: BERT's groups, once for all layers that share their parameters.

Embeddings lie in a space of their own, in fewer dimensions. Left unused as in BERT: the rest of
``GL(d_h)``, redundant biases of keys and values, those of LayerNorm, and, as in ELECTRA, gain, bias and
rotations of the embeddings' norm, which only a projection reads.
"""

from __future__ import annotations

from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm

_EMBEDDED = "embedding"


def _layer(config: Config, group: int, inner: int) -> Block:
    p, heads = (
        f"encoder.albert_layer_groups.{group}.albert_layers.{inner}.",
        config["num_attention_heads"],
    )
    layer = group * config["inner_group_num"] + inner
    return together(
        attention(
            p,
            layer,
            Heads(heads, config["hidden_size"] // heads),
            query=Units(f"{p}attention.query"),
            key=Units(f"{p}attention.key"),
            value=Units(f"{p}attention.value"),
            output=Units(f"{p}attention.dense"),
        ),
        norm(f"{p}attention.LayerNorm"),
        feed_forward(
            p, layer, config["intermediate_size"], up=Units(f"{p}ffn"), down=Units(f"{p}ffn_output")
        ),
        norm(f"{p}full_layer_layer_norm"),
    )


def _body(config: Config, names: Names) -> Block:
    return together(
        embedding("embeddings.word_embeddings", _EMBEDDED),
        embedding("embeddings.position_embeddings", _EMBEDDED),
        embedding("embeddings.token_type_embeddings", _EMBEDDED),
        norm("embeddings.LayerNorm", _EMBEDDED),
        linear("encoder.embedding_hidden_mapping_in", RESIDUAL, _EMBEDDED),
        *(
            _layer(config, group, inner)
            for group in range(config["num_hidden_groups"])
            for inner in range(config["inner_group_num"])
        ),
    )


def _heads(config: Config, names: Names) -> Axes:
    return merged(
        linear("pooler", "pooler", RESIDUAL),
        linear("classifier", None, "pooler" if "pooler.weight" in names else RESIDUAL),
        linear("sop_classifier.classifier", None, "pooler"),
        linear("qa_outputs", None, RESIDUAL),
        linear("predictions.dense", _EMBEDDED, RESIDUAL),
        norm("predictions.LayerNorm", _EMBEDDED),
        linear("predictions.decoder", None, _EMBEDDED),
        {"predictions.bias": (None,), "embeddings.position_ids": (None, None)},
        {"embeddings.token_type_ids": (None, None)},
    )


FAMILY = Family(
    name="albert",
    model_types=("albert",),
    stacks=("encoder.albert_layer_groups",),
    body=_body,
    heads=_heads,
    encoder=("embeddings", "encoder", "pooler"),
    spaces=lambda config: {"pooler": SignedPermutation},
)
