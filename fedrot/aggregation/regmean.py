"""``RegMean``: every linear layer is merged by least squares on the inputs of all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.aggregation.gram_sums import (
    MOST_GROWTH,
    UNBOUNDED,
    GramSums,
    grams_of,
    times,
    unseen_note,
)
from fedrot.aggregation.mean import Mean
from fedrot.aggregation.registry import register_aggregation
from fedrot.collect.statistics import GRAMS, INPUT_AXIS, TRAINED, Statistics, untrained
from fedrot.errors import FedrotError
from fedrot.tensors import LARGEST_NORM, Tensors


@register_aggregation("regmean", "least squares on the clients' inputs for linear layers, else the mean")
class RegMean:
    """Regression mean (Jin et al. 2023, Eq. 2 and Algorithm 1).

    ``W = (sum_i w_i W_i G_i) (sum_i w_i G_i)^-1`` for every weight ``W`` ``[out, in]`` with Gram
    matrices ``G_i`` ``[in, in]`` per token (``collect_gram``); other tensors get the weighted mean.
    Off-diagonal entries are first multiplied by ``alpha`` (section 3.3, Appendix A Eq. 8-9), and
    ``beta`` is added to the diagonal (Table 8).

    Sums and solutions are float64. If the inputs of all clients are 0 in some direction, the equations
    are singular: in this direction the result is the weighted mean, and ``notes`` names the layer. This
    is common with ``alpha=1``, which also needs Gram matrices that were not rounded to bfloat16. A layer
    whose solution is not finite, or much farther from the clients than they are from each other, gets
    the weighted mean and a note. (One huge Gram matrix reduces all others to rounding errors.)

    Rows that some client has not trained (statistics ``trained``) are the mean over the clients that
    trained them. A client with Gram matrices of some layers needs none of a layer that it has not
    trained at all.

    Args:
        alpha: 0 to 1; 0.9 is the paper's choice for encoders, 0.1 for T5.
        beta: not negative; 0 is the paper's choice.
    """

    needs: tuple[str, ...] = (GRAMS[1],)

    def __init__(self, alpha: float = 0.9, beta: float = 0.0) -> None:
        if not 0 <= alpha <= 1 or not 0 <= beta < float("inf"):
            raise FedrotError(f"alpha is {alpha}, beta {beta}; alpha must be 0 to 1, beta not negative.")
        self.alpha, self.beta = alpha, beta
        self._grams = GramSums(alpha, beta)
        #: The layers that the last ``result`` did not solve, or not in all directions, with the reason.
        self.notes: Mapping[str, str] = {}
        self._mean = Mean()
        self._layers: dict[str, _Layer] = {}
        #: The rows that every client has trained, for tensors that some client trained in part.
        self._trained: dict[str, Tensor] = {}

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Add one update with its Gram matrices.

        Raises:
            UpdateError: as ``Mean.add``; or there are no Gram matrices, or they belong to other layers
                or have another form than the first update's. After an error, nothing has been added.
        """
        self._mean.check(update, weight, statistics)
        statistics, lacking = statistics or {}, untrained(statistics)
        grams = grams_of(statistics, lacking)
        self._grams.check(grams, lacking)
        self._mean.fold(update, weight, statistics)
        for name, mask in statistics.get(TRAINED, {}).items():
            if name not in lacking and not bool(mask.all()):
                self._trained[name] = self._trained.get(name, torch.tensor(True)) & mask
        for names, shrunk in self._grams.added(grams, weight, lacking):
            for name in names:
                if name not in self._layers:
                    kind, _ = grams[name]
                    self._layers[name] = _Layer(kind, _oriented(kind, update[name]))
                layer = self._layers[name]
                apart = _oriented(layer.kind, update[name]) - layer.reference
                layer.product = layer.product + times(apart, shrunk)
                layer.farthest = max(layer.farthest, float(torch.linalg.vector_norm(apart)))

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors so far; raises ``UpdateError`` if nothing was added."""
        merged, notes = self._mean.result(), dict[str, str]()
        inverses = self._grams.inverses()
        for name, layer in self._layers.items():
            inverse = inverses[name]
            found = layer.reference + inverse.solved(layer.product)
            if inverse.unseen:
                mean = _oriented(layer.kind, merged[name])
                found = found + inverse.outside(mean - layer.reference)
                notes[name] = unseen_note(inverse)
            weight = (found if INPUT_AXIS[layer.kind] == 1 else found.mT).to(merged[name].dtype)
            grown = torch.linalg.vector_norm(found - layer.reference) > MOST_GROWTH * layer.farthest
            if grown or not torch.linalg.vector_norm(weight, dtype=torch.float64) <= LARGEST_NORM:
                notes[name] = UNBOUNDED
                continue
            solved = self._trained.get(name, torch.tensor(True)).reshape(-1, 1).to(weight.device)
            merged[name] = torch.where(solved, weight, merged[name]).contiguous()
        self.notes = notes
        return merged


_ZERO = torch.zeros((), dtype=torch.float64)


@dataclass
class _Layer:
    """The sums of one layer, whose Gram matrices have one ``kind``.

    Relative weights are weights minus the first update's, ``reference`` ``[out, in]``: their sums lose
    fewer digits. ``product`` ``[out, in]`` is the sum of relative weights times Gram matrices,
    ``farthest`` the largest norm of relative weights.
    """

    kind: str
    reference: Tensor
    product: Tensor = _ZERO
    farthest: float = 0.0


def _oriented(kind: str, weight: Tensor) -> Tensor:
    """Return a weight as float64 ``[out, in]``."""
    matrix = weight.detach().double()
    return matrix if INPUT_AXIS[kind] == 1 else matrix.mT
