"""MPNet: BERT with one relative-position bias per head, which all layers share."""

from __future__ import annotations

from fedrot.symmetry.describe.family import POST_NORM, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import Block, attention, together
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import norm
from fedrot.symmetry.describe.task_heads import AFTER_DENSE, POOLED, ROBERTA, AfterNorm
from fedrot.symmetry.families.encoders.bert import (
    SPACES,
    TABLES,
    embeddings,
    neurons,
)

_ORDER = "encoder.heads"


def _layer(config: Config, names: Names, p: str) -> tuple[Block, Block]:
    projections = Projections.separate(f"{p}attention.attn.", "q k v o")
    return (
        attention(p, Heads.of(config), projections, order=_ORDER),
        together(norm(f"{p}attention.LayerNorm"), neurons(config, p)),
    )


FAMILY = Family(
    name="mpnet",
    model_types=("mpnet",),
    stream=POST_NORM,
    body=(
        embeddings(TABLES[:2]),
        Stack(
            "encoder.layer",
            "num_hidden_layers",
            _layer,
            order=_ORDER,
            head_bias="encoder.relative_attention_bias.weight",
        ),
    ),
    task_heads=(POOLED, ROBERTA),
    spaces=SPACES,
    inside=("pooler",),
    hidden=AfterNorm("output.LayerNorm"),
    features=AFTER_DENSE,
)
