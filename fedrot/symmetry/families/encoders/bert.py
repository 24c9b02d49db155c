"""BERT and the encoders that share its module names: RoBERTa, XLM-R, CamemBERT, ELECTRA.

The claimed group is ``S_H ⋉ (O(d_h) x O(d_h) x R*^2)^H`` on the heads and ``S_{d_ff}`` on the neurons
of every layer, ``S_d`` on the residual stream (LayerNorm allows no more), and (signed) permutations
of the hidden units of the task heads. Left unused on purpose: the rest of ``GL(d_h)`` per head and
redundant biases of keys and values, because moving along them changes what weight decay and Adam see.
So are the redundant parameters of LayerNorm: biases (and the last gain) that what reads them could
hold, the mean of
the stream, which no norm sees, rows along the inverse gains, constants that embeddings trade, and one
sign of the whole stream.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedrot.symmetry.actions import Permutation, SignedPermutation
from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def neurons(config: Config, p: str, layer: int) -> Block:
    """Return the feed-forward block under the prefix ``p``, and the norm after it."""
    up, down = Units(f"{p}intermediate.dense"), Units(f"{p}output.dense")
    return together(
        feed_forward(p, layer, config["intermediate_size"], up, down),
        norm(f"{p}output.LayerNorm"),
    )


def _layer(config: Config, layer: int) -> Block:
    p, heads = f"encoder.layer.{layer}.", config["num_attention_heads"]
    return together(
        attention(
            p,
            layer,
            Heads(heads, config["hidden_size"] // heads),
            query=Units(f"{p}attention.self.query"),
            key=Units(f"{p}attention.self.key"),
            value=Units(f"{p}attention.self.value"),
            output=Units(f"{p}attention.output.dense"),
        ),
        norm(f"{p}attention.output.LayerNorm"),
        neurons(config, p, layer),
    )


def _embedded(names: Names) -> str:
    """ELECTRA may embed in fewer dimensions than its layers have."""
    return "embedding" if "embeddings_project.weight" in names else RESIDUAL


def _body(config: Config, names: Names) -> Block:
    embedded = _embedded(names)
    return together(
        embedding("embeddings.word_embeddings", embedded),
        embedding("embeddings.position_embeddings", embedded),
        embedding("embeddings.token_type_embeddings", embedded),
        norm("embeddings.LayerNorm", embedded),
        linear("embeddings_project", RESIDUAL, embedded) if embedded != RESIDUAL else {},
        *(_layer(config, layer) for layer in range(config["num_hidden_layers"])),
    )


def _heads(config: Config, names: Names) -> Axes:
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
    signed = ("pooler",) if config["model_type"] == "electra" else ("pooler", "classifier")
    return dict.fromkeys(signed, SignedPermutation)


FAMILY = Family(
    name="bert",
    model_types=("bert", "roberta", "xlm-roberta", "camembert", "electra"),
    stacks=("encoder.layer",),
    body=_body,
    heads=_heads,
    encoder=("embeddings", "embeddings_project", "encoder", "pooler"),
    spaces=_spaces,
)
