"""BERT and the encoders that share its module names: RoBERTa, XLM-R, ELECTRA.

The claimed group is ``S_H ⋉ (O(d_h) x O(d_h) x R*^2)^H`` on the heads and ``S_{d_ff}`` on the neurons
of every layer, ``S_d`` on the residual stream (LayerNorm allows no more), and (signed) permutations
of the hidden units of the task heads. Left unused on purpose: the rest of ``GL(d_h)`` per head and
the key-bias gauge, because moving along them changes what weight decay and Adam see.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedrot.symmetry.axes import RESIDUAL, Axes, embedding, linear, merged, norm
from fedrot.symmetry.blocks import attention, feed_forward
from fedrot.symmetry.description import Group
from fedrot.symmetry.family import Config, Family
from fedrot.symmetry.kinds import Permutation, SignedPermutation


def _layer(config: Config, layer: int) -> tuple[Group, ...]:
    prefix, heads = f"encoder.layer.{layer}.", config["num_attention_heads"]
    return (
        *attention(
            layer,
            prefix,
            query="attention.self.query",
            key="attention.self.key",
            value="attention.self.value",
            output="attention.output.dense",
            heads=heads,
            dim=config["hidden_size"] // heads,
        ),
        *feed_forward(
            layer,
            prefix,
            up="intermediate.dense",
            down="output.dense",
            neurons=config["intermediate_size"],
        ),
    )


def _embedded(names: Collection[str]) -> str:
    """ELECTRA may embed in fewer dimensions than its layers have."""
    return "embedding" if "embeddings_project.weight" in names else RESIDUAL


def _body(config: Config, layers: int, names: Collection[str]) -> Axes:
    embedded = _embedded(names)
    inside = [
        merged(
            linear(f"encoder.layer.{layer}.attention.self.query", None, RESIDUAL),
            linear(f"encoder.layer.{layer}.attention.self.key", None, RESIDUAL),
            linear(f"encoder.layer.{layer}.attention.self.value", None, RESIDUAL),
            linear(f"encoder.layer.{layer}.attention.output.dense", RESIDUAL, None),
            norm(f"encoder.layer.{layer}.attention.output.LayerNorm", RESIDUAL),
            linear(f"encoder.layer.{layer}.intermediate.dense", None, RESIDUAL),
            linear(f"encoder.layer.{layer}.output.dense", RESIDUAL, None),
            norm(f"encoder.layer.{layer}.output.LayerNorm", RESIDUAL),
        )
        for layer in range(layers)
    ]
    return merged(
        embedding("embeddings.word_embeddings", embedded),
        embedding("embeddings.position_embeddings", embedded),
        embedding("embeddings.token_type_embeddings", embedded),
        norm("embeddings.LayerNorm", embedded),
        linear("embeddings_project", RESIDUAL, embedded) if embedded != RESIDUAL else {},
        *inside,
    )


def _heads(config: Config, names: Collection[str]) -> Axes:
    embedded = _embedded(names)
    pooled = "pooler" if "pooler.dense.weight" in names else RESIDUAL
    # Language-model heads lead back to the embeddings' space, whose table they share with the decoder.
    return merged(
        linear("pooler.dense", "pooler", RESIDUAL),
        linear("classifier", None, pooled),
        linear("classifier.dense", "classifier", RESIDUAL),
        linear("classifier.out_proj", None, "classifier"),
        linear("qa_outputs", None, RESIDUAL),
        linear("cls.seq_relationship", None, "pooler"),
        linear("cls.predictions.transform.dense", embedded, RESIDUAL),
        norm("cls.predictions.transform.LayerNorm", embedded),
        linear("cls.predictions.decoder", None, embedded),
        {"cls.predictions.bias": (None,)},
        linear("lm_head.dense", embedded, RESIDUAL),
        norm("lm_head.layer_norm", embedded),
        linear("lm_head.decoder", None, embedded),
        {"lm_head.bias": (None,)},
        linear("generator_predictions.dense", embedded, RESIDUAL),
        norm("generator_predictions.LayerNorm", embedded),
        linear("generator_lm_head", None, embedded),
        linear("discriminator_predictions.dense", "discriminator", RESIDUAL),
        linear("discriminator_predictions.dense_prediction", None, "discriminator"),
        {"embeddings.position_ids": (None, None), "embeddings.token_type_ids": (None, None)},
    )


def _spaces(config: Config) -> Mapping[str, type[Permutation]]:
    # tanh is odd; ELECTRA's classifier uses GELU.
    tanh_classifier = config["model_type"] != "electra"
    return {
        "embedding": Permutation,
        "pooler": SignedPermutation,
        "classifier": SignedPermutation if tanh_classifier else Permutation,
        "discriminator": Permutation,
    }


FAMILY = Family(
    name="bert",
    model_types=("bert", "roberta", "xlm-roberta", "electra"),
    layers_key="num_hidden_layers",
    stack="encoder.layer",
    encoder=("embeddings", "embeddings_project", "encoder", "pooler"),
    describe=_layer,
    body=_body,
    heads=_heads,
    spaces=_spaces,
)
