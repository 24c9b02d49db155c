"""Methods to match two models before the loss between them is measured, and the settings of that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import Tensor, nn

from fedrot import interpolation
from fedrot.alignment import align, alignment_of
from fedrot.collect.activations import Activations, Moments, collect_activations
from fedrot.collect.random_inputs import random_inputs, reads_text
from fedrot.collect.token_counts import counts_by_order, token_counts
from fedrot.errors import FedrotError
from fedrot.learning import loss_of
from fedrot.options import AlignmentOptions
from fedrot.simulations.barrier.invalid_controls import ignore_heads
from fedrot.symmetry import WHOLE_MODEL, Symmetry
from fedrot.symmetry.canonical import canonical, check_rotates
from fedrot.tensors import Tensors
from reproductions.learning import LearningOptions, learn_alignment
from reproductions.variance import average_statistics, repair, unit_statistics

State = dict[str, Tensor]
#: Batches of a training step: the models' inputs, and ``labels``.
Batches = Sequence[Mapping[str, Tensor]]

#: After alignment: (anchor, moved client, symmetry, batches) to the client's new tensors.
Refine = Callable[[nn.Module, nn.Module, Symmetry, Batches], State]
#: (anchor, moved client, symmetry, batches) to the path that replaces the straight line.
Repair = Callable[[nn.Module, nn.Module, Symmetry, Batches], interpolation.Path]


@dataclass(frozen=True)
class MatchingMethod:
    """A way to match a client's model to the anchor's.

    Attributes:
        options: what is aligned; None aligns nothing.
        evidence: the activations that count beside the weights: none, those of ``probe`` (random
            tokens), or those of ``data`` (training rows).
        residual, heads: which activations, as in ``fedrot.collect_activations``.
        frequencies: how often tokens of tables count: equally, as in the training rows (``counted``), or
            by the tokenizer's order (``ordered``).
        limit: the first so many of the rows are read; 0 for all.
        refine, repair: a change of the aligned client, and of the models on the line.
        by_default: whether ``fedrot barrier`` measures it unless methods are named.
    """

    options: AlignmentOptions | None = None
    evidence: Literal["weights", "probe", "data"] = "weights"
    residual: str = "all"
    heads: Moments = "covariance"
    frequencies: Literal["equal", "counted", "ordered"] = "equal"
    limit: int = 0
    refine: Refine | None = None
    repair: Repair | None = None
    by_default: bool = True

    @property
    def looks_at_data(self) -> bool:
        """Whether training rows are read."""
        refines = self.refine is not None or self.repair is not None
        return self.evidence == "data" or self.frequencies == "counted" or refines

    @property
    def canonical(self) -> bool:
        """Whether both models are brought to canonical form first."""
        return self.options is not None and bool(self.options.canonical)

    @property
    def description(self) -> str:
        """The fields as text, the same in every process."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in values)


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


def _repaired(
    anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches
) -> interpolation.Path:
    """Rescale the units of every model on the line: to the means and deviations between the ends'."""
    few = batches[:4]
    ends = [unit_statistics(model, few, symmetry) for model in (anchor, client)]
    shell = copy.deepcopy(anchor)

    def path(a: Tensors, b: Tensors, t: float) -> State:
        merged = interpolation.interpolate(a, b, t)
        if t in (0.0, 1.0):
            return merged
        shell.load_state_dict(merged)
        return repair(shell, average_statistics(ends, [1 - t, t]), few, symmetry)

    return path


VANILLA = "vanilla"


def _verma(*parts: str, residual: str = "first", **changes: Any) -> MatchingMethod:
    """Return a variant of Verma & Elbayad (2024): permutations found from correlations on data."""
    options = replace(_EAGER, parts=parts, within_heads="permutation", activation_weight=1.0)
    how: dict[str, Any] = {"residual": residual, "heads": "correlation", "by_default": False}
    return MatchingMethod(options, "data", **{**how, **changes})


# Published methods move whatever removes anything: no method asks what chance removes.
_EAGER = AlignmentOptions(chance=0, canonical=False)
_WHOLE = replace(_EAGER, parts=WHOLE_MODEL)
_STREAM = replace(_WHOLE, canonical=True)

