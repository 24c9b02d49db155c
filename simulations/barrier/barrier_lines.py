"""The loss along the line between two models: measurement and rows."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedrot._io import json_line, write_text
from fedrot.interpolation import Barrier, loss_barrier
from fedrot.matching.problem import squared_distance
from fedrot.simulations.barrier.barrier_methods import (
    METHODS,
    Batches,
    State,
    canonical_pair,
    check_methods,
    match,
)
from fedrot.simulations.tasks.task import Task
from fedrot.symmetry import Symmetry

Evaluate = Callable[[State], Mapping[str, float]]


@dataclass(frozen=True)
class BarrierLine:
    """The line between two models (``cell``, ``pair``) after a method has matched one to the other.

    ``seconds`` is the wall time of the matching, with the collection of activations. ``before`` and
    ``after`` are the squared distances over all parameters before and after matching.
    """

    cell: str
    pair: str
    method: str
    seconds: float
    before: float
    after: float
    barrier: Barrier

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one flat row per position: the fields of this line, and all metrics at the position."""
        own = {name: getattr(self, name) for name in _LINE}
        for position, metrics in zip(self.barrier.positions, self.barrier.rows, strict=True):
            yield {**own, "position": position, **metrics}


_KEY = ("cell", "pair", "method")
_LINE = (*_KEY, "seconds", "before", "after")


def lines_of(rows: Iterable[Mapping[str, Any]]) -> list[BarrierLine]:
    """Return lines from rows, in the order of their first rows; null becomes NaN."""
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        clean = {name: math.nan if value is None else value for name, value in row.items()}
        grouped.setdefault(tuple(row[name] for name in _KEY), []).append(clean)
    lines = []
    for own in grouped.values():
        own = sorted(own, key=lambda row: row["position"])
        metrics = [{k: v for k, v in row.items() if k not in (*_LINE, "position")} for row in own]
        barrier = Barrier(tuple(row["position"] for row in own), tuple(metrics))
        lines.append(BarrierLine(**{name: own[0][name] for name in _LINE}, barrier=barrier))
    return lines


def ordered(lines: Iterable[BarrierLine]) -> list[BarrierLine]:
    """Return the lines in the order of ``METHODS``; lines of one method keep their order."""
    places = {name: place for place, name in enumerate(METHODS)}
    return sorted(lines, key=lambda line: places.get(line.method, len(places)))


def write_rows(path: Path, lines: Iterable[BarrierLine]) -> None:
    """Write the rows as JSON lines, all or none of them; numbers that are not finite become null."""
    write_text(path, "".join(json_line(row) for line in lines for row in line.rows()))


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
) -> BarrierLine:
    """Match two models by a method of ``METHODS`` and evaluate the line between them.

    The anchor is at position 0, the matched client at position 1; both are in canonical form if the
    method needs it. Metrics are those of ``task`` on all its held-out rows. Neither model is changed.

    Raises:
        FedrotError: the method is unknown, the models cannot be aligned, or there are too few points.
    """
    (name,) = check_methods([name])
    method = METHODS[name]
    if method.canonical:
        anchor, client, symmetry = canonical_pair(anchor, client, symmetry)
    ours = {k: v.clone() for k, v in anchor.state_dict().items()}
    start = time.perf_counter()
    matched = match(method, anchor, client, symmetry, batches)
    seconds = time.perf_counter() - start
    barrier = loss_barrier(evaluator(task, anchor), ours, matched, points)
    before, after = (
        squared_distance([(ours[name], theirs[name]) for name, _ in anchor.named_parameters()])
        for theirs in (client.state_dict(), matched)
    )
    return BarrierLine(cell, pair, name, seconds, before, after, barrier)


def evaluator(task: Task, model: nn.Module) -> Evaluate:
    """Return a function from the tensors of such a model to its metrics on the held-out rows."""
    from fedrot.simulations.tasks import training

    shell, rows = copy.deepcopy(model), np.arange(len(task.test))

    def evaluate(state: State) -> Mapping[str, float]:
        shell.load_state_dict(state)
        return training.evaluate(shell, task, task.test, rows)

    return evaluate


def training_batches(task: Task, model: nn.Module, rows: int) -> list[State]:
    """Return at most ``rows`` random training rows, in batches of a training step."""
    from fedrot.simulations.tasks.training import step_batches

    return list(step_batches(task, model, np.arange(len(task.train)), rows, 128, seed=0))
