"""``NoisySums``: counts and sums by class, whose noise bounds what a row tells."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from fedrot.task_head.votes import capped
from fedrot.tensors import Shape, TensorDict, Tensors

#: How far one row more or less moves the counts and sums together: it changes one count
#: by 1, and one sum by a vector that is not longer than 1.
SENSITIVITY = math.sqrt(2)

#: Accepted noise, in standard deviations.
_FARTHEST = 6

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
    no whole numbers, and there is no Gram matrix. ``unpacked`` checks them.

    Attributes:
        counts: rows of each class, float64 ``[classes]``.
        sums: of the rows that ``Clipping.clip`` returns, float64 ``[classes, inputs]``.
        variance: of the noise in each number, float64 ``[]``; 0 without noise.
    """

    counts: Tensor
    sums: Tensor
    variance: Tensor

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
            UpdateError: other names, dtypes or shapes, not finite, a variance below 0;
                or sums that no rows and noise can have: a count far below 0, or a sum
                that is far longer than its count.
        """
        classes, inputs = shape
        expected = {
            "counts": (torch.float64, (classes,)),
            "sums": (torch.float32, (classes, inputs)),
            "variance": (torch.float64, ()),
        }
        claims = {name: (x.dtype, tuple(x.shape)) for name, x in arrays.items()}
        if claims != expected:
            raise UpdateError(f"The noisy sums are {claims}, not {expected}.")
        received = cls(arrays["counts"], arrays["sums"].double(), arrays["variance"])
        # NaN where the variance is below 0.
        deviation = received.variance.sqrt()
        lengths = torch.linalg.vector_norm(received.sums, dim=1)
        finite = torch.isfinite(received.counts.sum() + lengths.sum() + deviation)
        # The length of noise in so many numbers, and rounding to float32.
        slack = deviation * (math.sqrt(inputs) + 2 * _FARTHEST) + 1e-3
        longest = received.counts.clamp(min=0) * (1 + 1e-3) + slack
        possible = (lengths <= longest) & (received.counts >= -_FARTHEST * deviation)
        if not (finite & possible).all():
            raise UpdateError(
                "The noisy sums are not finite, or larger than so many clipped rows "
                "and their noise can be. Send what noisy_sums returns."
            )
        return received


def loud(variances: Mapping[int, float]) -> list[int]:
    """Return the keys of sums whose noise would hide the rows of all others."""
    most = _LOUDEST * max(1.0, median(variances.values()))
    return sorted(key for key, variance in variances.items() if variance > most)


def capped_total(sums: Sequence[NoisySums]) -> NoisySums:
    """Return the sums of all sites, whose rows count at most as ``capped`` says."""
    # Sites whose rows are not above their noise would lower the median of all.
    heard = [s for s in sums if s.rows**2 > 1 + len(s.counts) * float(s.variance)]
    kept = heard or sums
    largest = capped([each.rows for each in kept])
    pairs = zip(kept, largest, strict=True)
    first, *others = (each.times(most / each.rows) for each, most in pairs)
    return sum(others, first)


def noisy_sums(
    model: nn.Module,
    batches: Iterable[Tensors],
    task_head: str,
    clipping: Clipping,
    multiplier: float,
    draw: DrawsNoise | None = None,
) -> NoisySums:
    """Return counts and sums over a site's rows with noise, by the Gaussian mechanism.

    Neighbours are data sets with one row more or less. Rows are run and clipped one by
    one, and the noise is added once, to the whole. Without rows the answer is noise
    alone. A model whose answer for a row depends on the rows before has no guarantee.

    Args:
        model: a ``transformers`` classifier of sequences with one class a row; it is
            run in evaluation mode, without gradients, and is not changed.
        batches: keyword arguments of the model's forward, with ``labels`` ``[rows]``;
            rows with a label that is no class are left out. Texts need an
            ``attention_mask``. Each row is run alone, without its padding.
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
        FedrotError: there is no such layer, a row has several labels, or texts have no
            mask.
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
    alone = [*_alone(batches, classes)]
    read = labelled_rows(model, alone, SINGLE, task_head) if alone else ()
    for rows, labels, _ in read:
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


def _alone(batches: Iterable[Tensors], classes: int) -> Iterator[TensorDict]:
    """Yield each row with a class as a batch of its own, without padding.

    In one batch the others' lengths change a row's padding and its rounding, so that
    one row more would change the features of all.
    """
    for batch in map(as_batch, batches):
        labels = labels_in(batch)
        mask = batch.get("attention_mask")
        if labels.ndim != 1 or ("input_ids" in batch and mask is None):
            raise FedrotError(
                f"The labels have the shape {list(labels.shape)}, and a batch has "
                f"{', '.join(batch)}. Noise hides a row with one label, without "
                "padding: give texts an attention_mask."
            )
        for row in ((labels >= 0) & (labels < classes)).nonzero().flatten().tolist():
            alone = dict(batch)
            for name, value in batch.items():
                # What has another length is no tensor by row.
                if len(value) == len(labels):
                    alone[name] = value[row : row + 1]
                if mask is not None and value.shape[:2] == mask.shape:
                    alone[name] = alone[name][:, mask[row].bool()]
            yield alone


def system_noise(numbers: int) -> Tensor:
    """Return draws of a standard normal distribution, float64 ``[numbers]``.

    They are made from the system's randomness, which no seed repeats.
    """
    integers = np.frombuffer(secrets.token_bytes(8 * numbers), np.uint64)
    # The middle of one of 2^52 equal parts of the interval from 0 to 1.
    return torch.from_numpy(ndtri(((integers >> np.uint64(12)) + 0.5) * 2.0**-52))
