"""ELECTRA: BERT's layers, with embeddings that may have fewer dimensions."""

from __future__ import annotations

from fedrot.symmetry.describe.family import POST_NORM, Family, Stack, optional
from fedrot.symmetry.describe.spaces import RESIDUAL, Space, linear
from fedrot.symmetry.describe.task_heads import (
    OPEN_ACTIVATION,
    AfterNorm,
    masked_lm,
    read_out,
    two_layers,
)
from fedrot.symmetry.families.encoders.bert import TABLES, embeddings, layer

FAMILY = Family(
    name="electra",
    model_types=("electra",),
    stream=POST_NORM,
    body=(
        embeddings(TABLES, "embedding"),
        *optional(linear("embeddings_project", RESIDUAL, "embedding")),
        Stack("encoder.layer", "num_hidden_layers", layer),
    ),
    task_heads=(
        read_out(modules="classifier qa_outputs"),
        two_layers("classifier", "classifier"),
        masked_lm(
            "generator_predictions", "LayerNorm", "generator_lm_head", "embedding"
        ),
        two_layers(
            "discriminator_predictions", "discriminator", last="dense_prediction"
        ),
    ),
    spaces={"embedding": Space(present="embeddings_project.weight")},
    hidden=AfterNorm("output.LayerNorm"),
    features=OPEN_ACTIVATION,
)
