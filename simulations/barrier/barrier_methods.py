"""Methods to match two models before the loss between them is measured."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from fedrot.alignment import align, alignment_of
from fedrot.collect.activations import Activations, Moments, collect_activations
from fedrot.collect.random_inputs import random_inputs
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.research import interpolation
from fedrot.research.learning import LearningOptions, learn_alignment, loss_of
from fedrot.research.variance import average_statistics, repair, unit_statistics
from fedrot.symmetry import WHOLE_MODEL, Symmetry
from fedrot.tensors import Tensors

State = dict[str, Tensor]
#: Batches of a training step: the models' inputs, and ``labels``.
Batches = Sequence[Mapping[str, Tensor]]

#: After alignment: (anchor, moved client, symmetry, batches) to the client's new tensors.
Refine = Callable[[nn.Module, nn.Module, Symmetry, Batches], State]
#: (anchor, moved client, symmetry, batches) to the path that is taken in place of the line.
Repair = Callable[[nn.Module, nn.Module, Symmetry, Batches], interpolation.Path]


@dataclass(frozen=True)
class MatchingMethod:
    """How a client's model is brought to the anchor's before the two are merged.

    Attributes:
        options: what is moved; None moves nothing.
        evidence: what the match is found from beside the weights: activations of ``probe``, random
            tokens, or of ``data``, training rows.
        residual, heads: which activations, as in ``fedrot.collect_activations``.
        refine: what is done to the client once it is aligned.
        repair: what is done to the merged models.
    """

    options: AlignmentOptions | None = None
    evidence: Literal["weights", "probe", "data"] = "weights"
    residual: str = "all"
    heads: Moments = "covariance"
    refine: Refine | None = None
    repair: Repair | None = None

    @property
    def looks_at_data(self) -> bool:
        """Whether training rows are read."""
        return self.evidence == "data" or self.refine is not None or self.repair is not None

    @property
    def description(self) -> str:
        """What the method does, in the same words in every process."""
        said = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in said)


VANILLA = "vanilla"


def _learned(anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches) -> State:
    """Learn the heads' matrices from where alignment left them, in small batches."""
    start = alignment_of((), client.state_dict(), anchor.state_dict(), symmetry)
    small = [
        {name: value[i : i + 32] for name, value in batch.items()}
        for batch in batches
        for i in range(0, len(batch["labels"]), 32)
    ]
    shell = copy.deepcopy(anchor).eval()
    options = LearningOptions(general=True)
    learned = learn_alignment(
        loss_of(shell), small, client.state_dict(), anchor.state_dict(), symmetry, start, options
    )
    return learned.alignment.apply(client.state_dict())


def _repaired(
    anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches
) -> interpolation.Path:
    """Give every average on the line the units' means and deviations of the two ends, in proportion."""
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


METHODS: dict[str, MatchingMethod] = {
    VANILLA: MatchingMethod(),
    # Zhang et al. (2025)
    "rotation": MatchingMethod(AlignmentOptions()),
    "rotation+heads": MatchingMethod(AlignmentOptions(parts=("heads", "attention", "ffn"))),
    # Ainsworth et al. (2023): permutations found from weights
    "git-rebasin": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL, within_heads="permutation")),
    # Verma & Elbayad (2024): permutations found from activations
    "verma": MatchingMethod(
        AlignmentOptions(
            parts=("residual", "heads", "attention", "ffn"),
            within_heads="permutation",
            activation_weight=1.0,
        ),
        evidence="data",
        residual="first",
        heads="correlation",
    ),
    "whole": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL)),
    "whole+probe": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL), "probe"),
    "whole+data": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL), "data"),
    # What the defaults were chosen against: where the residual stream is looked at, and how much
    # activations count against weights.
    "whole+data@first": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL), "data", residual="first"),
    "whole+data@last": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL), "data", residual="last"),
    "whole+data@identity": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL[1:]), "data"),
    "whole+data@0.2": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL, activation_weight=0.2), "data"),
    "whole+data@0.8": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL, activation_weight=0.8), "data"),
    "whole+data@1": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL, activation_weight=1.0), "data"),
    "whole+data@whitened": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL), "data", heads="whitened"),
    "whole+data+repair": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL), "data", repair=_repaired),
    "learned": MatchingMethod(AlignmentOptions(parts=WHOLE_MODEL), "data", refine=_learned),
}


def check_methods(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, each once.

    Raises:
        FedrotError: one is not among ``METHODS``, or there is none.
    """
    found = tuple(dict.fromkeys(names))
    unknown = [name for name in found if name not in METHODS]
    if unknown or not found:
        what = f"Unknown method '{unknown[0]}'" if unknown else "No method is given"
        raise FedrotError(f"{what}; choose from {', '.join(METHODS)}.")
    return found


class Matched(NamedTuple):
    """The client's tensors after matching, what alignment did if there was one, and wall seconds."""

    state: State
    report: AlignmentReport | None
    seconds: float


def match(
    method: MatchingMethod, anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches
) -> Matched:
    """Bring the client to the anchor; neither model is changed.

    Args:
        batches: inputs and ``labels``, as a training step has them; read only by methods that use
            data.

    Raises:
        FedrotError: the models cannot be aligned; see ``fedrot.align``.
    """
    start = time.perf_counter()
    state, report = client.state_dict(), None
    if method.options is not None:
        activations = _activations(method, anchor, client, symmetry, batches)
        alignment = align(state, anchor.state_dict(), symmetry, method.options, activations)
        state, report = alignment.apply(state), alignment.report
    if method.refine is not None:
        state = method.refine(anchor, with_state(client, state), symmetry, batches)
    return Matched(state, report, time.perf_counter() - start)


def _activations(
    method: MatchingMethod, anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches
) -> Activations | None:
    if method.evidence == "weights":
        return None
    seen: Iterable[Mapping[str, Tensor]] = (
        {name: value for name, value in batch.items() if name != "labels"} for batch in batches
    )
    if method.evidence == "probe":
        config: Any = anchor.config
        seen = random_inputs(config.to_dict())
    return collect_activations(
        anchor, client, seen, symmetry, residual=method.residual, heads=method.heads
    )


def with_state(model: nn.Module, state: State) -> nn.Module:
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model
