"""ELECTRA: BERT's layers, behind embeddings that may have fewer dimensions."""

from __future__ import annotations

from fedrot.symmetry.families.encoders.bert import layer
from fedrot.symmetry.family import Family, Stack, When
from fedrot.symmetry.spaces import RESIDUAL, Space, embedding, linear, norm
from fedrot.symmetry.task_heads import masked_lm, read_out, two_layers

_PROJECTED = "embeddings_project.weight"

FAMILY = Family(
    name="electra",
    model_types=("electra",),
    body=(
        embedding("embeddings.word_embeddings", "embedding"),
        embedding("embeddings.position_embeddings", "embedding"),
        embedding("embeddings.token_type_embeddings", "embedding"),
        norm("embeddings.LayerNorm", "embedding"),
        When(_PROJECTED, (linear("embeddings_project", RESIDUAL, "embedding"),)),
        Stack("encoder.layer", "num_hidden_layers", layer),
    ),
    task_heads=(
        read_out(modules="classifier qa_outputs"),
        two_layers("classifier", "classifier"),
        masked_lm("generator_predictions", "LayerNorm", "generator_lm_head", "embedding"),
        two_layers("discriminator_predictions", "discriminator", last="dense_prediction"),
    ),
    spaces={"embedding": Space(present=_PROJECTED)},
)
