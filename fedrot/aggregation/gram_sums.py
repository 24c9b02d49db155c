"""Regressions on Gram matrices: their sums over clients, and the inverse of a sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, linalg

from fedrot.aggregation.coverage import Coverage
from fedrot.collect.statistics import INPUT_AXIS, Statistics
from fedrot.tensors import compute_dtype, identity

#: A solution is a rounding error if it is this many times larger than what was sent.
MOST_GROWTH = 1e3

#: Kind of a Gram matrix, and the weight that its inputs multiply.
Layer = tuple[str, str]
Grams = Mapping[Layer, Tensor]


def grams_of(statistics: Statistics, lacking: AbstractSet[str]) -> Grams:
    """Return the Gram matrices of statistics, but of the tensors ``lacking``."""
    grams: dict[Layer, Tensor] = {}
    for kind in INPUT_AXIS:
        for name, gram in statistics.get(kind, {}).items():
            if name not in lacking:
                grams[kind, name] = gram
    return grams


#: The note about a layer without a solution.
UNBOUNDED = "its equations have no bounded solution; its weights are the mean"


class GramSums:
    """Sums of weighted Gram matrices in float64.

    Layers with the same inputs share a sum.

    Off-diagonal entries are first multiplied by ``alpha``, then ``beta`` is added to
    the diagonal.

    Attributes:
        totals: the sums by layer, ``[n, n]``.
        coverage: which layers most clients sent a Gram matrix of.
    """

    def __init__(self, alpha: float, beta: float = 0.0) -> None:
        self.alpha = alpha
        self.beta = beta
        self.totals: dict[Layer, Tensor] = {}
        self.coverage = Coverage()
        #: The relative errors of the entries of the sums.
        self._rounding: dict[Layer, float] = {}

    def added(
        self,
        grams: Grams,
        weight: float,
        lacking: AbstractSet[str],
    ) -> Iterator[tuple[list[Layer], Tensor]]:
        """Add a client's Gram matrices; yield each as it is added.

        The matrices are added while the result is read. Each comes weighted and shrunk,
        ``[n, n]``, with all layers whose inputs it is of.

        Args:
            lacking: tensors that the client has not trained; they need no Gram
                matrices.
        """
        untrained = ((kind, name) for kind in INPUT_AXIS for name in lacking)
        self.coverage.add(grams, untrained, weight)
        # Layers with the same inputs have the same matrix, and share its sum while this
        # is so.
        groups: dict[tuple[int, int], list[Layer]] = {}
        for layer, gram in grams.items():
            groups.setdefault((id(self.totals.get(layer)), id(gram)), []).append(layer)
        for layers in groups.values():
            gram = grams[layers[0]]
            wide = gram.double()
            diagonal = (1 - self.alpha) * wide.diagonal().diag()
            added = self.beta * identity(wide)
            shrunk = weight * (self.alpha * wide + diagonal + added)
            total = self.totals.get(layers[0], 0) + shrunk
            # Rounding errors of bfloat16 look like small inputs, and are treated as
            # inputs.
            rounding = torch.finfo(compute_dtype(gram)).eps
            for layer in layers:
                self.totals[layer] = total
                self._rounding[layer] = max(self._rounding.get(layer, 0.0), rounding)
            yield layers, shrunk

    def inverses(self) -> dict[Layer, Inverse]:
        """Return the inverses of the sums that most clients are in.

        Layers that share a sum share its inverse.
        """
        # Tensors are compared by identity.
        by_sum: dict[Tensor, Inverse] = {}
        inverses: dict[Layer, Inverse] = {}
        for layer, total in self.totals.items():
            if not self.coverage.most(layer):
                continue
            if total not in by_sum:
                by_sum[total] = Inverse(total, self._rounding[layer])
            inverses[layer] = by_sum[total]
        return inverses


class Inverse:
    """The pseudo-inverse of a positive semi-definite matrix ``[n, n]``, float64.

    ``rounding`` is the relative error of the entries; eigenvalues below this error are
    zero. ``unseen`` is the number of directions that the matrix maps to zero.
    """

    def __init__(self, matrix: Tensor, rounding: float) -> None:
        self.size = len(matrix)
        # Rounding errors are proportional to the diagonal, so it is scaled to 1.
        diagonal = matrix.diagonal()
        self._scale = torch.where(diagonal > 0, diagonal.clamp_min(0).rsqrt(), 1.0)
        column = self._scale.unsqueeze(-1)
        even = matrix * column * self._scale
        # Entries of a scaled Gram matrix are at most 1; rounding errors beside a tiny
        # diagonal are not.
        even = even.nan_to_num(0.0).clamp(-1, 1)
        smallest = (self.size + 32) * rounding
        # Units that were always zero are found without a decomposition.
        dead = diagonal <= 0
        null = dead.to(even).diag()
        even = even + null
        self.unseen = int(dead.sum())
        self._factor, failed = linalg.cholesky_ex(even)
        # The smallest eigenvalue is at least 1 / trace(even^-1); a pivot may be much
        # larger than it.
        inverted = linalg.solve_triangular(self._factor, identity(even), upper=False)
        bound = inverted.square().sum().reciprocal()
        #: Whether the factor is the triangular one of Cholesky; else it is a root of
        #: the inverse.
        self._triangular = bool(not failed and bound > smallest)
        if not self._triangular:
            values, vectors = linalg.eigh(even)
            kept = values > smallest
            zero = ~kept
            count = int(zero.sum())
            self.unseen += count
            self._factor = vectors * (torch.where(kept, values, 1.0).rsqrt() * kept)
            # An orthonormal basis of the directions that the matrix maps to zero.
            raw = vectors * zero * column
            basis = linalg.svd(raw).U[:, :count]
            null = null + basis @ basis.mT
        self._null = null if self.unseen else None

    def solved(self, products: Tensor) -> Tensor:
        """Return ``products`` times the inverse, zero in unseen directions."""
        if self._null is not None:
            products = products - self.outside(products)
        scaled = products * self._scale
        if self._triangular:
            scaled = torch.cholesky_solve(scaled.mT, self._factor).mT
        else:
            scaled = scaled @ self._factor @ self._factor.mT
        solution = scaled * self._scale
        return solution if self._null is None else solution - self.outside(solution)

    def outside(self, matrix: Tensor) -> Tensor:
        """Return the part of ``[out, n]`` in unseen directions."""
        assert self._null is not None
        return matrix @ self._null
