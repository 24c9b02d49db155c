"""DeBERTa v1, v2 and v3: BERT's groups, with what relative positions are projected by.

Queries and keys of content and of positions live in the same coordinates of a head: one rotation moves
the content projections together with the positions', which are projections of their own, or (v2 and v3
with ``share_att_key``) the content's. v1 packs the three projections of each head side by side.

Left unused: the rest of ``GL(d_h)``, redundant biases of values, those of LayerNorm as in BERT, and,
where
positions have projections of their own, ``GL(d)`` and one constant of the relative positions, and the
bias of their keys. The key bias is not redundant where positions attend to content (``p2c``).
"""

from __future__ import annotations

from fedrot.symmetry.families.encoders.bert import neurons
from fedrot.symmetry.family import Config, Family, Names
from fedrot.symmetry.layers import Block, Heads, Units, attention, together
from fedrot.symmetry.spaces import RESIDUAL, Axes, embedding, linear, merged, norm


def _relative(config: Config, kind: str) -> bool:
    """Whether positions take part in attention, as ``c2p`` or as ``p2c``."""
    kinds = config.get("pos_att_type") or ()
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    return bool(config.get("relative_attention", False)) and kind in kinds


def _packed(config: Config, layer: int) -> Block:
    p, heads = f"encoder.layer.{layer}.attention.self.", config["num_attention_heads"]
    dim = config["hidden_size"] // heads
    packed, every = f"{p}in_proj", 3 * dim
    return attention(
        f"encoder.layer.{layer}.",
        layer,
        Heads(heads, dim),
        query=Units(packed, bias=f"{p}q_bias", every=every),
        key=Units(packed, bias=False, start=dim, every=every),
        value=Units(packed, bias=f"{p}v_bias", start=2 * dim, every=every),
        output=Units(f"encoder.layer.{layer}.attention.output.dense"),
        queries=[Units(f"{p}pos_q_proj")] if _relative(config, "p2c") else [],
        keys=[Units(f"{p}pos_proj", bias=False)] if _relative(config, "c2p") else [],
    )


def _separate(config: Config, layer: int) -> Block:
    p, heads = f"encoder.layer.{layer}.attention.self.", config["num_attention_heads"]
    own = not config.get("share_att_key", False)
    return attention(
        f"encoder.layer.{layer}.",
        layer,
        Heads(heads, config["hidden_size"] // heads),
        query=Units(f"{p}query_proj"),
        key=Units(f"{p}key_proj"),
        value=Units(f"{p}value_proj"),
        output=Units(f"encoder.layer.{layer}.attention.output.dense"),
        queries=[Units(f"{p}pos_query_proj")] if own and _relative(config, "p2c") else [],
        keys=[Units(f"{p}pos_key_proj")] if own and _relative(config, "c2p") else [],
        key_bias_seen=_relative(config, "p2c"),
    )


def _layer(config: Config, layer: int) -> Block:
    p = f"encoder.layer.{layer}."
    return together(
        (_packed if config["model_type"] == "deberta" else _separate)(config, layer),
        norm(f"{p}attention.output.LayerNorm"),
        neurons(config, p, layer),
    )


def _embedded(names: Names) -> str:
    return "embedding" if "embeddings.embed_proj.weight" in names else RESIDUAL


def _body(config: Config, names: Names) -> Block:
    embedded = _embedded(names)
    optional: Axes = merged(
        embedding("embeddings.position_embeddings", embedded),
        embedding("embeddings.token_type_embeddings", embedded),
        {"embeddings.embed_proj.weight": (RESIDUAL, embedded)},
        norm("encoder.LayerNorm"),
        {"encoder.conv.conv.weight": (RESIDUAL, RESIDUAL, None), "encoder.conv.conv.bias": (RESIDUAL,)},
        norm("encoder.conv.LayerNorm"),
    )
    return together(
        embedding("embeddings.word_embeddings", embedded),
        norm("embeddings.LayerNorm"),
        embedding("encoder.rel_embeddings") if config.get("relative_attention", False) else {},
        {name: axes for name, axes in optional.items() if name in names},
        *(_layer(config, layer) for layer in range(config["num_hidden_layers"])),
    )


def _heads(config: Config, names: Names) -> Axes:
    embedded = _embedded(names)
    # This head has no decoder of its own: it reads out the word embeddings.
    tied = {"embeddings.word_embeddings.weight": (None, embedded)}
    return merged(
        linear("pooler.dense", "pooler", RESIDUAL),
        linear("classifier", None, "pooler" if "pooler.dense.weight" in names else RESIDUAL),
        linear("qa_outputs", None, RESIDUAL),
        linear("cls.predictions.transform.dense", embedded, RESIDUAL),
        norm("cls.predictions.transform.LayerNorm", embedded),
        linear("cls.predictions.decoder", None, embedded),
        {"cls.predictions.bias": (None,)},
        linear("lm_predictions.lm_head.dense", embedded, RESIDUAL),
        norm("lm_predictions.lm_head.LayerNorm", embedded),
        {"lm_predictions.lm_head.bias": (None,), "embeddings.position_ids": (None, None)},
        tied if "lm_predictions.lm_head.bias" in names else {},
    )


FAMILY = Family(
    name="deberta",
    model_types=("deberta", "deberta-v2"),
    stacks=("encoder.layer",),
    body=_body,
    heads=_heads,
    encoder=("embeddings", "encoder"),
)
