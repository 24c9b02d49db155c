"""The methods of the papers to match two models, in the registry of ``fedrot barrier``."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from fedrot.alignment import alignment_of
from fedrot.errors import FedrotError
from fedrot.learning import loss_of
from fedrot.simulations.barrier.barrier_methods import (
    EAGER,
    METHODS,
    STREAM,
    VANILLA,
    WHOLE,
    Batches,
    MatchingMethod,
    State,
)
from fedrot.symmetry import WHOLE_MODEL, Symmetry
from reproductions.barriers.invalid_controls import ignore_heads
from reproductions.learning import LearningOptions, learn_alignment


def _learned(anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches) -> State:
    """Learn matrices of the heads by gradient descent, starting from the aligned client."""
    return _refined(anchor, client, symmetry, batches, LearningOptions(general=True))


def _stream_learned(anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches) -> State:
    """Learn the rotation of the residual stream, starting from the aligned client."""
    options = LearningOptions(parts=("residual",), steps=150, lr=3e-3, points=(0.2, 0.8))
    return _refined(anchor, client, symmetry, batches, options)


def _refined(
    anchor: nn.Module,
    client: nn.Module,
    symmetry: Symmetry,
    batches: Batches,
    options: LearningOptions,
) -> State:
    if any(batch["labels"].isnan().any() for batch in batches):
        raise FedrotError(
            "Methods that learn need all labels of every row, and some are missing here, as in a task "
            "of several domains; choose other methods."
        )
    theirs, ours = client.state_dict(), anchor.state_dict()
    start = alignment_of((), theirs, ours, symmetry)
    small = [
        {name: value[i : i + 32] for name, value in batch.items()}
        for batch in batches
        for i in range(0, len(batch["labels"]), 32)
    ]
    loss = loss_of(copy.deepcopy(anchor).eval())
    learned = learn_alignment(loss, small, theirs, ours, symmetry, start, options)
    return learned.alignment.apply(theirs)


def _verma(*parts: str, residual: str = "first", **changes: Any) -> MatchingMethod:
    """Return a variant of Verma & Elbayad (2024): permutations found from correlations on data."""
    options = replace(EAGER, parts=parts, within_heads="permutation", activation_weight=1.0)
    how: dict[str, Any] = {"residual": residual, "heads": "correlation"}
    return MatchingMethod(options, "data", **{**how, **changes})


#: All methods, in the order of the published tables.
_ALL: dict[str, MatchingMethod] = {
    VANILLA: METHODS[VANILLA],
    # Zhang et al. (2025)
    "rotation": METHODS["rotation"],
    "rotation+heads": MatchingMethod(replace(EAGER, parts=("heads", "attention", "ffn"))),
    # Ainsworth et al. (2023): permutations found from weights
    "git-rebasin": MatchingMethod(replace(WHOLE, within_heads="permutation")),
    # Verma & Elbayad (2024): all of it as for GLUE (Table 3), by component (Figure 3, Table 1), the
    # residual stream alone (Table 2), and with less data (Figure 6)
    "verma": _verma("residual", "heads", "attention", "ffn"),
    "verma-ffn": _verma("ffn"),
    "verma-attention": _verma("heads", "attention"),
    "verma-monotonic": _verma("attention", "ffn"),
    "verma-ignore-heads": _verma("ffn", refine=ignore_heads),
    "verma-heads": _verma("heads", "attention", "ffn"),
    "verma-stream-first": _verma("residual"),
    "verma-stream-last": _verma("residual", residual="last"),
    "verma-stream-all": _verma("residual", residual="all"),
    "verma-heads@64": _verma("heads", "attention", "ffn", limit=64),
    "verma-heads@256": _verma("heads", "attention", "ffn", limit=256),
    "verma-heads@1024": _verma("heads", "attention", "ffn", limit=1024),
    "whole": METHODS["whole"],
    "whole+probe": MatchingMethod(WHOLE, "probe"),
    "whole+data": METHODS["whole+data"],
    # Alternatives to the defaults: other places of the residual stream's activations, and other
    # weights of activations.
    "whole+data@first": MatchingMethod(WHOLE, "data", residual="first"),
    "whole+data@last": MatchingMethod(WHOLE, "data", residual="last"),
    "whole+data@identity": MatchingMethod(replace(WHOLE, parts=WHOLE_MODEL[1:]), "data"),
    "whole+data@0.2": MatchingMethod(replace(WHOLE, activation_weight=0.2), "data"),
    "whole+data@0.8": MatchingMethod(replace(WHOLE, activation_weight=0.8), "data"),
    "whole+data@1": MatchingMethod(replace(WHOLE, activation_weight=1.0), "data"),
    "learned": MatchingMethod(WHOLE, "data", refine=_learned),
    # Rotations of the residual stream, for pre-norm models
    "stream": METHODS["stream"],
    "stream+probe": MatchingMethod(STREAM, "probe"),
    "stream+data": MatchingMethod(STREAM, "data"),
    "stream+data@0.8": MatchingMethod(replace(STREAM, activation_weight=0.8), "data"),
    "stream+data@1": MatchingMethod(replace(STREAM, activation_weight=1.0), "data"),
    "stream+learned": MatchingMethod(STREAM, "data", refine=_stream_learned),
}

# Tables list methods in the order of the registry.
METHODS.clear()
METHODS.update(_ALL)
