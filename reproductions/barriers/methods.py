"""Methods of the papers to match two models before the loss on the line between them is
measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor, nn

from fedrot.alignment.align import align, alignment_of
from fedrot.alignment.learning import learn_alignment, loss_of
from fedrot.collect.activations import Activations, Moments, collect_activations
from fedrot.collect.random_inputs import random_inputs
from fedrot.options import AlignmentOptions
from fedrot.symmetry import WHOLE_MODEL, Symmetry
from fedrot.symmetry.canonical import canonical, check_rotates
from reproductions.ensemble import with_state
from reproductions.learning import LearningOptions

State = dict[str, Tensor]
#: Batches of a training step: the models' inputs, and ``labels``.
Batches = Sequence[Mapping[str, Tensor]]

#: Function of (anchor, aligned client, symmetry, batches) that returns the client's new
#: tensors.
Refine = Callable[[nn.Module, nn.Module, Symmetry, Batches], State]


@dataclass(frozen=True)
class MatchingMethod:
    """A way to match a client's model to the anchor's.

    Attributes:
        options: alignment options; None: nothing is aligned.
        evidence: ``weights``, or weights and activations: on random tokens (``probe``)
            or on training rows (``data``).
        residual, heads: which activations, as in ``fedrot.collect_activations``.
        limit: the number of training rows that are used; 0 for all.
        refine: changes the aligned client.
    """

    options: AlignmentOptions | None = None
    evidence: Literal["weights", "probe", "data"] = "weights"
    residual: str = "all"
    heads: Moments = "covariance"
    limit: int = 0
    refine: Refine | None = None

    @property
    def canonical(self) -> bool:
        """Whether both models are converted to canonical form first."""
        return self.options is not None and bool(self.options.canonical)


VANILLA = "vanilla"


# Published methods have no rule on chance: they apply every move that removes distance.
EAGER = AlignmentOptions(chance=0, canonical=False)
WHOLE = replace(EAGER, parts=WHOLE_MODEL)
STREAM = replace(WHOLE, canonical=True)
# What learned methods learn: matrices of the heads, and the rotation of the residual
# stream.
HEADS = LearningOptions(general=True)
ROTATION = LearningOptions(parts=("residual",), steps=150, lr=3e-3, points=(0.2, 0.8))


def _learned(
    options: LearningOptions,
    anchor: nn.Module,
    client: nn.Module,
    symmetry: Symmetry,
    batches: Batches,
) -> State:
    """Learn group elements by gradient descent, starting from the aligned client."""
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
    """Return a variant of Verma & Elbayad (2024): permutations found from correlations
    on data.
    """
    options = replace(
        EAGER, parts=parts, within_heads="permutation", activation_weight=1.0
    )
    how: dict[str, Any] = {"residual": residual, "heads": "correlation"}
    return MatchingMethod(options, "data", **{**how, **changes})


#: All methods, in the order of the published tables.
METHODS: dict[str, MatchingMethod] = {
    VANILLA: MatchingMethod(),
    # Zhang et al. (2025)
    "rotation": MatchingMethod(EAGER),
    "rotation+heads": MatchingMethod(
        replace(EAGER, parts=("heads", "attention", "ffn"))
    ),
    # Ainsworth et al. (2023): permutations found from weights
    "git-rebasin": MatchingMethod(replace(WHOLE, within_heads="permutation")),
    # Verma & Elbayad (2024): all of it as for GLUE (Table 3), by component (Figure 3,
    # Table 1), the residual stream alone (Table 2), and with less data (Figure 6)
    "verma": _verma("residual", "heads", "attention", "ffn"),
    "verma-ffn": _verma("ffn"),
    "verma-attention": _verma("heads", "attention"),
    "verma-monotonic": _verma("attention", "ffn"),
    "verma-heads": _verma("heads", "attention", "ffn"),
    "verma-stream-first": _verma("residual"),
    "verma-stream-last": _verma("residual", residual="last"),
    "verma-stream-all": _verma("residual", residual="all"),
    "verma-heads@64": _verma("heads", "attention", "ffn", limit=64),
    "verma-heads@256": _verma("heads", "attention", "ffn", limit=256),
    "verma-heads@1024": _verma("heads", "attention", "ffn", limit=1024),
    "whole": MatchingMethod(WHOLE),
    "whole+probe": MatchingMethod(WHOLE, "probe"),
    "whole+data": MatchingMethod(WHOLE, "data"),
    "learned": MatchingMethod(WHOLE, "data", refine=partial(_learned, HEADS)),
    # Rotations of the residual stream, for pre-norm models
    "stream": MatchingMethod(STREAM),
    "stream+probe": MatchingMethod(STREAM, "probe"),
    "stream+data": MatchingMethod(STREAM, "data"),
    "stream+learned": MatchingMethod(
        STREAM, "data", refine=partial(_learned, ROTATION)
    ),
}


def match(
    method: MatchingMethod,
    anchor: nn.Module,
    client: nn.Module,
    symmetry: Symmetry,
    batches: Batches,
) -> State:
    """Return the client's tensors, matched to the anchor; neither model is changed.

    ``batches`` (inputs and ``labels``) are read only by methods that use data.

    Raises:
        FedrotError: the models cannot be aligned; see ``fedrot.align``.
    """
    state = client.state_dict()
    batches = _first(batches, method.limit)
    if method.options is not None:
        activations = _activations(method, anchor, client, symmetry, batches)
        found = align(state, anchor.state_dict(), symmetry, method.options, activations)
        state = found.apply(state)
    if method.refine is not None:
        state = method.refine(anchor, with_state(client, state), symmetry, batches)
    return state


def canonical_pair(
    anchor: nn.Module, client: nn.Module, symmetry: Symmetry
) -> tuple[nn.Module, nn.Module, Symmetry]:
    """Return both models in canonical form, and the symmetry that rotates their stream.

    Raises:
        SymmetryError: the stream cannot be rotated, or tables are tied that must be
            separate.
    """
    check_rotates(symmetry)
    ours, theirs = (
        with_state(model, canonical(model.state_dict(), symmetry))
        for model in (anchor, client)
    )
    return ours, theirs, symmetry.rotated


def _first(batches: Batches, limit: int) -> Batches:
    """Return batches of the first ``limit`` rows; all batches for a limit of 0."""
    if not limit:
        return batches
    starts = accumulate((len(batch["labels"]) for batch in batches), initial=0)
    return [
        {name: value[: limit - start] for name, value in batch.items()}
        for start, batch in zip(starts, batches, strict=False)
        if start < limit
    ]


def _activations(
    method: MatchingMethod,
    anchor: nn.Module,
    client: nn.Module,
    symmetry: Symmetry,
    batches: Batches,
) -> Activations | None:
    if method.evidence == "weights":
        return None
    config: Any = anchor.config
    inputs: Iterable[Mapping[str, Tensor]] = (
        random_inputs(config.to_dict())
        if method.evidence == "probe"
        else [
            {name: value for name, value in batch.items() if name != "labels"}
            for batch in batches
        ]
    )
    residual, heads = method.residual, method.heads
    return collect_activations(
        anchor, client, inputs, symmetry, residual=residual, heads=heads
    )
