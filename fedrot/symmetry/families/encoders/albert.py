"""ALBERT: layers that share parameters are described once; embeddings are smaller."""

from __future__ import annotations

from fedrot.symmetry.describe.family import POST_NORM, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import Block, attention, feed_forward_of, together
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import RESIDUAL, Space, linear, norm
from fedrot.symmetry.describe.task_heads import AfterNorm, AfterTanh, masked_lm
from fedrot.symmetry.families.encoders.bert import TABLES, embeddings
from fedrot.symmetry.signs import SignedPermutation


def _layer(config: Config, names: Names, p: str) -> Block:
    projections = Projections.separate(f"{p}attention.", "query key value dense")
    return together(
        attention(p, Heads.of(config), projections),
        norm(f"{p}attention.LayerNorm"),
        feed_forward_of(p, config["intermediate_size"], "ffn ffn_output"),
        norm(f"{p}full_layer_layer_norm"),
    )


FAMILY = Family(
    name="albert",
    model_types=("albert",),
    stream=POST_NORM,
    body=(
        embeddings(TABLES, "embedding"),
        linear("encoder.embedding_hidden_mapping_in", RESIDUAL, "embedding"),
        Stack(
            "encoder.albert_layer_groups",
            "num_hidden_groups",
            Stack("albert_layers", "inner_group_num", _layer),
        ),
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
    hidden=AfterNorm("full_layer_layer_norm"),
    features=AfterTanh("pooler"),
)