METHODS: dict[str, MatchingMethod] = {
    VANILLA: MatchingMethod(),
    # Zhang et al. (2025)
    "rotation": MatchingMethod(_EAGER),
    "rotation+heads": MatchingMethod(replace(_EAGER, parts=("heads", "attention", "ffn"))),
    # Ainsworth et al. (2023): permutations found from weights
    "git-rebasin": MatchingMethod(replace(_WHOLE, within_heads="permutation")),
    # Verma & Elbayad (2024): all of it as for GLUE (Table 3), by component (Figure 3, Table 1), the
    # residual stream alone (Table 2), and with less data (Figure 6)
    "verma": _verma("residual", "heads", "attention", "ffn", by_default=True),
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
    "whole": MatchingMethod(_WHOLE),
    "whole+probe": MatchingMethod(_WHOLE, "probe"),
    "whole+data": MatchingMethod(_WHOLE, "data"),
    # Alternatives to the defaults: other places of the residual stream's activations, and other
    # weights of activations.
    "whole+data@first": MatchingMethod(_WHOLE, "data", residual="first"),
    "whole+data@last": MatchingMethod(_WHOLE, "data", residual="last"),
    "whole+data@identity": MatchingMethod(replace(_WHOLE, parts=WHOLE_MODEL[1:]), "data"),
    "whole+data@0.2": MatchingMethod(replace(_WHOLE, activation_weight=0.2), "data"),
    "whole+data@0.8": MatchingMethod(replace(_WHOLE, activation_weight=0.8), "data"),
    "whole+data@1": MatchingMethod(replace(_WHOLE, activation_weight=1.0), "data"),
    "whole+data@whitened": MatchingMethod(_WHOLE, "data", heads="whitened"),
    "whole+data+repair": MatchingMethod(_WHOLE, "data", repair=_repaired),
    "learned": MatchingMethod(_WHOLE, "data", refine=_learned),
    "whole+tokens": MatchingMethod(_WHOLE, frequencies="counted"),
    # Rotations of the residual stream, for pre-norm models
    "stream": MatchingMethod(_STREAM),
    "stream+tokens": MatchingMethod(_STREAM, frequencies="counted"),
    "stream+order": MatchingMethod(_STREAM, frequencies="ordered"),
    "stream+probe": MatchingMethod(_STREAM, "probe"),
    "stream+data": MatchingMethod(_STREAM, "data"),
    "stream+data@0.8": MatchingMethod(replace(_STREAM, activation_weight=0.8), "data"),
    "stream+data@1": MatchingMethod(replace(_STREAM, activation_weight=1.0), "data"),
    "stream+data+repair": MatchingMethod(_STREAM, "data", repair=_repaired),
    "stream+learned": MatchingMethod(_STREAM, "data", refine=_stream_learned),
}


def methods_for(symmetry: Symmetry) -> tuple[str, ...]:
    """Return the default methods that suit a model: not all have a stream that rotates."""
    rotates = symmetry.can_rotate
    default = {name: method for name, method in METHODS.items() if method.by_default}
    return tuple(name for name, method in default.items() if rotates or not method.canonical)


def check_methods(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, each once; raises ``FedrotError`` if one is unknown or there is none."""
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

    ``batches`` (inputs and ``labels``) are read only by methods that look at data.

    Raises:
        FedrotError: the models cannot be aligned; see ``fedrot.align``.
    """
    state = client.state_dict()
    batches = _first(batches, method.limit)
    if method.options is not None:
        activations = _activations(method, anchor, client, symmetry, batches)
        counts = _counts(method, batches, anchor)
        found = align(state, anchor.state_dict(), symmetry, method.options, activations, counts)
        state = found.apply(state)
    if method.refine is not None:
        state = method.refine(anchor, with_state(client, state), symmetry, batches)
    return state


def canonical_pair(
    anchor: nn.Module, client: nn.Module, symmetry: Symmetry
) -> tuple[nn.Module, nn.Module, Symmetry]:
    """Return both models in canonical form, and the symmetry that rotates their stream.

    Raises:
        SymmetryError: the stream cannot be rotated, or the models tie what has to be separate.
    """
    check_rotates(symmetry)
    ours, theirs = (
        with_state(model, canonical(model.state_dict(), symmetry)) for model in (anchor, client)
    )
    return ours, theirs, symmetry.rotated


def _first(batches: Batches, limit: int) -> Batches:
    """Return the first rows of batches, all of them for a limit of 0."""
    if not limit:
        return batches
    found, left = [], limit
    for batch in batches:
        found.append({name: value[:left] for name, value in batch.items()})
        left -= len(found[-1]["labels"])
        if left <= 0:
            break
    return found


def _counts(method: MatchingMethod, batches: Batches, model: nn.Module) -> Tensor | None:
    """Return how often each token counts; None for equally, and for models of other inputs."""
    config: Any = model.config
    if method.frequencies == "equal" or not reads_text(config.to_dict()):
        return None
    size: int = config.vocab_size
    return token_counts(batches, size) if method.frequencies == "counted" else counts_by_order(size)


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
