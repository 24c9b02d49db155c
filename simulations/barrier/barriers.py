"""Ways to match two models before they are merged, and what is left of the barrier between them."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor, nn

from fedrot._io import replacing
from fedrot.alignment import align, alignment_of
from fedrot.collect.activations import Activations, Moments, collect_activations
from fedrot.collect.random_inputs import random_inputs
from fedrot.errors import FedrotError
from fedrot.matching.pairs import squared_distance
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.research import interpolation
from fedrot.research.interpolation import Barrier, loss_barrier
from fedrot.research.learning import LearningOptions, learn_alignment, loss_of
from fedrot.research.variance import average_statistics, repair, unit_statistics
from fedrot.simulations.tasks.task import Task
from fedrot.symmetry import WHOLE_MODEL, Symmetry
from fedrot.tensors import Tensors

State = dict[str, Tensor]
#: Batches of a training step: the models' inputs, and ``labels``.
Batches = Sequence[Mapping[str, Tensor]]
Evaluate = Callable[[State], Mapping[str, float]]

#: After alignment: (anchor, moved client, symmetry, batches) to the client's new tensors.
Refine = Callable[[nn.Module, nn.Module, Symmetry, Batches], State]
#: (anchor, moved client, symmetry, batches) to the path that is taken in place of the line.
Repair = Callable[[nn.Module, nn.Module, Symmetry, Batches], interpolation.Path]


@dataclass(frozen=True)
class Method:
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


METHODS: dict[str, Method] = {
    VANILLA: Method(),
    # Zhang et al. (2025)
    "rotation": Method(AlignmentOptions()),
    "rotation+heads": Method(AlignmentOptions(parts=("heads", "attention", "ffn"))),
    # Ainsworth et al. (2023): permutations found from weights
    "git-rebasin": Method(AlignmentOptions(parts=WHOLE_MODEL, within_heads="permutation")),
    # Verma & Elbayad (2024): permutations found from activations
    "verma": Method(
        AlignmentOptions(
            parts=("residual", "heads", "attention", "ffn"),
            within_heads="permutation",
            activation_weight=1.0,
        ),
        evidence="data",
        residual="first",
        heads="correlation",
    ),
    "whole": Method(AlignmentOptions(parts=WHOLE_MODEL)),
    "whole+probe": Method(AlignmentOptions(parts=WHOLE_MODEL), "probe"),
    "whole+data": Method(AlignmentOptions(parts=WHOLE_MODEL), "data"),
    # What the defaults were chosen against: where the residual stream is looked at, and how much
    # activations count against weights.
    "whole+data@first": Method(AlignmentOptions(parts=WHOLE_MODEL), "data", residual="first"),
    "whole+data@last": Method(AlignmentOptions(parts=WHOLE_MODEL), "data", residual="last"),
    "whole+data@identity": Method(AlignmentOptions(parts=WHOLE_MODEL[1:]), "data"),
    "whole+data@0.2": Method(AlignmentOptions(parts=WHOLE_MODEL, activation_weight=0.2), "data"),
    "whole+data@0.8": Method(AlignmentOptions(parts=WHOLE_MODEL, activation_weight=0.8), "data"),
    "whole+data@1": Method(AlignmentOptions(parts=WHOLE_MODEL, activation_weight=1.0), "data"),
    "whole+data@whitened": Method(AlignmentOptions(parts=WHOLE_MODEL), "data", heads="whitened"),
    "whole+data+repair": Method(AlignmentOptions(parts=WHOLE_MODEL), "data", repair=_repaired),
    "learned": Method(AlignmentOptions(parts=WHOLE_MODEL), "data", refine=_learned),
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
    method: Method, anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches
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
        state = method.refine(anchor, _with(client, state), symmetry, batches)
    return Matched(state, report, time.perf_counter() - start)


def _activations(
    method: Method, anchor: nn.Module, client: nn.Module, symmetry: Symmetry, batches: Batches
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


def _with(model: nn.Module, state: State) -> nn.Module:
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model


@dataclass(frozen=True)
class Line:
    """What one method left between two models.

    Attributes:
        cell, pair: which models.
        seconds: wall time of the matching, activations included.
        before, after: squared distance of all parameters, before and after matching.
    """

    cell: str
    pair: str
    method: str
    seconds: float
    before: float
    after: float
    barrier: Barrier

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one flat row per position: this line's own fields, and every metric there."""
        own = {name: getattr(self, name) for name in _LINE}
        for position, metrics in zip(self.barrier.positions, self.barrier.rows, strict=True):
            yield {**own, "position": position, **metrics}


_LINE = ("cell", "pair", "method", "seconds", "before", "after")


def lines_of(rows: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Return the lines whose rows these are, in the order of their first rows; null is NaN."""
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        clean = {name: math.nan if value is None else value for name, value in row.items()}
        grouped.setdefault(tuple(row[name] for name in _LINE), []).append(clean)
    lines = []
    for own in grouped.values():
        own = sorted(own, key=lambda row: row["position"])
        metrics = [{k: v for k, v in row.items() if k not in (*_LINE, "position")} for row in own]
        barrier = Barrier(tuple(row["position"] for row in own), tuple(metrics))
        lines.append(Line(**{name: own[0][name] for name in _LINE}, barrier=barrier))
    return lines


def measure(
    name: str,
    anchor: nn.Module,
    client: nn.Module,
    symmetry: Symmetry,
    task: Task,
    batches: Batches,
    *,
    points: int = 21,
    cell: str = "",
    pair: str = "",
) -> Line:
    """Match two models by a method of ``METHODS`` and evaluate the line between them.

    The anchor is at position 0, the matched client at 1. Metrics are those of ``task`` on all its
    held-out rows.

    Raises:
        FedrotError: the method is unknown, the models cannot be aligned, or too few points.
    """
    (name,) = check_methods([name])
    method = METHODS[name]
    ours = {k: v.clone() for k, v in anchor.state_dict().items()}
    matched = match(method, anchor, client, symmetry, batches)
    path: interpolation.Path = interpolation.interpolate
    if method.repair is not None:
        path = method.repair(anchor, _with(client, matched.state), symmetry, batches)
    barrier = loss_barrier(evaluator(task, anchor), ours, matched.state, points, path=path)
    names = [n for n, _ in anchor.named_parameters()]
    before, after = (
        squared_distance([(ours[n], theirs[n]) for n in names])
        for theirs in (client.state_dict(), matched.state)
    )
    return Line(cell, pair, name, matched.seconds, before, after, barrier)


def evaluator(task: Task, model: nn.Module) -> Evaluate:
    """Return the function from tensors of a model like this one to its metrics on held-out rows."""
    from fedrot.simulations.tasks import training

    shell, rows = copy.deepcopy(model), np.arange(len(task.test))

    def evaluate(state: State) -> Mapping[str, float]:
        shell.load_state_dict(state)
        return training.evaluate(shell, task, task.test, rows)

    return evaluate


def training_batches(task: Task, model: nn.Module, rows: int, seed: int = 0) -> list[State]:
    """Return at most ``rows`` random training rows in batches as a training step has them."""
    from fedrot.simulations.tasks.training import step_batches

    return list(step_batches(task, model, np.arange(len(task.train)), rows, 128, seed))


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_rows(path: Path, lines: Iterable[Line]) -> None:
    """Write the rows of lines as JSON lines, whole or not at all; what is not finite becomes null."""
    rows = (row for line in lines for row in line.rows())
    write_whole(path, "".join(f"{json.dumps(_finite(row), allow_nan=False)}\n" for row in rows))


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
