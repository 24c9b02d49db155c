"""The loss barrier between two models: losses on the line from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.tensors import Tensors, check_update, compute_dtype

#: A function of two models and a position between 0 and 1; returns the model at this position.
Path = Callable[[Tensors, Tensors, float], dict[str, Tensor]]


def interpolate(a: Tensors, b: Tensors, t: float) -> dict[str, Tensor]:
    """Return the model at position ``t`` of the line from ``a`` (0) to ``b`` (1), in ``a``'s dtypes.

    The result is exact at both ends. It is computed in float32, or float64 for float64 tensors. Integer
    and boolean tensors are copies of ``a``'s.

    >>> interpolate({"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}, 0.25)
    {'w': tensor([1.])}

    Raises:
        UpdateError: a tensor of ``b`` is missing, extra or of another shape than ``a``'s.
    """
    check_update(b, {name: tuple(tensor.shape) for name, tensor in a.items()})
    found = {name: tensor.detach().clone() for name, tensor in a.items()}
    for name, start in found.items():
        if start.is_floating_point():
            first, last = (x.detach().to(compute_dtype(start)) for x in (start, b[name]))
            found[name] = torch.lerp(first, last, t).to(start.dtype)
    return found


@dataclass(frozen=True)
class Barrier:
    """Metrics of the models on the line between two models: ``rows``, by ``positions`` from 0 to 1.

    ``metric`` is the loss among the metrics; lower is better.
    """

    positions: tuple[float, ...]
    rows: tuple[Mapping[str, float], ...]
    metric: str = "loss"

    @property
    def barrier(self) -> float:
        """The largest loss on the line minus the mean of the losses at its ends, at least 0.

        Verma & Elbayad (2024), Eq. 10, after Frankle & Carbin. NaN if a loss is NaN.
        """
        return float(self._heights().max())

    @property
    def above_ends(self) -> float:
        """The largest loss on the line minus the loss of the worse end."""
        heights = self._heights()
        return float(heights.max() - torch.maximum(heights[0], heights[-1]))

    def at(self, position: float) -> Mapping[str, float]:
        """Return the metrics at a position; raises ``FedrotError`` if it was not measured."""
        for measured, row in zip(self.positions, self.rows, strict=True):
            if abs(measured - position) < 1e-9:
                return row
        raise FedrotError(
            f"There are no metrics at position {position}, only at {len(self.positions)} evenly spaced "
            "positions; an odd number of points includes the middle."
        )

    def _heights(self) -> Tensor:
        """Return the losses minus the mean of the losses at the ends."""
        losses = torch.tensor([row[self.metric] for row in self.rows], dtype=torch.float64)
        return losses - (losses[0] + losses[-1]) / 2


def loss_barrier(
    evaluate: Callable[[dict[str, Tensor]], Mapping[str, float]],
    a: Tensors,
    b: Tensors,
    points: int = 21,
    metric: str = "loss",
    path: Path = interpolate,
) -> Barrier:
    """Evaluate models at evenly spaced positions of the line from ``a`` to ``b``, ends included.

    Args:
        evaluate: returns the metrics of a model's tensors; called ``points`` times.
        points: at least 3; Verma & Elbayad (2024) use 21.
        metric: the loss among the metrics.
        path: a path from ``a`` to ``b``; default: the straight line.

    Raises:
        UpdateError: names or shapes differ.
        FedrotError: fewer than 3 points, or ``evaluate`` does not return ``metric``.
    """
    if points < 3:
        raise FedrotError(
            f"points is {points}; a barrier needs at least 3, the two ends and one between."
        )
    positions = tuple(i / (points - 1) for i in range(points))
    rows = []
    for position in positions:
        row = evaluate(path(a, b, position))
        if metric not in row:
            raise FedrotError(f"evaluate returned {', '.join(row) or 'nothing'}, but not '{metric}'.")
        rows.append(dict(row))
    return Barrier(positions, tuple(rows), metric)
