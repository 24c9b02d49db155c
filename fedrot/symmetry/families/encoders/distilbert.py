"""DistilBERT: BERT's groups under its own module names. Left unused as in BERT."""

from __future__ import annotations

from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _layer(config: Config, layer: int) -> Block:
    p, heads = f"transformer.layer.{layer}.", config["n_heads"]
    return together(
        attention(
            p,
            layer,
            Heads(heads, config["dim"] // heads),
            query=Units(f"{p}attention.q_lin"),
            key=Units(f"{p}attention.k_lin"),
            value=Units(f"{p}attention.v_lin"),
            output=Units(f"{p}attention.out_lin"),
        ),
        norm(f"{p}sa_layer_norm"),
        feed_forward(
            p, layer, config["hidden_dim"], up=Units(f"{p}ffn.lin1"), down=Units(f"{p}ffn.lin2")
        ),
        norm(f"{p}output_layer_norm"),
    )


def _body(config: Config, names: Names) -> Block:
    return together(
        embedding("embeddings.word_embeddings"),
        embedding("embeddings.position_embeddings"),
        norm("embeddings.LayerNorm"),
        *(_layer(config, layer) for layer in range(config["n_layers"])),
    )


def _heads(config: Config, names: Names) -> Axes:
    classified = "pre_classifier" if "pre_classifier.weight" in names else RESIDUAL
    # The language-model head leads back to the residual stream: it shares the embeddings' table.
    return merged(
        linear("pre_classifier", "pre_classifier", RESIDUAL),
        linear("classifier", None, classified),
        linear("qa_outputs", None, RESIDUAL),
        linear("vocab_transform", RESIDUAL, RESIDUAL),
        norm("vocab_layer_norm"),
        linear("vocab_projector", None, RESIDUAL),
        {"embeddings.position_ids": (None, None)},
    )


FAMILY = Family(
    name="distilbert",
    model_types=("distilbert",),
    stacks=("transformer.layer",),
    body=_body,
    heads=_heads,
    encoder=("embeddings", "transformer"),
)
