"""MPNet: BERT with one relative-position bias per head, which all layers share."""

from __future__ import annotations

from fedrot.symmetry.describe.family import POST_NORM, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import Block, attention, together
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import Space, norm
from fedrot.symmetry.describe.task_heads import AFTER_DENSE, POOLED, POOLER, ROBERTA
from fedrot.symmetry.families.encoders.bert import KINDS, embeddings, neurons
from fedrot.symmetry.signs import SignedPermutation

_ORDER = "encoder.heads"


def _layer(config: Config, names: Names, p: str) -> tuple[Block, Block]:
    projections = Projections.separate(f"{p}attention.attn.", "qkvo")
    return (
        attention(p, Heads.of(config), projections, order=_ORDER),
        together(norm(f"{p}attention.LayerNorm"), neurons(config, p)),
    )


FAMILY = Family(
    name="mpnet",
    model_types=("mpnet",),
    stream=POST_NORM,
    body=(
        embeddings(KINDS[:2]),
        Stack(
            "encoder.layer",
            "num_hidden_layers",
            _layer,
            order=_ORDER,
            head_bias="encoder.relative_attention_bias.weight",
        ),
    ),
    task_heads=(POOLED, ROBERTA),
    spaces={
        "pooler": Space(SignedPermutation, present=POOLER),
        "classifier": Space(SignedPermutation),
    },
    inside=("pooler",),
    features=AFTER_DENSE,
)
