"""Parts of regressions on Gram matrices: their sums over clients, and the inverse of a sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from fedrot.collect.statistics import INPUT_AXIS, Statistics, check_alike
from fedrot.errors import UpdateError
from fedrot.tensors import as_blocks

#: A solution is a rounding error if it is this many times larger than what was sent.
MOST_GROWTH = 1e3

#: Gram matrices by tensor name, each with its kind.
Grams = Mapping[str, tuple[str, Tensor]]


def grams_of(statistics: Statistics, lacking: AbstractSet[str]) -> Grams:
    """Return the Gram matrices in statistics, without those of the tensors ``lacking``."""
    return {
        name: (kind, gram)
        for kind in INPUT_AXIS
        for name, gram in statistics.get(kind, {}).items()
        if name not in lacking
    }


def unseen_note(inverse: Inverse) -> str:
    """Return the note about a layer whose equations are singular."""
    return (
        f"{inverse.unseen} of {inverse.size} directions of its input are zero at every client; in these "
        "directions the weights are the mean"
    )


#: The note about a layer without a solution.
UNBOUNDED = "its equations have no bounded solution; its weights are the mean"


class GramSums:
    """Sums of weighted Gram matrices in float64, one for all tensors with the same inputs.

    Off-diagonal entries are first multiplied by ``alpha``, then ``beta`` is added to the diagonal.

    Attributes:
        totals: the sums by tensor name, ``[blocks, n, n]``.
    """

    def __init__(self, alpha: float, beta: float = 0.0) -> None:
        self.alpha, self.beta = alpha, beta
        self.totals: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}
        #: The relative errors of the entries of the sums.
        self._rounding: dict[str, float] = {}
        self._lacking: set[str] = set()

    def check(self, grams: Grams, lacking: AbstractSet[str]) -> None:
        """Raise ``UpdateError`` if Gram matrices do not fit those that were added.

        Args:
            lacking: tensors that the client has not trained; they need no Gram matrices.
        """
        if not grams:
            raise UpdateError(
                "The update has no Gram matrices, which RegMean needs; see fedrot.collect_gram."
            )
        check_alike("Gram matrix", grams.keys(), lacking, self.totals.keys(), self._lacking)
        for name in grams.keys() & self.totals.keys():
            kind, gram = grams[name]
            if kind != self._kinds[name] or as_blocks(gram).shape != self.totals[name].shape:
                raise UpdateError(
                    f"The Gram matrix of '{name}' has another kind or form than in the first update. "
                    "Send one form from every client."
                )

    def added(
        self, grams: Grams, weight: float, lacking: AbstractSet[str]
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Add Gram matrices that ``check`` has accepted; yield each as it is added.

        The matrices are added while the result is read. Each comes weighted and shrunk, as
        ``[blocks, n, n]``, with the names of all tensors whose inputs it is of.
        """
        self._lacking |= lacking
        # Tensors with the same inputs have the same matrix, and share its sum while this is so.
        groups: dict[tuple[int, int], list[str]] = {}
        for name, (kind, gram) in grams.items():
            self._kinds.setdefault(name, kind)
            groups.setdefault((id(self.totals.get(name)), id(gram)), []).append(name)
        for names in groups.values():
            gram = grams[names[0]][1]
            shrunk = weight * self._shrunk(as_blocks(gram).double())
            before = self.totals.get(names[0])
            total = shrunk if before is None else before + shrunk
            # Rounding errors of bfloat16 look like small inputs, and are treated as inputs.
            exact = torch.float64 if gram.dtype == torch.float64 else torch.float32
            for name in names:
                self.totals[name] = total
                self._rounding[name] = max(self._rounding.get(name, 0.0), torch.finfo(exact).eps)
            yield names, shrunk

    def inverses(self) -> dict[str, Inverse]:
        """Return the inverse of every sum by tensor name; tensors that share a sum share its inverse."""
        names = {id(total): name for name, total in self.totals.items()}
        found = {key: Inverse(self.totals[n], self._rounding[n]) for key, n in names.items()}
        return {name: found[id(total)] for name, total in self.totals.items()}

    def _shrunk(self, blocks: Tensor) -> Tensor:
        diagonal = torch.diag_embed(blocks.diagonal(dim1=-2, dim2=-1))
        eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
        return self.alpha * blocks + (1 - self.alpha) * diagonal + self.beta * eye


