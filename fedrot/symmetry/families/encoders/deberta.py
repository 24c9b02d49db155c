"""DeBERTa v1, v2 and v3: attention with relative positions, whose projections turn with the content's.

Positions have projections of their own, or (v2 and v3 with ``share_att_key``) the content's. v1 fuses
query, key and value of each head.
"""

from __future__ import annotations

from fedrot.symmetry.families.encoders.bert import neurons
from fedrot.symmetry.family import Config, Family, Names, Stack, When
from fedrot.symmetry.layers import Block, Heads, Projections, Units, attention, together
from fedrot.symmetry.spaces import RESIDUAL, Space, embedding, norm
from fedrot.symmetry.task_heads import POOLED, POOLER, masked_lm

_SMALL = "embeddings.embed_proj.weight"
_WORDS = "embeddings.word_embeddings"


def _relative(config: Config, kind: str) -> bool:
    """Whether positions take part in attention, as ``c2p`` or as ``p2c``."""
    kinds = config.get("pos_att_type") or ()
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    return bool(config.get("relative_attention", False)) and kind in kinds


def _projections(config: Config, p: str, dim: int) -> Projections:
    q, output = f"{p}attention.self.", Units(f"{p}attention.output.dense")
    to_content, to_positions = _relative(config, "p2c"), _relative(config, "c2p")
    if config["model_type"] == "deberta":
        packed, every = f"{q}in_proj", 3 * dim
        return Projections(
            Units(packed, f"{q}q_bias", 0, every),
            Units(packed, False, dim, every),
            Units(packed, f"{q}v_bias", 2 * dim, every),
            output,
            queries=(Units(f"{q}pos_q_proj"),) if to_content else (),
            keys=(Units(f"{q}pos_proj", bias=False),) if to_positions else (),
        )
    query, key, value = (Units(f"{q}{name}_proj") for name in ("query", "key", "value"))
    own = not config.get("share_att_key", False)
    return Projections(
        *(query, key, value, output),
        queries=(Units(f"{q}pos_query_proj"),) if own and to_content else (),
        keys=(Units(f"{q}pos_key_proj"),) if own and to_positions else (),
        key_bias_seen=to_content,
    )


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = Heads.of(config)
    return together(
        attention(p, heads, _projections(config, p, heads.dim)),
        norm(f"{p}attention.output.LayerNorm"),
        neurons(config, p),
    )


_CONV = "encoder.conv.conv"

FAMILY = Family(
    name="deberta",
    model_types=("deberta", "deberta-v2"),
    body=(
        embedding(_WORDS, "embedding"),
        norm("embeddings.LayerNorm"),
        When(
            lambda config, names: config.get("relative_attention", False),
            (embedding("encoder.rel_embeddings"),),
        ),
        *(
            When(
                f"embeddings.{kind}_embeddings.weight",
                (embedding(f"embeddings.{kind}_embeddings", "embedding"),),
            )
            for kind in ("position", "token_type")
        ),
        When(_SMALL, ({_SMALL: (RESIDUAL, "embedding")},)),
        When("encoder.LayerNorm.weight", (norm("encoder.LayerNorm"),)),
        When(
            f"{_CONV}.weight",
            (
                {f"{_CONV}.weight": (RESIDUAL, RESIDUAL, None), f"{_CONV}.bias": (RESIDUAL,)},
                norm("encoder.conv.LayerNorm"),
            ),
        ),
        Stack("encoder.layer", "num_hidden_layers", _layer),
    ),
    task_heads=(
        POOLED,
        masked_lm("cls.predictions.transform", "LayerNorm", "cls.predictions.decoder", "embedding"),
        masked_lm("lm_predictions.lm_head", "LayerNorm", "lm_predictions.lm_head.decoder", "embedding"),
        # This head has no decoder of its own: it reads out the word embeddings.
        When("lm_predictions.lm_head.bias", ({f"{_WORDS}.weight": (None, "embedding")},)),
    ),
    spaces={"embedding": Space(present=_SMALL), "pooler": Space(present=POOLER)},
)
