"""``NoisySums``: counts and sums by class, with noise that hides every single row."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.task_head.labelled_rows import as_batch, labelled_rows, labels_in
from fedrot.task_head.noisy.public_features import Clipping
from fedrot.task_head.outputs import SINGLE
from fedrot.task_head.sums import unlike
from fedrot.task_head.votes import capped
from fedrot.tensors import Shape, TensorDict, Tensors

#: How far one row more or less moves the counts and sums together: it changes one count
#: by 1, and one sum by a vector that is not longer than 1.
SENSITIVITY = math.sqrt(2)

#: Accepted noise, in standard deviations.
_FARTHEST = 12

#: A site's noise may have so many times the variance of the median site's, or of a
#: deviation of 1 row. One site with more would hide the rows of all.
_LOUDEST = 100.0

#: Sums are rounded to multiples of at most this share of the noise, so that the lowest
#: bits of floats tell nothing about the sum without noise.
_GRID = 2.0**-10

#: Returns so many draws of a standard normal distribution, float64.
DrawsNoise = Callable[[int], Tensor]


@dataclass(frozen=True, eq=False)
class NoisySums:
    """Counts and sums of clipped rows by class, each number with noise of its own.

    Sums of sites add up (``+``). They are no ``ClassSums``: counts may be below 0 and
    no whole numbers, and there is no Gram matrix.

    Attributes:
        counts: rows of each class, float64 ``[classes]``.
        sums: of the rows that ``Clipping.clip`` returns, float64 ``[classes, inputs]``.
        variance: of the noise in each number, float64 ``[]``; 0 without noise.

    Raises:
        UpdateError: another dtype or shape, not finite, a variance below 0; or sums
            that no rows and noise can have: a count far below 0, or a sum that is far
            longer than its count.
    """

    counts: Tensor
    sums: Tensor
    variance: Tensor

    def __post_init__(self) -> None:
        classes, inputs = self.sums.shape if self.sums.ndim == 2 else (0, 0)
        shapes = {"counts": (classes,), "sums": (classes, inputs), "variance": ()}
        for name, shape in shapes.items():
            if reason := unlike(getattr(self, name), shape):
                raise UpdateError(f"Of the noisy sums, the '{name}' {reason}.")
        if float(self.variance) < 0:
            raise UpdateError("The variance of the noise is below 0.")
        deviation = float(self.variance.sqrt())
        # The length of noise in so many numbers, and rounding to float32.
        slack = deviation * (math.sqrt(inputs) + 2 * _FARTHEST) + 1e-3
        lengths = torch.linalg.vector_norm(self.sums, dim=1)
        longest = self.counts.clamp(min=0) * (1 + 1e-3) + slack
        negative = self.counts < -_FARTHEST * deviation
        if (negative | (lengths > longest)).any():
            raise UpdateError(
                "The noisy sums are larger than so many clipped rows and their noise "
                "can be. Send what noisy_sums returns."
            )

    def __add__(self, other: NoisySums) -> NoisySums:
        """Return the sums over the rows of both."""
        return NoisySums(
            self.counts + other.counts,
            self.sums + other.sums,
            self.variance + other.variance,
        )

    @property
    def rows(self) -> float:
        """About how many rows there are; 1 at least."""
        return max(1.0, float(self.counts.sum()))

    def times(self, factor: float) -> NoisySums:
        """Return the sums as if each row counted so much."""
        return NoisySums(
            self.counts * factor, self.sums * factor, self.variance * factor**2
        )

    def packed(self) -> TensorDict:
        """Return what a site sends; ``sums`` are float32."""
        return {**vars(self), "sums": self.sums.float()}

    @classmethod
    def unpacked(cls, arrays: Tensors, shape: Shape) -> NoisySums:
        """Return the sums that a site has ``packed``.

        Args:
            shape: of the task head's weight, ``(classes, inputs)``.

        Raises:
            UpdateError: other names or shapes, or the errors of ``NoisySums``.
        """
        if {*arrays} != {"counts", "sums", "variance"}:
            raise UpdateError(f"The noisy sums are {sorted(arrays)}.")
        sums = arrays["sums"]
        if sums.dtype != torch.float32 or tuple(sums.shape) != shape:
            actual = f"{sums.dtype} {list(sums.shape)}"
            raise UpdateError(
                f"The noisy sums are {actual}, not torch.float32 {list(shape)}."
            )
        return cls(arrays["counts"], sums.double(), arrays["variance"])


def loud(variances: Mapping[int, float]) -> list[int]:
    """Return the keys of sums whose noise would hide the rows of all others."""
    most = _LOUDEST * max(1.0, median(variances.values()))
    return sorted(key for key, variance in variances.items() if variance > most)


def capped_total(sums: Sequence[NoisySums]) -> NoisySums:
    """Return the sums of all sites, whose rows count at most as ``capped`` says."""
    rows = [each.rows for each in sums]
    capping = zip(sums, rows, capped(rows), strict=True)
    parts = [each.times(most / announced) for each, announced, most in capping]
    return sum(parts[1:], parts[0])


def noisy_sums(
    model: nn.Module,
    batches: Iterable[Tensors],
    task_head: str,
    clipping: Clipping,
    multiplier: float,
    draw: DrawsNoise | None = None,
) -> NoisySums:
    """Return counts and sums over a site's rows with noise, by the Gaussian mechanism.

    Neighbours are data sets with one row more or less. Rows are clipped one by one, and
    the noise is added once, to the whole. Without rows the answer is noise alone.

    Args:
        model: a ``transformers`` classifier of sequences with one class a row; it is
            run in evaluation mode, without gradients, and is not changed.
        batches: keyword arguments of the model's forward, with ``labels`` ``[rows]``;
            rows with a negative label are left out.
        task_head: the name of the model's last linear layer, from ``task_head_of``.
        clipping: by public numbers; of any kind, the guarantee holds.
        multiplier: the deviation of the noise, in units of what one row changes; 0 adds
            none.
        draw: of tests and experiments alone; None draws from the system's randomness.

    Source: Dwork and Roth, "The Algorithmic Foundations of Differential Privacy",
    appendix A; for the multiplier of an epsilon and a delta, Balle and Wang (ICML
    2018), as ``dp_accounting`` has it.

    Example: ``sums = noisy_sums(model, loader, "classifier", clipping, 1.39)``

    Raises:
        FedrotError: there is no such layer, or labels are no classes.
        UpdateError: the mean has another width than the layer.
    """
    weight = model.get_parameter(f"{task_head}.weight")
    classes, inputs = weight.shape
    if len(clipping.mean) != inputs:
        raise UpdateError(
            f"The public mean has {len(clipping.mean)} features, the layer "
            f"'{task_head}' {inputs}. Send that of the same body."
        )
    numbers = torch.zeros(classes, 1 + inputs, dtype=torch.float64)
    for rows, labels, _ in _read(model, batches, task_head):
        clipped = clipping.clip(rows)
        with_count = torch.cat([torch.ones_like(clipped[:, :1]), clipped], 1).cpu()
        numbers.index_add_(0, labels.cpu(), with_count)
    deviation = multiplier * SENSITIVITY
    if deviation:
        noise = (draw or system_noise)(numbers.numel()).reshape(numbers.shape)
        unit = 2.0 ** math.floor(math.log2(deviation * _GRID))
        numbers = ((numbers + deviation * noise) / unit).round() * unit
    variance = torch.tensor(deviation**2, dtype=torch.float64)
    return NoisySums(numbers[:, 0].clone(), numbers[:, 1:].clone(), variance)


def _read(
    model: nn.Module, batches: Iterable[Tensors], task_head: str
) -> Iterable[tuple[Tensor, Tensor, int]]:
    """Return rows and labels by batch; none if no row has a label."""
    labelled = list[Tensors]()
    for batch in map(as_batch, batches):
        labels = labels_in(batch)
        if labels.ndim != 1:
            raise FedrotError(
                f"The labels have the shape {list(labels.shape)}. Noise hides a row "
                "with one label, and no row with several."
            )
        if (labels >= 0).any():
            labelled.append(batch)
    return labelled_rows(model, labelled, SINGLE, task_head) if labelled else []


def system_noise(numbers: int) -> Tensor:
    """Return draws of a standard normal distribution, float64 ``[numbers]``.

    They are made from the system's randomness, which no seed repeats.
    """
    integers = np.frombuffer(secrets.token_bytes(8 * numbers), np.uint64)
    # The middle of one of 2^53 equal parts of the interval from 0 to 1.
    uniform = ((integers >> np.uint64(11)) + 0.5) * 2.0**-53
    return torch.from_numpy(ndtri(uniform))
