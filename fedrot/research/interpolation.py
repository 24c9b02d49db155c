"""What lies between two models: the loss along the line from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.tensors import Tensors, check_update, compute_dtype

#: From two models and a position between 0 and 1 to the model there.
Path = Callable[[Tensors, Tensors, float], dict[str, Tensor]]


def interpolate(a: Tensors, b: Tensors, t: float) -> dict[str, Tensor]:
    """Return the model at position ``t`` of the line from ``a`` (0) to ``b`` (1), in ``a``'s dtypes.

    Computed in float32, or float64 for float64 tensors, and exact at both ends. Integer and boolean
    tensors are copies of ``a``'s.

    Raises:
        UpdateError: a tensor of ``b`` is missing, extra or of another shape than ``a``'s.
    """
    check_update(b, {name: tuple(tensor.shape) for name, tensor in a.items()})
    return {
        name: _between(tensor.detach(), b[name].detach(), t)
        if tensor.is_floating_point()
        else tensor.clone()
        for name, tensor in a.items()
    }


def _between(a: Tensor, b: Tensor, t: float) -> Tensor:
    dtype = compute_dtype(a)
    return torch.lerp(a.to(dtype), b.to(dtype), t).to(a.dtype)


@dataclass(frozen=True)
class Barrier:
    """What was measured on the line between two models.

    Attributes:
        positions: ascending from 0 (the one model) to 1 (the other).
        rows: every metric at each of them.
        metric: the metric whose barrier is asked for; lower is better.
    """

    positions: tuple[float, ...]
    rows: tuple[Mapping[str, float], ...]
    metric: str = "loss"

    @property
    def barrier(self) -> float:
        """The largest loss on the line, less the mean of the losses at its ends.

        Verma & Elbayad (2024), Eq. 10, after Frankle & Carbin. Never negative, because the ends are on
        the line; NaN where a loss is NaN.
        """
        return float(self._heights().max())

    @property
    def above_ends(self) -> float:
        """The largest loss on the line, less that of the worse end.

        What a better match could still remove: where the ends differ, the barrier of Eq. 10 is never 0.
        """
        heights = self._heights()
        return float(heights.max() - torch.maximum(heights[0], heights[-1]))

    def at(self, position: float) -> Mapping[str, float]:
        """Return every metric at one of the positions.

        Raises:
            FedrotError: nothing was measured there.
        """
        return self.rows[self._index(position)]

    def height_at(self, position: float) -> float:
        """Return the loss at one of the positions, less the mean of the losses at the ends.

        Raises:
            FedrotError: nothing was measured there.
        """
        return float(self._heights()[self._index(position)])

    def _heights(self) -> Tensor:
        losses = torch.tensor([row[self.metric] for row in self.rows], dtype=torch.float64)
        return losses - (losses[0] + losses[-1]) / 2

    def _index(self, position: float) -> int:
        near = [i for i, p in enumerate(self.positions) if abs(p - position) < 1e-9]
        if not near:
            raise FedrotError(
                f"Nothing was measured at position {position}, only at {len(self.positions)} evenly "
                "spaced ones; an odd number of points includes the middle."
            )
        return near[0]


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
        evaluate: from a model's tensors to its metrics; called ``points`` times.
        points: at least 3; 21 are those of Verma & Elbayad (2024).
        metric: which of the metrics is the loss.
        path: another way from ``a`` to ``b`` than the straight line.

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
