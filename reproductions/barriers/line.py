"""The line between two models after one was matched to the other: losses, barrier and
rows.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrot._io import json_line, write_text
from fedrot.matching.pairs import squared_distance
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task
from fedrot.symmetry import Symmetry
from fedrot.tensors import Tensors, compute_dtype
from reproductions.barriers.methods import (
    METHODS,
    Batches,
    State,
    canonical_pair,
    match,
)


@dataclass(frozen=True)
class BarrierLine:
    """The line between two models (``cell``, ``pair``) after ``method`` has matched one
    to the other.

    ``seconds`` is the wall time of the matching, with the collection of activations.
    ``before`` and ``after`` are the squared distances over all parameters before and
    after matching. ``metrics`` are those of the models at ``positions``, which are
    evenly spaced from 0 to 1 and include 0.5.
    """

    cell: str
    pair: str
    method: str
    seconds: float
    before: float
    after: float
    positions: tuple[float, ...]
    metrics: tuple[Mapping[str, float], ...]

    @property
    def barrier(self) -> float:
        """The largest loss on the line minus the mean of the losses at its ends, at
        least 0.

        Verma & Elbayad (2024), Eq. 10, after Frankle & Carbin. NaN if a loss is NaN.
        """
        losses = np.array([metrics["loss"] for metrics in self.metrics])
        return float((losses - (losses[0] + losses[-1]) / 2).max())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one flat row per position: the fields of this line, and all metrics at
        the position.
        """
        own = {name: getattr(self, name) for name in _OWN}
        for position, metrics in zip(self.positions, self.metrics, strict=True):
            yield {**own, "position": position, **metrics}


_OWN = ("cell", "pair", "method", "seconds", "before", "after")


def lines_of(rows: Iterable[Mapping[str, Any]]) -> list[BarrierLine]:
    """Return lines from rows in the order of positions; null becomes NaN."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        clean = {
            name: math.nan if value is None else value for name, value in row.items()
        }
        own = tuple(clean.pop(name) for name in _OWN)
        grouped.setdefault(own, []).append(clean)
    lines = []
    for own, of_line in grouped.items():
        positions = tuple(row.pop("position") for row in of_line)
        lines.append(BarrierLine(*own, positions, tuple(of_line)))
    return lines


def write_rows(path: Path, lines: Iterable[BarrierLine]) -> None:
    """Write the rows as JSON lines, all or none of them; numbers that are not finite
    become null.
    """
    write_text(path, "".join(json_line(row) for line in lines for row in line.rows()))


def measure(
    name: str,
    anchor: nn.Module,
    client: nn.Module,
    symmetry: Symmetry,
    task: Task,
    batches: Batches,
    *,
    points: int,
    cell: str,
    pair: str,
) -> BarrierLine:
    """Match two models by a method of ``METHODS`` and evaluate ``points`` models on the
    line.

    The anchor is at position 0, the matched client at position 1; both are in canonical
    form if the method needs it. Metrics are those of ``task`` on all its held-out rows.
    Neither model is changed.

    Raises:
        FedrotError: the models cannot be aligned.
    """
    method = METHODS[name]
    if method.canonical:
        anchor, client, symmetry = canonical_pair(anchor, client, symmetry)
    ours = {k: v.clone() for k, v in anchor.state_dict().items()}
    start = time.perf_counter()
    matched = match(method, anchor, client, symmetry, batches)
    seconds = time.perf_counter() - start
    positions = tuple(i / (points - 1) for i in range(points))
    shell, held_out = copy.deepcopy(anchor), np.arange(len(task.test))
    metrics = []
    for position in positions:
        shell.load_state_dict(interpolate(ours, matched, position))
        metrics.append(training.evaluate(shell, task, task.test, held_out))
    before, after = (
        float(
            squared_distance(
                [(ours[name], theirs[name]) for name, _ in anchor.named_parameters()]
            )
        )
        for theirs in (client.state_dict(), matched)
    )
    return BarrierLine(
        cell, pair, name, seconds, before, after, positions, tuple(metrics)
    )


def interpolate(a: Tensors, b: Tensors, t: float) -> dict[str, Tensor]:
    """Return the model at position ``t`` of the line from ``a`` (0) to ``b`` (1), in
    ``a``'s dtypes.

    The result is exact at both ends. It is computed in float32, or float64 for float64
    tensors. Integer and boolean tensors are copies of ``a``'s.

    >>> interpolate({"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}, 0.25)
    {'w': tensor([1.])}
    """
    found = {name: tensor.detach().clone() for name, tensor in a.items()}
    for name, start in found.items():
        if start.is_floating_point():
            first, last = (
                x.detach().to(compute_dtype(start)) for x in (start, b[name])
            )
            found[name] = torch.lerp(first, last, t).to(start.dtype)
    return found


def training_batches(task: Task, model: nn.Module, rows: int) -> list[State]:
    """Return at most ``rows`` random training rows, in batches of a training step."""
    return list(
        training.step_batches(
            task, model, np.arange(len(task.train)), rows, 128, seed=0
        )
    )
