"""BERT (also RoBERTa, XLM-R, CamemBERT), and its relatives: ELECTRA, DistilBERT, MPNet, ALBERT."""

from __future__ import annotations

from collections.abc import Sequence

from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.family import Config, Family, Names, Stack, optional
from fedrot.symmetry.layers import Block, Heads, Projections, Units, attention, feed_forward, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, Space, embedding, linear, merged, norm
from fedrot.symmetry.task_heads import POOLED, POOLER, ROBERTA, masked_lm, read_out, two_layers


def embeddings(kinds: Sequence[str], space: str = RESIDUAL) -> Axes:
    """Return tables of embeddings, and the norm after them."""
    tables = (embedding(f"embeddings.{kind}_embeddings", space) for kind in kinds)
    return merged(*tables, norm("embeddings.LayerNorm", space))


#: The tables of BERT's embeddings.
KINDS = ("word", "position", "token_type")


def neurons(config: Config, p: str) -> Block:
    """Return the feed-forward block of a layer, and the norm after it."""
    up, down = Units(f"{p}intermediate.dense"), Units(f"{p}output.dense")
    return together(feed_forward(p, config["intermediate_size"], up, down), norm(f"{p}output.LayerNorm"))


def layer(config: Config, names: Names, p: str) -> Block:
    """Return one layer."""
    modules = ("self.query", "self.key", "self.value", "output.dense")
    projections = Projections.separate(f"{p}attention.", modules)
    return together(
        attention(p, Heads.of(config), projections),
        norm(f"{p}attention.output.LayerNorm"),
        neurons(config, p),
    )


BERT = Family(
    name="bert",
    model_types=("bert", "roberta", "xlm-roberta", "camembert"),
    body=(embeddings(KINDS), Stack("encoder.layer", "num_hidden_layers", layer)),
    task_heads=(
        POOLED,
        ROBERTA,
        linear("cls.seq_relationship", None, "pooler"),
        masked_lm("cls.predictions.transform", "LayerNorm", "cls.predictions.decoder"),
    ),
    spaces={"pooler": Space(SignedPermutation, present=POOLER), "classifier": Space(SignedPermutation)},
    inside=("pooler",),
)

# BERT's layers, behind embeddings that may have fewer dimensions.
ELECTRA = Family(
    name="electra",
    model_types=("electra",),
    body=(
        embeddings(KINDS, "embedding"),
        *optional(linear("embeddings_project", RESIDUAL, "embedding")),
        Stack("encoder.layer", "num_hidden_layers", layer),
    ),
    task_heads=(
        read_out(modules="classifier qa_outputs"),
        two_layers("classifier", "classifier"),
        masked_lm("generator_predictions", "LayerNorm", "generator_lm_head", "embedding"),
        two_layers("discriminator_predictions", "discriminator", last="dense_prediction"),
    ),
    spaces={"embedding": Space(present="embeddings_project.weight")},
)


def _distilbert_layer(config: Config, names: Names, p: str) -> Block:
    """DistilBERT: a smaller BERT under module names of its own."""
    projections = Projections.separate(f"{p}attention.", ("q_lin", "k_lin", "v_lin", "out_lin"))
    up, down = Units(f"{p}ffn.lin1"), Units(f"{p}ffn.lin2")
    return together(
        attention(p, Heads.of(config, "n_heads", "dim"), projections),
        norm(f"{p}sa_layer_norm"),
        feed_forward(p, config["hidden_dim"], up, down),
        norm(f"{p}output_layer_norm"),
    )


DISTILBERT = Family(
    name="distilbert",
    model_types=("distilbert",),
    body=(embeddings(KINDS[:2]), Stack("transformer.layer", "n_layers", _distilbert_layer)),
    task_heads=(
        linear("pre_classifier", "pre_classifier", RESIDUAL),
        linear("classifier", None, "pre_classifier"),
        linear("qa_outputs", None, RESIDUAL),
        # The language model's head leads back to the residual stream: it shares the embeddings' table.
        linear("vocab_transform", RESIDUAL, RESIDUAL),
        norm("vocab_layer_norm"),
        linear("vocab_projector", None, RESIDUAL),
    ),
    spaces={"pre_classifier": Space(present="pre_classifier.weight")},
)


_MPNET_BIAS = "encoder.relative_attention_bias.weight"


def _mpnet_layer(config: Config, names: Names, p: str) -> tuple[Block, Block]:
    """MPNet: one relative-position bias per head, which all layers share."""
    projections = Projections.separate(f"{p}attention.attn.", "qkvo")
    return (
        attention(p, Heads.of(config), projections, order="encoder.heads"),
        together(norm(f"{p}attention.LayerNorm"), neurons(config, p)),
    )


MPNET = Family(
    name="mpnet",
    model_types=("mpnet",),
    body=(
        embeddings(KINDS[:2]),
        Stack("encoder.layer", "num_hidden_layers", _mpnet_layer, "", "encoder.heads", _MPNET_BIAS),
    ),
    task_heads=(POOLED, ROBERTA),
    spaces=BERT.spaces,
    inside=("pooler",),
)


def _albert_layer(config: Config, names: Names, p: str) -> Block:
    """ALBERT: layers that share parameters are described once."""
    projections = Projections.separate(f"{p}attention.", ("query", "key", "value", "dense"))
    up, down = Units(f"{p}ffn"), Units(f"{p}ffn_output")
    return together(
        attention(p, Heads.of(config), projections),
        norm(f"{p}attention.LayerNorm"),
        feed_forward(p, config["intermediate_size"], up, down),
        norm(f"{p}full_layer_layer_norm"),
    )


_ALBERT_GROUP = Stack("albert_layers", "inner_group_num", _albert_layer)

ALBERT = Family(
    name="albert",
    model_types=("albert",),
    body=(
        embeddings(KINDS, "embedding"),
        linear("encoder.embedding_hidden_mapping_in", RESIDUAL, "embedding"),
        Stack("encoder.albert_layer_groups", "num_hidden_groups", _ALBERT_GROUP),
    ),
    task_heads=(
        linear("pooler", "pooler", RESIDUAL),
        linear("classifier", None, "pooler"),
        linear("sop_classifier.classifier", None, "pooler"),
        linear("qa_outputs", None, RESIDUAL),
        masked_lm("predictions", "LayerNorm", "predictions.decoder", "embedding"),
    ),
    spaces={"pooler": Space(SignedPermutation, present="pooler.weight")},
    inside=("pooler",),
)
