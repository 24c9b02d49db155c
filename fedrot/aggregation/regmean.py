"""RegMean: every linear layer is merged by least squares on its clients' inputs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.errors import FedrotError, UpdateError
from fedrot.statistic_kinds import GRAMS, INPUT_AXIS, TRAINED, Statistics, Tensors, untrained


class RegMean:
    """Regression mean (Jin et al. 2023, Eq. 2 and Algorithm 1).

    ``W = (sum_i w_i W_i G_i) (sum_i w_i G_i)^-1`` for every weight ``W`` ``[out, in]`` that has Gram
    matrices, the weighted mean for everything else. Update weights multiply Gram matrices *per
    token*, as ``collect_gram`` returns them. Off-diagonal entries are first multiplied by ``alpha``
    (section 3.3, Appendix A Eq. 8-9), and ``beta`` is added to the diagonal (Table 8).

    Sums and solutions are float64. Inputs that no client has seen leave the equations singular; in
    these directions the weights are the weighted mean, and ``notes`` says so. With ``alpha=1`` this
    is common, and needs Gram matrices that were not rounded to bfloat16.

    Rows that some client has not trained (statistics ``trained``) are the mean of those that have. A
    client that has not trained a layer at all needs no Gram matrix of it.

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
        self._layers: dict[str, _Layer] = {}
        self._totals: dict[str, _Total] = {}
        self._partly: dict[str, Tensor] = {}
        self._lacking: set[str] = set()
        self._notes: dict[str, str] = {}

    @property
    def notes(self) -> Mapping[str, str]:
        """The layers whose equations were singular in the last ``result``."""
        return self._notes

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Fold one update in, with its Gram matrices.

        Raises:
            UpdateError: as ``Mean.add``; or there are no Gram matrices, or they are of other layers
                or in another form than the first update's. Nothing has been added then.
        """
        self._mean.check(update, weight, statistics)
        masks = (statistics or {}).get(TRAINED, {})
        lacking = untrained(statistics)
        grams = {
            name: (kind, gram)
            for kind in INPUT_AXIS
            for name, gram in (statistics or {}).get(kind, {}).items()
            if name not in lacking
        }
        sharing = _sharing({name: gram for name, (_, gram) in grams.items()})
        self._check(grams, lacking)
        self._mean.fold(update, weight, statistics)
        self._lacking |= lacking
        for name, mask in masks.items():
            if name not in lacking and not bool(mask.all()):
                before = self._partly.get(name)
                self._partly[name] = mask if before is None else before & mask
        self._part(sharing)
        shrunk: dict[int, Tensor] = {}
        added: set[str] = set()
        for name, (kind, gram) in grams.items():
            if id(gram) not in shrunk:
                shrunk[id(gram)] = weight * self._shrunk(_as_blocks(gram).double())
            matrix = _oriented(kind, update[name])
            if name not in self._layers:
                # Who comes later has no part in the totals of those before.
                total = name if self._lacking else sharing[name]
                self._layers[name] = _Layer(kind, total, matrix)
            layer = self._layers[name]
            layer.add(matrix, shrunk[id(gram)])
            if layer.total not in added:
                added.add(layer.total)
                self._totals.setdefault(layer.total, _Total()).add(shrunk[id(gram)], gram.dtype)

    def _part(self, sharing: Mapping[str, str]) -> None:
        """Give layers that share a total totals of their own, unless all of them get the same now."""
        groups: dict[str, list[str]] = {}
        for name, layer in self._layers.items():
            groups.setdefault(layer.total, []).append(name)
        for key, names in groups.items():
            if len({sharing.get(name) for name in names}) > 1:
                for name in names:
                    self._totals[name] = copy(self._totals[key])
                    self._layers[name].total = name

    def _check(self, grams: Mapping[str, tuple[str, Tensor]], lacking: set[str]) -> None:
        if not grams:
            raise UpdateError(
                "The update comes without Gram matrices, which RegMean needs; see fedrot.collect_gram."
            )
        if not self._layers:
            return
        odd = sorted(
            (self._layers.keys() - grams.keys() - lacking)
            | (grams.keys() - self._layers.keys() - self._lacking)
        )
        if odd:
            raise UpdateError(
                f"The Gram matrix of '{odd[0]}' is missing or extra, compared with the first update. "
                "Collect statistics alike at every client."
            )
        for name in grams.keys() & self._layers.keys():
            (kind, gram), layer = grams[name], self._layers[name]
            if kind != layer.kind or _as_blocks(gram).shape != self._totals[layer.total].gram.shape:
                raise UpdateError(
                    f"The Gram matrix of '{name}' has another kind or form than in the first update. "
                    "Send one form from every client."
                )

    def _shrunk(self, blocks: Tensor) -> Tensor:
        diagonal = torch.diag_embed(blocks.diagonal(dim1=-2, dim2=-1))
        eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
        return self.alpha * blocks + (1 - self.alpha) * diagonal + self.beta * eye

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors so far; adding may go on afterwards.

        Raises:
            UpdateError: nothing was added.
        """
        merged = self._mean.result()
        self._notes = {}
        inverses = {
            key: _Inverse(self._totals[key].gram, self._totals[key].rounding)
            for key in {layer.total for layer in self._layers.values()}
        }
        for name, layer in self._layers.items():
            inverse = inverses[layer.total]
            # In directions that nobody has seen, the mean; elsewhere, least squares.
            found = layer.reference + inverse.solved(layer.product)
            if inverse.unseen:
                mean = _oriented(layer.kind, merged[name])
                found = found + inverse.outside(mean - layer.reference)
                self._notes[name] = (
                    f"{inverse.unseen} of {inverse.size} directions of its input were seen by no "
                    "client; there the weights are the mean"
                )
            weight = (found if INPUT_AXIS[layer.kind] == 1 else found.mT).to(merged[name].dtype)
            everybody = self._partly.get(name, torch.tensor(True)).reshape(-1, 1).to(weight.device)
            merged[name] = torch.where(everybody, weight, merged[name]).contiguous()
        return merged