def times(matrix: Tensor, blocks: Tensor) -> Tensor:
    """Return ``[out, n]`` times a block-diagonal matrix."""
    return _joined(torch.bmm(_split(matrix, blocks), blocks))


def _split(matrix: Tensor, blocks: Tensor) -> Tensor:
    """Return the columns ``[out, n]`` of each block, ``[blocks, out, size]``."""
    return matrix.unflatten(1, (len(blocks), -1)).transpose(0, 1)


def _joined(split: Tensor) -> Tensor:
    """Return ``[out, n]``, the inverse of ``_split``."""
    return split.transpose(0, 1).flatten(1)


class Inverse:
    """The pseudo-inverse of a positive semi-definite matrix of float64 blocks ``[blocks, n, n]``.

    ``rounding`` is the relative error of the entries; eigenvalues below this error are zero. ``unseen``
    is the number of directions that the matrix maps to zero.
    """

    def __init__(self, blocks: Tensor, rounding: float) -> None:
        self.size = blocks.shape[0] * blocks.shape[1]
        # Rounding errors are proportional to the diagonal, so the diagonal is scaled to 1.
        diagonal = blocks.diagonal(dim1=-2, dim2=-1)
        self._roots = diagonal.clamp_min(0).sqrt()
        self._scale = torch.where(diagonal > 0, diagonal.clamp_min(0).rsqrt(), 1.0)
        even = blocks * self._scale.unsqueeze(-1) * self._scale.unsqueeze(-2)
        # Entries of a scaled Gram matrix are at most 1; rounding errors beside a tiny diagonal are not.
        even = even.nan_to_num(0.0).clamp(-1, 1)
        smallest = (blocks.shape[-1] + 32) * rounding
        # Units that were always zero are found without a decomposition.
        dead = diagonal <= 0
        even = even + torch.diag_embed(dead.to(even))
        self.unseen = int(dead.sum())
        self._factor, failed = torch.linalg.cholesky_ex(even)
        # The smallest eigenvalue is at least 1 / trace(even^-1); a pivot may be much larger than it.
        eye = torch.eye(even.shape[-1], dtype=even.dtype, device=even.device)
        inverted = torch.linalg.solve_triangular(self._factor, eye.expand_as(even), upper=False)
        bounds = inverted.square().sum((-2, -1)).reciprocal()
        #: The eigenvalues, zero for unseen directions; None if a Cholesky factor was enough.
        self._values: Tensor | None = None
        null = torch.diag_embed(dead.to(even))
        if bool(failed.any()) or not bool((bounds > smallest).all()):
            values, vectors = torch.linalg.eigh(even)
            kept = values > smallest
            self.unseen += int((~kept).sum())
            self._values = torch.where(kept, values, 0.0)
            roots = torch.where(kept, values, 1.0).rsqrt() * kept
            self._factor = vectors * roots.unsqueeze(-2)
            # An orthonormal basis of the directions that the matrix maps to zero.
            raw = vectors * (~kept).unsqueeze(-2) * self._scale.unsqueeze(-1)
            u, sizes, _ = torch.linalg.svd(raw)
            count = (~kept).sum(-1, keepdim=True)
            basis = u * (torch.arange(sizes.shape[-1], device=u.device) < count).unsqueeze(-2)
            null = null + basis @ basis.mT
        self._null = null if self.unseen else None

    def solved(self, products: Tensor) -> Tensor:
        """Return ``products`` times the inverse, zero in unseen directions."""
        if self._null is not None:
            products = products - self.outside(products)
        blocks = _split(products, self._factor) * self._scale.unsqueeze(-2)
        if self._values is not None:
            blocks = blocks @ self._factor @ self._factor.mT
        else:
            blocks = torch.cholesky_solve(blocks.mT, self._factor).mT
        found = _joined(blocks * self._scale.unsqueeze(-2))
        return found if self._null is None else found - self.outside(found)

    def rooted(self, matrix: Tensor) -> Tensor:
        """Return ``[out, n]`` times a square root ``S`` of the matrix itself, ``S S^T``.

        The norm of the result is that of ``matrix`` in the metric of the matrix.
        """
        factor = self._factor if self._values is None else self._factor * self._values.unsqueeze(-2)
        return _joined(_split(matrix, factor) * self._roots.unsqueeze(-2) @ factor)

    def outside(self, matrix: Tensor) -> Tensor:
        """Return the part of ``[out, n]`` in unseen directions."""
        assert self._null is not None
        return times(matrix, self._null)
