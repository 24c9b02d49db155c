"""Methods to match two models before the loss on the line between them is measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import Tensor, nn

from fedrot.alignment import align
from fedrot.collect.activations import Activations, Moments, collect_activations
from fedrot.collect.random_inputs import random_inputs
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.symmetry import WHOLE_MODEL, Symmetry
from fedrot.symmetry.canonical import canonical, check_rotates

State = dict[str, Tensor]
#: Batches of a training step: the models' inputs, and ``labels``.
Batches = Sequence[Mapping[str, Tensor]]

#: Function of (anchor, aligned client, symmetry, batches) that returns the client's new tensors.
Refine = Callable[[nn.Module, nn.Module, Symmetry, Batches], State]


@dataclass(frozen=True)
class MatchingMethod:
    """A way to match a client's model to the anchor's.

    Attributes:
        options: alignment options; None: nothing is aligned.
        evidence: ``weights``, or weights and activations: on random tokens (``probe``) or on training
            rows (``data``).
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

    @property
    def description(self) -> str:
        """The fields as text, the same in every process."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in values)


VANILLA = "vanilla"


# Published methods have no rule on chance: they apply every move that removes distance.
EAGER = AlignmentOptions(chance=0, canonical=False)
WHOLE = replace(EAGER, parts=WHOLE_MODEL)
STREAM = replace(WHOLE, canonical=True)

#: The methods by name. Plug-ins add theirs.
METHODS: dict[str, MatchingMethod] = {
    VANILLA: MatchingMethod(),
    # Zhang et al. (2025)
    "rotation": MatchingMethod(EAGER),
    "whole": MatchingMethod(WHOLE),
    "whole+data": MatchingMethod(WHOLE, "data"),
    # A rotation of the residual stream, for pre-norm models
    "stream": MatchingMethod(STREAM),
}


def methods_for(symmetry: Symmetry) -> tuple[str, ...]:
    """Return the methods for a model: methods with a rotated stream need pre-norm models."""
    rotates = symmetry.can_rotate
    return tuple(name for name, method in METHODS.items() if rotates or not method.canonical)


def check_methods(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without repetitions; raises ``FedrotError`` for unknown names or no name."""
    found = tuple(dict.fromkeys(names))
    unknown = [name for name in found if name not in METHODS]
    if unknown or not found:
        problem = f"Unknown method '{unknown[0]}'" if unknown else "No method is given"
        raise FedrotError(f"{problem}; choose from {', '.join(METHODS)}.")
    return found


def match(
    method: MatchingMethod, anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches
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
        SymmetryError: the stream cannot be rotated, or tables are tied that must be separate.
    """
    check_rotates(symmetry)
    ours, theirs = (
        with_state(model, canonical(model.state_dict(), symmetry)) for model in (anchor, client)
    )
    return ours, theirs, symmetry.rotated


def _first(batches: Batches, limit: int) -> Batches:
    """Return batches of the first ``limit`` rows; all batches for a limit of 0."""
    if not limit:
        return batches
    found, left = [], limit
    for batch in batches:
        found.append({name: value[:left] for name, value in batch.items()})
        left -= len(found[-1]["labels"])
        if left <= 0:
            break
    return found


def _activations(
    method: MatchingMethod, anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches
) -> Activations | None:
    if method.evidence == "weights":
        return None
    config: Any = anchor.config
    inputs: Iterable[Mapping[str, Tensor]] = (
        random_inputs(config.to_dict())
        if method.evidence == "probe"
        else [{name: value for name, value in batch.items() if name != "labels"} for batch in batches]
    )
    residual, heads = method.residual, method.heads
    return collect_activations(anchor, client, inputs, symmetry, residual=residual, heads=heads)


def with_state(model: nn.Module, state: State) -> nn.Module:
    """Return a copy of the model with other tensors."""
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model
