"""Parts of regressions on Gram matrices: their sums over clients, and the inverse of a
sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from fedrot.aggregation.coverage import Coverage
from fedrot.collect.statistics import INPUT_AXIS, Statistics
from fedrot.errors import UpdateError

#: A solution is a rounding error if it is this many times larger than what was sent.
MOST_GROWTH = 1e3

#: Kind of a Gram matrix, and the weight that its inputs multiply.
Layer = tuple[str, str]
Grams = Mapping[Layer, Tensor]


def grams_of(statistics: Statistics, lacking: AbstractSet[str]) -> Grams:
    """Return the Gram matrices in statistics, without those of the tensors
    ``lacking``.
    """
    return {
        (kind, name): gram
        for kind in INPUT_AXIS
        for name, gram in statistics.get(kind, {}).items()
        if name not in lacking
    }


def unseen_note(inverse: Inverse) -> str:
    """Return the note about a layer whose equations are singular."""
    return (
        f"{inverse.unseen} of {inverse.size} directions of its input are zero at every "
        "client; in these directions the weights are the mean"
    )


#: The note about a layer without a solution.
UNBOUNDED = "its equations have no bounded solution; its weights are the mean"


class GramSums:
    """Sums of weighted Gram matrices in float64, one for all layers with the same
    inputs.

    Off-diagonal entries are first multiplied by ``alpha``, then ``beta`` is added to
    the diagonal.

    Attributes:
        totals: the sums by layer, ``[n, n]``.
        coverage: which layers most clients sent a Gram matrix of.
    """

    def __init__(self, alpha: float, beta: float = 0.0) -> None:
        self.alpha, self.beta = alpha, beta
        self.totals: dict[Layer, Tensor] = {}
        self.coverage = Coverage()
        #: The relative errors of the entries of the sums.
        self._rounding: dict[Layer, float] = {}

    def check(self, grams: Grams) -> None:
        """Raise ``UpdateError`` if there are no Gram matrices."""
        if not grams:
            raise UpdateError(
                "The update has no Gram matrices, which RegMean needs; see "
                "fedrot.collect_gram."
            )

    def added(
        self, grams: Grams, weight: float, lacking: AbstractSet[str]
    ) -> Iterator[tuple[list[Layer], Tensor]]:
        """Add Gram matrices that ``check`` has accepted; yield each as it is added.

        The matrices are added while the result is read. Each comes weighted and shrunk,
        ``[n, n]``, with all layers whose inputs it is of.

        Args:
            lacking: tensors that the client has not trained; they need no Gram
                matrices.
        """
        self.coverage.add(
            grams, ((kind, name) for kind in INPUT_AXIS for name in lacking), weight
        )
        # Layers with the same inputs have the same matrix, and share its sum while this
        # is so.
        groups: dict[tuple[int, int], list[Layer]] = {}
        for layer, gram in grams.items():
            groups.setdefault((id(self.totals.get(layer)), id(gram)), []).append(layer)
        for layers in groups.values():
            gram = grams[layers[0]]
            wide = gram.double()
            eye = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
            shrunk = (
                self.alpha * wide
                + (1 - self.alpha) * wide.diagonal().diag()
                + self.beta * eye
            )
            shrunk = weight * shrunk
            before = self.totals.get(layers[0])
            total = shrunk if before is None else before + shrunk
            # Rounding errors of bfloat16 look like small inputs, and are treated as
            # inputs.
            exact = torch.float64 if gram.dtype == torch.float64 else torch.float32
            for layer in layers:
                self.totals[layer] = total
                self._rounding[layer] = max(
                    self._rounding.get(layer, 0.0), torch.finfo(exact).eps
                )
            yield layers, shrunk

    def inverses(self) -> dict[Layer, Inverse]:
        """Return the inverses of the sums that most clients are in; layers that share a
        sum share it.
        """
        known = {
            layer: total
            for layer, total in self.totals.items()
            if self.coverage.most(layer)
        }
        ones = {id(total): layer for layer, total in known.items()}
        found = {
            key: Inverse(known[layer], self._rounding[layer])
            for key, layer in ones.items()
        }
        return {layer: found[id(total)] for layer, total in known.items()}

    def note(self, layer: Layer) -> str:
        """Return the note about a layer of which some client sent no Gram matrix; empty
        if all did.
        """
        return self.coverage.note("a Gram matrix", layer)


class Inverse:
    """The pseudo-inverse of a positive semi-definite matrix ``[n, n]``, float64.

    ``rounding`` is the relative error of the entries; eigenvalues below this error are
    zero. ``unseen`` is the number of directions that the matrix maps to zero.
    """

    def __init__(self, matrix: Tensor, rounding: float) -> None:
        self.size = len(matrix)
        # Rounding errors are proportional to the diagonal, so the diagonal is scaled to
        # 1.
        diagonal = matrix.diagonal()
        self._roots = diagonal.clamp_min(0).sqrt()
        self._scale = torch.where(diagonal > 0, diagonal.clamp_min(0).rsqrt(), 1.0)
        even = matrix * self._scale.unsqueeze(-1) * self._scale
        # Entries of a scaled Gram matrix are at most 1; rounding errors beside a tiny
        # diagonal are not.
        even = even.nan_to_num(0.0).clamp(-1, 1)
        smallest = (self.size + 32) * rounding
        # Units that were always zero are found without a decomposition.
        dead = diagonal <= 0
        null = dead.to(even).diag()
        even = even + null
        self.unseen = int(dead.sum())
        self._factor, failed = torch.linalg.cholesky_ex(even)
        # The smallest eigenvalue is at least 1 / trace(even^-1); a pivot may be much
        # larger than it.
        eye = torch.eye(self.size, dtype=even.dtype, device=even.device)
        inverted = torch.linalg.solve_triangular(self._factor, eye, upper=False)
        bound = inverted.square().sum().reciprocal()
        #: The eigenvalues, zero for unseen directions; None if a Cholesky factor was
        #: enough.
        self._values: Tensor | None = None
        if bool(failed) or not bool(bound > smallest):
            values, vectors = torch.linalg.eigh(even)
            kept = values > smallest
            self.unseen += int((~kept).sum())
            self._values = torch.where(kept, values, 0.0)
            self._factor = vectors * (torch.where(kept, values, 1.0).rsqrt() * kept)
            # An orthonormal basis of the directions that the matrix maps to zero.
            raw = vectors * ~kept * self._scale.unsqueeze(-1)
            u, _, _ = torch.linalg.svd(raw)
            basis = u[:, : int((~kept).sum())]
            null = null + basis @ basis.mT
        self._null = null if self.unseen else None

    def solved(self, products: Tensor) -> Tensor:
        """Return ``products`` times the inverse, zero in unseen directions."""
        if self._null is not None:
            products = products - self.outside(products)
        scaled = products * self._scale
        if self._values is not None:
            scaled = scaled @ self._factor @ self._factor.mT
        else:
            scaled = torch.cholesky_solve(scaled.mT, self._factor).mT
        found = scaled * self._scale
        return found if self._null is None else found - self.outside(found)

    def rooted(self, matrix: Tensor) -> Tensor:
        """Return ``[out, n]`` times a square root ``S`` of the matrix itself, ``S
        S^T``.

        The norm of the result is that of ``matrix`` in the metric of the matrix.
        """
        factor = self._factor if self._values is None else self._factor * self._values
        return matrix * self._roots @ factor

    def outside(self, matrix: Tensor) -> Tensor:
        """Return the part of ``[out, n]`` in unseen directions."""
        assert self._null is not None
        return matrix @ self._null
