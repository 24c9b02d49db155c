"""``RegMean``: every linear layer is merged by least squares on the inputs of all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.aggregation.registry import register_aggregation
from fedrot.collect.statistics import GRAMS, INPUT_AXIS, TRAINED, Statistics, check_alike, untrained
from fedrot.errors import FedrotError, UpdateError
from fedrot.tensors import LARGEST_NORM, Tensors, as_blocks

#: A solution is a rounding error if it is this many times farther from the first update than all others.
MOST_GROWTH = 1e3


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
    trained them. A client needs no Gram matrix of a layer that it has not trained at all.

    Args:
        alpha: 0 to 1; 0.9 is the paper's choice for encoders, 0.1 for T5.
        beta: not negative; 0 is the paper's choice.
    """

    needs: tuple[str, ...] = (GRAMS[1],)

    def __init__(self, alpha: float = 0.9, beta: float = 0.0) -> None:
        if not 0 <= alpha <= 1 or not 0 <= beta < float("inf"):
            raise FedrotError(f"alpha is {alpha}, beta {beta}; alpha must be 0 to 1, beta not negative.")
        self.alpha, self.beta = alpha, beta
        #: The layers that the last ``result`` did not solve, or not in all directions, with the reason.
        self.notes: Mapping[str, str] = {}
        self._mean = Mean()
        self._layers: dict[str, _Layer] = {}
        #: The rows that every client has trained, for tensors that some client trained in part.
        self._trained: dict[str, Tensor] = {}
        self._lacking: set[str] = set()

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Add one update with its Gram matrices.

        Raises:
            UpdateError: as ``Mean.add``; or there are no Gram matrices, or they belong to other layers
                or have another form than the first update's. After an error, nothing has been added.
        """
        self._mean.check(update, weight, statistics)
        statistics, lacking = statistics or {}, untrained(statistics)
        grams = {
            name: (kind, gram)
            for kind in INPUT_AXIS
            for name, gram in statistics.get(kind, {}).items()
            if name not in lacking
        }
        self._check(grams, lacking)
        self._mean.fold(update, weight, statistics)
        self._lacking |= lacking
        for name, mask in statistics.get(TRAINED, {}).items():
            if name not in lacking and not bool(mask.all()):
                self._trained[name] = self._trained.get(name, torch.tensor(True)) & mask
        # Layers with the same input have the same matrix, and share its sum while this is so.
        groups: dict[tuple[int, int], list[str]] = {}
        for name, (kind, gram) in grams.items():
            if name not in self._layers:
                self._layers[name] = _Layer(kind, _oriented(kind, update[name]))
            groups.setdefault((id(self._layers[name].total), id(gram)), []).append(name)
        for names in groups.values():
            gram = grams[names[0]][1]
            shrunk = weight * self._shrunk(as_blocks(gram).double())
            total = self._layers[names[0]].total + shrunk
            # Rounding errors of bfloat16 look like small inputs, and are treated as inputs.
            exact = torch.float64 if gram.dtype == torch.float64 else torch.float32
            for name in names:
                layer = self._layers[name]
                matrix = _oriented(layer.kind, update[name])
                apart = matrix - layer.reference
                layer.product = layer.product + _times(apart, shrunk)
                layer.farthest = max(layer.farthest, float(torch.linalg.vector_norm(apart)))
                layer.total = total
                layer.rounding = max(layer.rounding, torch.finfo(exact).eps)

    def _check(self, grams: Mapping[str, tuple[str, Tensor]], lacking: set[str]) -> None:
        if not grams:
            raise UpdateError(
                "The update has no Gram matrices, which RegMean needs; see fedrot.collect_gram."
            )
        check_alike("Gram matrix", grams.keys(), lacking, self._layers.keys(), self._lacking)
        for name in grams.keys() & self._layers.keys():
            (kind, gram), layer = grams[name], self._layers[name]
            if kind != layer.kind or as_blocks(gram).shape != layer.total.shape:
                raise UpdateError(
                    f"The Gram matrix of '{name}' has another kind or form than in the first update. "
                    "Send one form from every client."
                )

    def _shrunk(self, blocks: Tensor) -> Tensor:
        diagonal = torch.diag_embed(blocks.diagonal(dim1=-2, dim2=-1))
        eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
        return self.alpha * blocks + (1 - self.alpha) * diagonal + self.beta * eye

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors so far; raises ``UpdateError`` if nothing was added."""
        merged, notes = self._mean.result(), dict[str, str]()
        shared = {id(layer.total): layer for layer in self._layers.values()}
        inverses = {key: _Inverse(layer.total, layer.rounding) for key, layer in shared.items()}
        for name, layer in self._layers.items():
            inverse = inverses[id(layer.total)]
            found = layer.reference + inverse.solved(layer.product)
            if inverse.unseen:
                mean = _oriented(layer.kind, merged[name])
                found = found + inverse.outside(mean - layer.reference)
                notes[name] = (
                    f"{inverse.unseen} of {inverse.size} directions of its input are zero at every "
                    "client; in these directions the weights are the mean"
                )
            weight = (found if INPUT_AXIS[layer.kind] == 1 else found.mT).to(merged[name].dtype)
            grown = torch.linalg.vector_norm(found - layer.reference) > MOST_GROWTH * layer.farthest
            if grown or not torch.linalg.vector_norm(weight, dtype=torch.float64) <= LARGEST_NORM:
                notes[name] = "its equations have no bounded solution; its weights are the mean"
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
    fewer digits. ``product`` ``[out, in]`` is the sum of relative weights times Gram matrices, ``total``
    ``[blocks, n, n]`` the sum of Gram matrices, one tensor for layers with the same inputs. ``rounding``
    is the relative error of the entries of ``total``, ``farthest`` the largest norm of relative weights.
    """

    kind: str
    reference: Tensor
    product: Tensor = _ZERO
    total: Tensor = _ZERO
    rounding: float = 0.0
    farthest: float = 0.0


def _oriented(kind: str, weight: Tensor) -> Tensor:
    """Return a weight as float64 ``[out, in]``."""
    matrix = weight.detach().double()
    return matrix if INPUT_AXIS[kind] == 1 else matrix.mT


def _times(matrix: Tensor, blocks: Tensor) -> Tensor:
    """Return ``[out, n]`` times a block-diagonal matrix."""
    split = matrix.unflatten(1, (len(blocks), -1)).transpose(0, 1)
    return torch.bmm(split, blocks).transpose(0, 1).flatten(1)


class _Inverse:
    """The pseudo-inverse of a positive semi-definite matrix of float64 blocks ``[blocks, n, n]``.

    ``rounding`` is the relative error of the entries; eigenvalues below this error are zero. ``unseen``
    is the number of directions that the matrix maps to zero.
    """

    def __init__(self, blocks: Tensor, rounding: float) -> None:
        self.size = blocks.shape[0] * blocks.shape[1]
        # Rounding errors are proportional to the diagonal, so the diagonal is scaled to 1.
        diagonal = blocks.diagonal(dim1=-2, dim2=-1)
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
        pivots = self._factor.diagonal(dim1=-2, dim2=-1) ** 2
        self._decomposed = bool(failed.any()) or bool((pivots <= smallest).any())
        null = torch.diag_embed(dead.to(even))
        if self._decomposed:
            values, vectors = torch.linalg.eigh(even)
            kept = values > smallest
            self.unseen += int((~kept).sum())
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
        blocks = products.unflatten(1, (len(self._factor), -1)).transpose(0, 1)
        blocks = blocks * self._scale.unsqueeze(-2)
        if self._decomposed:
            blocks = blocks @ self._factor @ self._factor.mT
        else:
            blocks = torch.cholesky_solve(blocks.mT, self._factor).mT
        found = (blocks * self._scale.unsqueeze(-2)).transpose(0, 1).flatten(1)
        return found if self._null is None else found - self.outside(found)

    def outside(self, matrix: Tensor) -> Tensor:
        """Return the part of ``[out, n]`` in unseen directions."""
        assert self._null is not None
        return _times(matrix, self._null)
