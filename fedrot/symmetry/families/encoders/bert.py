"""BERT, and RoBERTa, XLM-R and CamemBERT, which share its module names."""

from __future__ import annotations

from collections.abc import Sequence

from fedrot.symmetry.describe.family import POST_NORM, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import Block, attention, feed_forward_of, together
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import (
    RESIDUAL,
    Axes,
    Space,
    embedding,
    linear,
    merged,
    norm,
)
from fedrot.symmetry.describe.task_heads import (
    AFTER_DENSE,
    AFTER_POOLER,
    POOLED,
    POOLER,
    ROBERTA,
    AfterNorm,
    masked_lm,
)
from fedrot.symmetry.signs import SignedPermutation


def embeddings(tables: Sequence[str], space: str = RESIDUAL) -> Axes:
    """Return tables of embeddings, and the norm after them."""
    axes = (embedding(f"embeddings.{name}_embeddings", space) for name in tables)
    return merged(*axes, norm("embeddings.LayerNorm", space))


#: The tables of BERT's embeddings.
TABLES = ("word", "position", "token_type")

#: The spaces of BERT's and RoBERTa's task heads, where a model has them.
SPACES = {
    "pooler": Space(SignedPermutation, present=POOLER),
    "classifier": Space(SignedPermutation),
}


def neurons(config: Config, p: str) -> Block:
    """Return the feed-forward block of a layer, and the norm after it."""
    modules = "intermediate.dense output.dense"
    return together(
        feed_forward_of(p, config["intermediate_size"], modules),
        norm(f"{p}output.LayerNorm"),
    )


def layer(config: Config, names: Names, p: str) -> Block:
    """Return one layer."""
    projections = Projections.separate(
        f"{p}attention.", "self.query self.key self.value output.dense"
    )
    return together(
        attention(p, Heads.of(config), projections),
        norm(f"{p}attention.output.LayerNorm"),
        neurons(config, p),
    )


FAMILY = Family(
    name="bert",
    model_types=("bert", "roberta", "xlm-roberta", "camembert"),
    stream=POST_NORM,
    body=(
        embeddings(TABLES),
        Stack("encoder.layer", "num_hidden_layers", layer),
    ),
    task_heads=(
        POOLED,
        ROBERTA,
        linear("cls.seq_relationship", None, "pooler"),
        masked_lm("cls.predictions.transform", "LayerNorm", "cls.predictions.decoder"),
    ),
    spaces=SPACES,
    inside=("pooler",),
    hidden=AfterNorm("output.LayerNorm"),
    features={
        "bert": AFTER_POOLER,
        "roberta": AFTER_DENSE,
        "xlm-roberta": AFTER_DENSE,
        "camembert": AFTER_DENSE,
    },
)
