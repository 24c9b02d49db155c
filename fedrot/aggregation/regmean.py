"""RegMean: every linear layer is merged by least squares on its clients' inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.aggregation.statistics import GRAMS, INPUT_AXIS, Statistics, Tensors
from fedrot.errors import FedrotError, UpdateError

#: Directions whose share of the largest eigenvalue is below this were seen by no client.
_UNSEEN = 1e-12


class RegMean:
    """Regression mean (Jin et al. 2023, Eq. 2 and Algorithm 1).

    ``W = (sum_i w_i W_i G_i) (sum_i w_i G_i)^-1`` for every weight ``W`` ``[out, in]`` that has Gram
    matrices, the weighted mean for everything else. Update weights multiply Gram matrices *per
    token*, as ``collect_gram`` returns them. Off-diagonal entries are first multiplied by ``alpha``
    (section 3.3, Appendix A Eq. 8-9), and ``beta`` is added to the diagonal (Table 8).

    Sums and solutions are float64. Inputs that no client has seen leave the equations singular; in
    these directions the weights are the weighted mean, and ``notes`` says so.

    Args:
        alpha: 0 to 1; 0.9 is the paper's choice for encoders, 0.1 for T5.
        beta: not negative; 0 is the paper's choice.
    """

    needs: tuple[str, ...] = (GRAMS[1],)

    def __init__(self, alpha: float = 0.9, beta: float = 0.0) -> None:
        if not 0 <= alpha <= 1 or not 0 <= beta < float("inf"):
            raise FedrotError(f"alpha is {alpha}, beta {beta}; alpha is 0 to 1, beta not negative.")
        self.alpha, self.beta = alpha, beta
        self._mean = Mean()
        self._reference: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}
        self._readers: dict[str, str] = {}
        self._grams: dict[str, Tensor] = {}
        self._products: dict[str, Tensor] = {}
        self._notes: dict[str, str] = {}

    @property
    def notes(self) -> Mapping[str, str]:
        """The layers whose equations were singular in the last ``result``."""
        return self._notes

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Fold one update in, with its Gram matrices.

        Raises:
            UpdateError: as ``Mean.add``; or there are no Gram matrices, or they are of other layers,
                in another form or shared by other layers than the first update's. Nothing has been
                added then.
        """
        grams = {
            name: (kind, gram)
            for kind in INPUT_AXIS
            for name, gram in (statistics or {}).get(kind, {}).items()
        }
        readers = _readers({name: gram for name, (_, gram) in grams.items()})
        self._check(grams, readers)
        self._mean.add(update, weight, statistics)
        if not self._readers:
            self._readers = readers
            self._kinds = {name: kind for name, (kind, _) in grams.items()}
            self._reference = {name: self._oriented(name, update[name]) for name in grams}
        shrunk = {
            first: weight * self._shrunk(_as_blocks(grams[first][1]).double())
            for first in dict.fromkeys(readers.values())
        }
        for first, gram in shrunk.items():
            self._grams[first] = self._grams[first] + gram if first in self._grams else gram
        for name, first in readers.items():
            difference = self._oriented(name, update[name]) - self._reference[name]
            product = _times(difference, shrunk[first])
            self._products[name] = self._products.get(name, 0) + product

    def _check(self, grams: Mapping[str, tuple[str, Tensor]], readers: Mapping[str, str]) -> None:
        if not grams:
            raise UpdateError(
                "The update comes without Gram matrices, which RegMean needs; see fedrot.collect_gram."
            )
        if not self._readers:
            return
        if readers != self._readers:
            odd = sorted(dict(readers.items() ^ self._readers.items()))
            raise UpdateError(
                f"The Gram matrix of '{odd[0]}' is missing, extra, or shared with other layers than in "
                "the first update. Collect statistics alike at every client."
            )
        for name, first in self._readers.items():
            blocks = _as_blocks(grams[name][1])
            if blocks.shape != self._grams[first].shape:
                raise UpdateError(
                    f"The Gram matrix of '{name}' has another form than in the first update. Send one "
                    "form from every client."
                )

    def _shrunk(self, blocks: Tensor) -> Tensor:
        diagonal = torch.diag_embed(blocks.diagonal(dim1=-2, dim2=-1))
        eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
        return self.alpha * blocks + (1 - self.alpha) * diagonal + self.beta * eye

    def _oriented(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight as float64 ``[out, in]``."""
        matrix = weight.detach().double()
        return matrix if INPUT_AXIS[self._kinds[name]] == 1 else matrix.mT

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors so far; adding may go on afterwards.

        Raises:
            UpdateError: nothing was added.
        """
        merged = self._mean.result()
        self._notes = {}
        inverses = {first: _Inverse(gram) for first, gram in self._grams.items()}
        for name, first in self._readers.items():
            inverse, reference = inverses[first], self._reference[name]
            # In directions that nobody has seen, the mean; elsewhere, least squares.
            found = reference + inverse.solved(self._products[name])
            if inverse.unseen:
                mean = self._oriented(name, merged[name])
                found = found + inverse.outside(mean - reference)
                self._notes[name] = (
                    f"{inverse.unseen} of {inverse.size} directions of its input were seen by no "
                    "client; there the weights are the mean"
                )
            weight = found if INPUT_AXIS[self._kinds[name]] == 1 else found.mT
            merged[name] = weight.to(merged[name].dtype).contiguous()
        return merged


def _readers(grams: Tensors) -> dict[str, str]:
    """Return, for every layer, the first one that holds the same matrix."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(gram), name) for name, gram in grams.items()}


def _as_blocks(gram: Tensor) -> Tensor:
    """Return a full, block-diagonal or diagonal matrix as ``[blocks, size, size]``."""
    return gram[:, None, None] if gram.ndim == 1 else gram[None] if gram.ndim == 2 else gram


def _times(matrix: Tensor, blocks: Tensor) -> Tensor:
    """Return ``[out, n]`` times a block-diagonal matrix."""
    split = matrix.unflatten(1, (len(blocks), -1)).transpose(0, 1)
    return torch.bmm(split, blocks).transpose(0, 1).flatten(1)


class _Inverse:
    """The inverse of a block-diagonal positive semi-definite matrix where it has one."""

    def __init__(self, blocks: Tensor) -> None:
        self.size = blocks.shape[0] * blocks.shape[1]
        self.unseen = 0
        self._factor, failed = torch.linalg.cholesky_ex(blocks)
        pivots = self._factor.diagonal(dim1=-2, dim2=-1) ** 2
        self._vectors: Tensor | None = None
        if bool(failed.any()) or bool(pivots.min() <= _UNSEEN * blocks.abs().max()):
            values, vectors = torch.linalg.eigh(blocks)
            kept = values > _UNSEEN * values.max()
            self.unseen = int((~kept).sum())
            # Unseen directions get a zero vector and any value.
            self._vectors = vectors * kept.unsqueeze(-2)
            self._values = torch.where(kept, values, 1.0)

    def solved(self, products: Tensor) -> Tensor:
        """Return ``products`` times the inverse, zero in unseen directions."""
        if self._vectors is not None:
            return _times(products, self._vectors / self._values.unsqueeze(-2) @ self._vectors.mT)
        blocks = products.unflatten(1, (len(self._factor), -1)).transpose(0, 1)
        return torch.cholesky_solve(blocks.mT, self._factor).mT.transpose(0, 1).flatten(1)

    def outside(self, matrix: Tensor) -> Tensor:
        """Return the part of ``[out, n]`` in unseen directions."""
        assert self._vectors is not None
        return matrix - _times(matrix, self._vectors @ self._vectors.mT)
