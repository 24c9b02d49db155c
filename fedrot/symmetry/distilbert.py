"""DistilBERT: BERT's groups under its own module names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedrot.symmetry.axes import RESIDUAL, Axes, embedding, linear, merged, norm
from fedrot.symmetry.blocks import attention, feed_forward
from fedrot.symmetry.description import Group
from fedrot.symmetry.family import Config, Family
from fedrot.symmetry.kinds import Permutation


def _layer(config: Config, layer: int) -> tuple[Group, ...]:
    prefix, heads = f"transformer.layer.{layer}.", config["n_heads"]
    return (
        *attention(
            layer,
            prefix,
            query="attention.q_lin",
            key="attention.k_lin",
            value="attention.v_lin",
            output="attention.out_lin",
            heads=heads,
            dim=config["dim"] // heads,
        ),
        *feed_forward(layer, prefix, up="ffn.lin1", down="ffn.lin2", neurons=config["hidden_dim"]),
    )


def _body(config: Config, layers: int, names: Collection[str]) -> Axes:
    inside = [
        merged(
            linear(f"transformer.layer.{layer}.attention.q_lin", None, RESIDUAL),
            linear(f"transformer.layer.{layer}.attention.k_lin", None, RESIDUAL),
            linear(f"transformer.layer.{layer}.attention.v_lin", None, RESIDUAL),
            linear(f"transformer.layer.{layer}.attention.out_lin", RESIDUAL, None),
            norm(f"transformer.layer.{layer}.sa_layer_norm", RESIDUAL),
            linear(f"transformer.layer.{layer}.ffn.lin1", None, RESIDUAL),
            linear(f"transformer.layer.{layer}.ffn.lin2", RESIDUAL, None),
            norm(f"transformer.layer.{layer}.output_layer_norm", RESIDUAL),
        )
        for layer in range(layers)
    ]
    return merged(
        embedding("embeddings.word_embeddings", RESIDUAL),
        embedding("embeddings.position_embeddings", RESIDUAL),
        norm("embeddings.LayerNorm", RESIDUAL),
        *inside,
    )


def _heads(config: Config, names: Collection[str]) -> Axes:
    classified = "pre_classifier" if "pre_classifier.weight" in names else RESIDUAL
    # The language-model head leads back to the residual stream: it shares the embeddings' table.
    return merged(
        linear("pre_classifier", "pre_classifier", RESIDUAL),
        linear("classifier", None, classified),
        linear("qa_outputs", None, RESIDUAL),
        linear("vocab_transform", RESIDUAL, RESIDUAL),
        norm("vocab_layer_norm", RESIDUAL),
        linear("vocab_projector", None, RESIDUAL),
        {"embeddings.position_ids": (None, None)},
    )


def _spaces(config: Config) -> Mapping[str, type[Permutation]]:
    return {"pre_classifier": Permutation}


FAMILY = Family(
    name="distilbert",
    model_types=("distilbert",),
    layers_key="n_layers",
    stack="transformer.layer",
    encoder=("embeddings", "transformer"),
    describe=_layer,
    body=_body,
    heads=_heads,
    spaces=_spaces,
)
