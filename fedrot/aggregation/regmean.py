"""``RegMean``: every linear layer is merged by least squares on the inputs of all
clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.aggregation.gram_sums import (
    MOST_GROWTH,
    UNBOUNDED,
    GramSums,
    Layer,
    grams_of,
    unseen_note,
)
from fedrot.aggregation.mean import Mean
from fedrot.aggregation.registry import register_aggregation
from fedrot.collect.statistics import GRAM, INPUT_AXIS, TRAINED, Statistics, untrained
from fedrot.errors import FedrotError
from fedrot.tensors import LARGEST_NORM, Tensors


@register_aggregation(
    "regmean", "least squares on the clients' inputs for linear layers, else the mean"
)
class RegMean:
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

    needs: tuple[str, ...] = (GRAM,)

    def __init__(self, alpha: float = 0.9, beta: float = 0.0) -> None:
        if not 0 <= alpha <= 1 or not 0 <= beta < float("inf"):
            raise FedrotError(
                f"alpha is {alpha}, beta {beta}; alpha must be 0 to 1, beta not "
                "negative."
            )
        self.alpha, self.beta = alpha, beta
        self._grams = GramSums(alpha, beta)
        #: The layers that the last ``result`` did not solve, or not in all directions,
        #: with the reason.
        self.notes: Mapping[str, str] = {}
        self._mean = Mean()
        self._layers: dict[Layer, _Sums] = {}
        #: The rows that every client has trained, for tensors that some client trained
        #: in part.
        self._trained: dict[str, Tensor] = {}

    def add(
        self, update: Tensors, weight: float, statistics: Statistics | None = None
    ) -> None:
        """Add one update with its Gram matrices.

        Raises:
            UpdateError: as ``Mean.add``; or there are no Gram matrices. After an error,
                nothing has been added.
        """
        self._mean.check(update, weight, statistics)
        statistics, lacking = statistics or {}, untrained(statistics)
        grams = grams_of(statistics, lacking)
        self._grams.check(grams)
        self._mean.fold(update, weight, statistics)
        for name, mask in statistics.get(TRAINED, {}).items():
            if name not in lacking and not bool(mask.all()):
                self._trained[name] = self._trained.get(name, torch.tensor(True)) & mask
        for layers, shrunk in self._grams.added(grams, weight, lacking):
            for layer in layers:
                kind, name = layer
                sent = _oriented(kind, update[name])
                sums = self._layers.setdefault(layer, _Sums(sent))
                apart = sent - sums.reference
                sums.product = sums.product + apart @ shrunk
                sums.farthest = max(
                    sums.farthest, float(torch.linalg.vector_norm(apart))
                )

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors so far; raises ``UpdateError`` if nothing was
        added.
        """
        merged, notes = self._mean.result(), dict[str, str]()
        inverses = self._grams.inverses()
        for layer, sums in self._layers.items():
            kind, name = layer
            if note := self._grams.note(layer):
                notes[name] = note
            inverse = inverses.get(layer)
            if inverse is None:
                continue
            found = sums.reference + inverse.solved(sums.product)
            if inverse.unseen:
                mean = _oriented(kind, merged[name])
                found = found + inverse.outside(mean - sums.reference)
                notes[name] = unseen_note(inverse)
            weight = (found if INPUT_AXIS[kind] == 1 else found.mT).to(
                merged[name].dtype
            )
            grown = (
                torch.linalg.vector_norm(found - sums.reference)
                > MOST_GROWTH * sums.farthest
            )
            if (
                grown
                or not torch.linalg.vector_norm(weight, dtype=torch.float64)
                <= LARGEST_NORM
            ):
                notes[name] = UNBOUNDED
                continue
            solved = (
                self._trained.get(name, torch.tensor(True))
                .reshape(-1, 1)
                .to(weight.device)
            )
            merged[name] = torch.where(solved, weight, merged[name]).contiguous()
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
    """Return a weight as float64 ``[out, in]``."""
    matrix = weight.detach().double()
    return matrix if INPUT_AXIS[kind] == 1 else matrix.mT