class _Total:
    """The running sum of one input's Gram matrices, and the relative rounding of their entries."""

    def __init__(self) -> None:
        self.gram = torch.zeros((), dtype=torch.float64)
        self.rounding = 0.0

    def add(self, gram: Tensor, dtype: torch.dtype) -> None:
        self.gram = self.gram + gram
        # What bfloat16 rounded off cannot be told from what was never seen: it counts as seen.
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.rounding = max(self.rounding, torch.finfo(exact).eps)


class _Layer:
    """The running sum of one layer's weights times Gram matrices.

    Weights are relative to the first update's, so that little is lost where they are alike.
    ``total`` names the sum of its Gram matrices, which layers that read one input share.
    """

    def __init__(self, kind: str, total: str, reference: Tensor) -> None:
        self.kind, self.total, self.reference = kind, total, reference
        self.product = torch.zeros((), dtype=torch.float64)

    def add(self, weight: Tensor, gram: Tensor) -> None:
        self.product = self.product + _times(weight - self.reference, gram)


def _oriented(kind: str, weight: Tensor) -> Tensor:
    """Return a weight as float64 ``[out, in]``."""
    matrix = weight.detach().double()
    return matrix if INPUT_AXIS[kind] == 1 else matrix.mT


def _sharing(grams: Tensors) -> dict[str, str]:
    """Return, for every layer, the first by name that holds the same matrix."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(grams[name]), name) for name in sorted(grams)}


def _as_blocks(gram: Tensor) -> Tensor:
    """Return a full, block-diagonal or diagonal matrix as ``[blocks, size, size]``."""
    return gram[:, None, None] if gram.ndim == 1 else gram[None] if gram.ndim == 2 else gram


def _times(matrix: Tensor, blocks: Tensor) -> Tensor:
    """Return ``[out, n]`` times a block-diagonal matrix."""
    split = matrix.unflatten(1, (len(blocks), -1)).transpose(0, 1)
    return torch.bmm(split, blocks).transpose(0, 1).flatten(1)


class _Inverse:
    """The inverse of a block-diagonal positive semi-definite matrix where it has one.

    Args:
        blocks: float64 ``[blocks, n, n]``.
        rounding: relative error of the entries; directions that it could hide count as unseen.
    """

    def __init__(self, blocks: Tensor, rounding: float) -> None:
        self.size = blocks.shape[0] * blocks.shape[1]
        # Entries are rounded in proportion to their diagonals, so these are made equal.
        diagonal = blocks.diagonal(dim1=-2, dim2=-1)
        self._scale = torch.where(diagonal > 0, diagonal.clamp_min(0).rsqrt(), 1.0)
        even = blocks * self._scale.unsqueeze(-1) * self._scale.unsqueeze(-2)
        smallest = (blocks.shape[-1] + 32) * rounding
        # Units that were always zero stand alone: they need no decomposition.
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
            # An orthonormal basis of what the matrix maps to zero.
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
