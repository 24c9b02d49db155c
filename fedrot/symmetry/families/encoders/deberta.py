"""DeBERTa v1, v2 and v3: BERT with relative positions in the attention.

Positions have separate projections, or use those of the content (v2 and v3 with
``share_att_key``). In v1, one module holds query, key and value of each head.
"""

from __future__ import annotations

from dataclasses import replace

from fedrot.symmetry.describe.family import (
    POST_NORM,
    Config,
    Family,
    Names,
    Stack,
    When,
    optional,
)
from fedrot.symmetry.describe.layers import Block, attention, together
from fedrot.symmetry.describe.projections import Heads, Projections, Units, units
from fedrot.symmetry.describe.spaces import RESIDUAL, Space, embedding, norm
from fedrot.symmetry.describe.task_heads import (
    OPEN_ACTIVATION,
    POOLED,
    POOLER,
    masked_lm,
)
from fedrot.symmetry.families.encoders.bert import neurons

_SMALL = "embeddings.embed_proj.weight"
_WORDS = "embeddings.word_embeddings"


def _relative(config: Config, kind: str) -> bool:
    """Return whether attention uses positions, as ``c2p`` or as ``p2c``."""
    kinds = config.get("pos_att_type") or ()
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    return bool(config.get("relative_attention", False)) and kind in kinds


def _projections(config: Config, p: str, heads: Heads) -> Projections:
    q = f"{p}attention.self."
    first = config["model_type"] == "deberta"
    if first:
        fused = f"{q}in_proj"
        output = Units(f"{p}attention.output.dense")
        content = Projections.fused(fused, heads, output, bias=False, by_head=True)
        query = replace(content.query, bias=f"{q}q_bias")
        value = replace(content.value, bias=f"{q}v_bias")
        content = replace(content, query=query, value=value)
        queries = Units(f"{q}pos_q_proj")
        keys = Units(f"{q}pos_proj", bias=False)
    else:
        content = Projections.separate(
            f"{p}attention.",
            "self.query_proj self.key_proj self.value_proj output.dense",
        )
        queries, keys = units(q, "pos_query_proj pos_key_proj")
    separate = first or not config.get("share_att_key", False)
    return replace(
        content,
        queries=(queries,) if separate and _relative(config, "p2c") else (),
        keys=(keys,) if separate and _relative(config, "c2p") else (),
        key_bias_seen=_relative(config, "p2c"),
    )


def _layer(config: Config, names: Names, p: str) -> Block:
    heads = Heads.of(config)
    return together(
        attention(p, heads, _projections(config, p, heads)),
        norm(f"{p}attention.output.LayerNorm"),
        neurons(config, p),
    )


FAMILY = Family(
    name="deberta",
    model_types=("deberta", "deberta-v2"),
    stream=POST_NORM,
    body=(
        embedding(_WORDS, "embedding"),
        norm("embeddings.LayerNorm"),
        When(
            lambda config, names: config.get("relative_attention", False),
            (embedding("encoder.rel_embeddings"),),
        ),
        *optional(
            embedding("embeddings.position_embeddings", "embedding"),
            embedding("embeddings.token_type_embeddings", "embedding"),
            {_SMALL: (RESIDUAL, "embedding")},
            norm("encoder.LayerNorm"),
            {"encoder.conv.conv.weight": (RESIDUAL, RESIDUAL, None)},
            {"encoder.conv.conv.bias": (RESIDUAL,)},
            norm("encoder.conv.LayerNorm"),
        ),
        Stack("encoder.layer", "num_hidden_layers", _layer),
    ),
    task_heads=(
        POOLED,
        masked_lm(
            "cls.predictions.transform",
            "LayerNorm",
            "cls.predictions.decoder",
            "embedding",
        ),
        masked_lm(
            "lm_predictions.lm_head",
            "LayerNorm",
            "lm_predictions.lm_head.decoder",
            "embedding",
        ),
        # This task head has no decoder: it multiplies by the word embeddings.
        When(
            "lm_predictions.lm_head.bias", ({f"{_WORDS}.weight": (None, "embedding")},)
        ),
    ),
    spaces={"embedding": Space(present=_SMALL), "pooler": Space(present=POOLER)},
    features=OPEN_ACTIVATION,
)
