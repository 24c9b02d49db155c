"""Least squares on the clients' inputs, for products of bounded rank (RegMean for adapters)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fedrot.aggregation.gram_sums import (
    MOST_GROWTH,
    UNBOUNDED,
    GramSums,
    Inverse,
    Layer,
    grams_of,
    unseen_note,
)
from fedrot.collect.statistics import GRAMS, check_statistics
from fedrot.errors import UpdateError
from fedrot.lora.adapters import AdapterUpdate, Pair, wide_factors
from fedrot.lora.products import SMALLEST, ProductSum, Terms

#: The kind of the statistics that are summed: Gram matrices of linear layers.
KIND = GRAMS[1]


#: Returns the best product for the clients' inputs, see ``InputSums.regressed``.
Evidence = Callable[[str, ProductSum, float, int], tuple[Terms | None, str]]


class InputSums:
    """Sums over the clients of the Gram matrices of the inputs of ``lora_A``, and of products with them.

    ``alpha`` is that of ``fedrot.aggregation.RegMean``.
    """

    def __init__(self, alpha: float) -> None:
        self._grams = GramSums(alpha)
        #: By ``lora_A``, ``sum_i w_i s_i B_i A_i G_i`` in float64, and the largest norm of a product.
        self._weighted: dict[str, ProductSum] = defaultdict(ProductSum)
        self._largest: dict[str, float] = defaultdict(float)

    def check(self, update: AdapterUpdate, pairs: Sequence[Pair]) -> None:
        """Raise ``UpdateError`` if an update lacks Gram matrices, or has wrong ones."""
        given = {KIND: update.statistics.get(KIND, {})}
        shapes = {pair.a: tuple(update.tensors[pair.a].shape) for pair in pairs if not pair.of_embedding}
        linear = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        if odd := given[KIND].keys() - linear.keys():
            raise UpdateError(
                f"The Gram matrix of '{min(odd)}' belongs to no lora_A of a linear layer. Send those of "
                "fedrot.collect_gram(peft_model, batches)."
            )
        check_statistics(given, linear)
        self._grams.check(grams_of(given, set()))

    def add(self, update: AdapterUpdate, pairs: Sequence[Pair], scales: Mapping[str, float]) -> None:
        """Add an update that ``check`` has accepted; ``scales`` are by module."""
        by_name = {pair.a: pair for pair in pairs}
        grams = grams_of({KIND: update.statistics[KIND]}, set())
        for layers, gram in self._grams.added(grams, update.weight, set()):
            for pair in (by_name[name] for _, name in layers):
                a, b = (factor.double() for factor in wide_factors(update.tensors, pair))
                b, weighted = b * scales[pair.module], self._weighted[pair.a]
                # The rank of a product is at most this: what the sum is cut to loses nothing.
                weighted.limit = min(len(b), a.shape[1])
                weighted.add(b, a @ gram, 1.0)
                self._largest[pair.a] = max(self._largest[pair.a], _norm(b, a))

    def evidence(self) -> Evidence:
        """Return ``regressed`` with the inverses of the sums so far."""
        return partial(self.regressed, self._grams.inverses())

    def regressed(
        self,
        inverses: Mapping[Layer, Inverse],
        name: str,
        products: ProductSum,
        weight: float,
        rank: int,
    ) -> tuple[Terms | None, str]:
        """Return the best product of a rank for the clients' inputs, and the note for the report.

        ``M`` minimises ``sum_i w_i tr((M - P_i) G_i (M - P_i)^T)`` over the matrices of the rank, with
        the clients' products ``P_i = s_i B_i A_i`` and the Gram matrices ``G_i``, shrunk as by
        ``fedrot.aggregation.RegMean``. In directions in which the inputs of all clients are 0, ``M`` is
        the mean product, as far as the rank allows. The result is ``weight M``; None without Gram
        matrices (embeddings, convolutions) or without a bounded solution.

        Args:
            inverses: of the sums of Gram matrices.
            name: of ``lora_A``.
            products: ``sum_i w_i P_i``.
            weight: ``sum_i w_i``.
            rank: of the result.
        """
        layer = KIND, name
        note = self._grams.note(layer) if layer in self._grams.totals else ""
        if (inverse := inverses.get(layer)) is None:
            return None, note
        left, right = self._weighted[name].stacks
        left, right = left.mT, inverse.solved(right)
        if inverse.unseen:
            note, mean = unseen_note(inverse), products.terms()
            sized = mean.s[: len(mean.vt), None].double() * mean.vt.double()
            left = torch.cat([left, mean.u.double()], 1)
            right = torch.cat([right, inverse.outside(sized) / weight])
        if not _norm(left, right) <= MOST_GROWTH * self._largest[name]:
            return None, UNBOUNDED
        found = nearest(left, right, inverse, rank)
        return Terms(found.u, weight * found.s, found.vt), note


def nearest(left: Tensor, right: Tensor, metric: Inverse, rank: int) -> Terms:
    """Return the best approximation of ``M = left @ right`` of a rank, in a metric ``G`` of its inputs.

    ``N`` minimises ``tr((M - N) G (M - N)^T)``. It is ``U U^T M`` with the first left singular vectors
    ``U`` of ``M S``, ``G = S S^T``, which needs no inverse of ``S``. If ``M S`` has a smaller rank, the
    remaining columns of ``U`` are the best for the rest of ``M``, which the metric does not see.

    Args:
        left: ``[out, k]``.
        right: ``[k, in]``.
        metric: the inverse of ``G``.
    """
    q, r = torch.linalg.qr(left)
    core = r @ right
    p, sizes, _ = torch.linalg.svd(metric.rooted(core), full_matrices=False)
    chosen = p[:, : min(rank, int((sizes > SMALLEST * sizes[0]).sum()))]
    if chosen.shape[1] < rank:
        more, sizes, _ = torch.linalg.svd(core - chosen @ (chosen.mT @ core), full_matrices=False)
        there = sizes > max(core.shape) * torch.finfo(core.dtype).eps * torch.linalg.vector_norm(core)
        chosen = torch.cat([chosen, more[:, there][:, : rank - chosen.shape[1]]], 1)
    u, s, vt = torch.linalg.svd(chosen.mT @ core, full_matrices=False)
    return Terms(q @ chosen @ u, s, vt)


def _norm(left: Tensor, right: Tensor) -> float:
    """Return the Frobenius norm of ``left @ right``, which is not formed."""
    return float(((left.mT @ left) * (right @ right.mT)).sum().clamp(min=0).sqrt())
