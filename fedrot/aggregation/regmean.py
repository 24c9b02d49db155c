"""``RegMean``: linear layers are merged by least squares on all clients' inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, linalg

from fedrot.aggregation.gram_sums import (
    MOST_GROWTH,
    UNBOUNDED,
    GramSums,
    Layer,
    grams_of,
)
from fedrot.aggregation.mean import ALL_ROWS, Mean
from fedrot.aggregation.registry import Aggregator, register_aggregation
from fedrot.collect.statistics import (
    GRAM,
    INPUT_AXIS,
    TRAINED,
    Statistics,
    along_rows,
    untrained,
)
from fedrot.errors import FedrotError, UpdateError
from fedrot.tensors import LARGEST_NORM, TensorDict, Tensors


@register_aggregation(
    "regmean", "least squares on the clients' inputs for linear layers, else the mean"
)
class RegMean(Aggregator):
    """Regression mean (Jin et al. 2023, Eq. 2 and Algorithm 1).

    ``W = (sum_i w_i W_i G_i) (sum_i w_i G_i)^-1`` for every weight ``W`` ``[out, in]``
    with Gram matrices ``G_i`` ``[in, in]`` per token (``collect_gram``); other tensors
    get the weighted mean. Off-diagonal entries are first multiplied by ``alpha``
    (section 3.3, Appendix A Eq. 8-9), and ``beta`` is added to the diagonal (Table 8).

    Sums and solutions are float64. If the inputs of all clients are 0 in some
    direction, the equations are singular: in this direction the result is the weighted
    mean, and ``notes`` names the layer. This is common with ``alpha=1``, which also
    needs Gram matrices that were not rounded to bfloat16. A layer whose solution is not
    finite, or much farther from the clients than they are from each other, gets the
    weighted mean and a note. (One huge Gram matrix reduces all others to rounding
    errors.)

    Rows that some client has not trained (statistics ``trained``) are the mean over the
    clients that trained them. A layer is regressed on the clients that sent its Gram
    matrix, if these are most of those that trained it by weight; otherwise it gets the
    weighted mean, and ``notes`` say so.

    Args:
        alpha: 0 to 1; 0.9 is the paper's choice for encoders, 0.1 for T5.
        beta: not negative; 0 is the paper's choice.
    """

    needs = (GRAM,)

    def __init__(self, alpha: float = 0.9, beta: float = 0.0) -> None:
        if not 0 <= alpha <= 1 or not 0 <= beta < float("inf"):
            raise FedrotError(
                f"alpha is {alpha}, beta {beta}; alpha must be 0 to 1, beta not "
                "negative."
            )
        self.alpha = alpha
        self.beta = beta
        self._grams = GramSums(alpha, beta)
        self._mean = Mean()
        self._layers: dict[Layer, _Sums] = {}
        #: The rows that every client has trained, for tensors with masks.
        self._trained: TensorDict = {}

    def add(
        self,
        update: Tensors,
        weight: float,
        statistics: Statistics | None = None,
    ) -> None:
        """Add one update with its Gram matrices.

        Raises:
            UpdateError: as ``Mean.add``; or there are no Gram matrices. After an error,
                nothing has been added.
        """
        self._mean.check(update, weight, statistics)
        statistics = statistics or {}
        lacking = untrained(statistics)
        grams = grams_of(statistics, lacking)
        if not grams:
            raise UpdateError(
                "The update has no Gram matrices, which RegMean needs; see "
                "fedrot.collect_gram."
            )
        self._mean.fold(update, weight, statistics)
        for name, mask in statistics.get(TRAINED, {}).items():
            if name not in lacking:
                self._trained[name] = self._trained.get(name, ALL_ROWS) & mask
        for layers, shrunk in self._grams.added(grams, weight, lacking):
            for layer in layers:
                kind, name = layer
                sent = _oriented(kind, update[name])
                sums = self._layers.setdefault(layer, _Sums(sent))
                apart = sent - sums.reference
                sums.product = sums.product + apart @ shrunk
                sums.farthest = max(sums.farthest, float(linalg.vector_norm(apart)))

    def result(self) -> TensorDict:
        """Return the merged tensors so far, and store notes.

        Raises:
            UpdateError: nothing was added.
        """
        merged = self._mean.result()
        notes: dict[str, str] = {}
        inverses = self._grams.inverses()
        for layer, sums in self._layers.items():
            kind, name = layer
            note = self._grams.coverage.note("a Gram matrix", layer)
            if note:
                notes[name] = note
            inverse = inverses.get(layer)
            if inverse is None:
                continue
            mean = merged[name]
            solution = sums.reference + inverse.solved(sums.product)
            if inverse.unseen:
                solution = solution + inverse.outside(
                    _oriented(kind, mean) - sums.reference
                )
                notes[name] = (
                    f"{inverse.unseen} of {inverse.size} directions of its input are "
                    "zero at every client; in these directions the weights are the mean"
                )
            weight = _oriented(kind, solution).to(mean.dtype)
            distance = linalg.vector_norm(solution - sums.reference)
            norm = linalg.vector_norm(weight, dtype=torch.float64)
            if distance > MOST_GROWTH * sums.farthest or not norm <= LARGEST_NORM:
                notes[name] = UNBOUNDED
                continue
            # Other rows keep the mean over the clients that trained them.
            rows = along_rows(self._trained.get(name, ALL_ROWS), weight)
            merged[name] = torch.where(rows, weight, mean).contiguous()
        self.notes = notes
        return merged


_ZERO = torch.zeros((), dtype=torch.float64)


@dataclass
class _Sums:
    """The sums of one layer.

    Relative weights are weights minus the first update's, ``reference`` ``[out, in]``:
    their sums lose fewer digits. ``product`` ``[out, in]`` is the sum of relative
    weights times Gram matrices, ``farthest`` the largest norm of relative weights.
    """

    reference: Tensor
    product: Tensor = _ZERO
    farthest: float = 0.0


def _oriented(kind: str, weight: Tensor) -> Tensor:
    """Return a weight as float64 ``[out, in]``, or such a matrix as a weight."""
    matrix = weight.detach().double()
    return matrix if INPUT_AXIS[kind] == 1 else matrix.mT
