"""OPT: a pre-norm decoder; 350m is post-norm, with embeddings of fewer dimensions."""

from __future__ import annotations

from fedrot.symmetry.describe.family import Config, Family, Names, Stack, When, optional
from fedrot.symmetry.describe.layers import (
    Block,
    attention,
    feed_forward_of,
    last_norm,
    pre_normed,
    together,
)
from fedrot.symmetry.describe.projections import Q_K_V_OUT, Heads, Projections
from fedrot.symmetry.describe.spaces import RESIDUAL, Space, embedding, norm
from fedrot.symmetry.describe.task_heads import UNMEASURED, read_out


def _layer(config: Config, names: Names, p: str) -> Block:
    bias = config.get("enable_bias", True)
    projections = Projections.separate(f"{p}self_attn.", Q_K_V_OUT, bias)
    blocks = {
        "self_attn_layer_norm": attention(p, Heads.of(config), projections),
        "final_layer_norm": feed_forward_of(p, config["ffn_dim"], "fc1 fc2", bias),
    }
    if config.get("do_layer_norm_before", True):
        return pre_normed(p, **blocks)
    return together(*blocks.values(), *(norm(p + name) for name in blocks))


def _has_last_norm(config: Config, names: Names) -> bool:
    return config.get("do_layer_norm_before", True) and not config.get(
        "_remove_final_layer_norm", False
    )


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    stream="rotated; permuted in opt-350m, which has norms after its blocks",
    body=(
        embedding("decoder.embed_tokens", "embedding"),
        embedding("decoder.embed_positions"),
        *optional(
            {
                "decoder.project_in.weight": (RESIDUAL, "embedding"),
                "decoder.project_out.weight": ("embedding", RESIDUAL),
            }
        ),
        Stack("decoder.layers", "num_hidden_layers", _layer),
        When(_has_last_norm, (last_norm("decoder.final_layer_norm"),)),
    ),
    task_heads=(read_out("embedding"),),
    spaces={"embedding": Space(present="decoder.project_in.weight")},
    features=UNMEASURED,
)
