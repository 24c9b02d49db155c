"""DistilBERT: a smaller BERT with other module names."""

from __future__ import annotations

from fedrot.symmetry.describe.family import POST_NORM, Config, Family, Names, Stack
from fedrot.symmetry.describe.layers import Block, attention, feed_forward_of, together
from fedrot.symmetry.describe.projections import Heads, Projections
from fedrot.symmetry.describe.spaces import RESIDUAL, Space, linear, norm
from fedrot.symmetry.describe.task_heads import OPEN_ACTIVATION, AfterNorm
from fedrot.symmetry.families.encoders.bert import TABLES, embeddings


def _layer(config: Config, names: Names, p: str) -> Block:
    projections = Projections.separate(f"{p}attention.", "q_lin k_lin v_lin out_lin")
    return together(
        attention(p, Heads.of(config, "n_heads", "dim"), projections),
        norm(f"{p}sa_layer_norm"),
        feed_forward_of(p, config["hidden_dim"], "ffn.lin1 ffn.lin2"),
        norm(f"{p}output_layer_norm"),
    )


FAMILY = Family(
    name="distilbert",
    model_types=("distilbert",),
    stream=POST_NORM,
    body=(
        embeddings(TABLES[:2]),
        Stack("transformer.layer", "n_layers", _layer),
    ),
    task_heads=(
        linear("pre_classifier", "pre_classifier", RESIDUAL),
        linear("classifier", None, "pre_classifier"),
        linear("qa_outputs", None, RESIDUAL),
        # The language model's head writes the residual stream: it is tied to the
        # embeddings' table.
        linear("vocab_transform", RESIDUAL, RESIDUAL),
        norm("vocab_layer_norm"),
        linear("vocab_projector", None, RESIDUAL),
    ),
    spaces={"pre_classifier": Space(present="pre_classifier.weight")},
    hidden=AfterNorm("output_layer_norm"),
    features=OPEN_ACTIVATION,
)
