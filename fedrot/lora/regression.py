"""Least squares on the clients' inputs, for products of bounded rank (RegMean for adapters)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Evidence:
    """What the clients' inputs of one ``lora_A`` say about its module's product.

    Attributes:
        inverse: of the sum of the weighted Gram matrices ``G_i``; None if most of the weight has none.
        weighted: ``sum_i w_i s_i B_i A_i G_i`` in float64.
        largest: the largest norm of a client's product ``s_i B_i A_i``.
        note: which clients sent no Gram matrix; empty if all did.
    """

    inverse: Inverse | None
    weighted: ProductSum
    largest: float
    note: str

    def regressed(self, products: ProductSum, weight: float, rank: int) -> tuple[Terms | None, str]:
        """Return the best product of a rank for the clients' inputs, and the note for the report.

        ``M`` minimises ``sum_i w_i tr((M - P_i) G_i (M - P_i)^T)`` over the matrices of the rank, with
        the clients' products ``P_i = s_i B_i A_i`` and the Gram matrices ``G_i``, shrunk as by
        ``fedrot.aggregation.RegMean``. In directions in which the inputs of all clients are 0, ``M`` is
        the mean product, as far as the rank allows. The result is ``weight M``, None without a bounded
        solution.

        Args:
            products: ``sum_i w_i P_i``.
            weight: ``sum_i w_i``.
            rank: of the result.
        """
        if self.inverse is None:
            return None, self.note
        (left, right), note = self.weighted.stacks, self.note
        left, right = left.mT, self.inverse.solved(right)
        if self.inverse.unseen:
            note, mean = unseen_note(self.inverse), products.terms()
            sized = mean.s[: len(mean.vt), None].double() * mean.vt.double()
            left = torch.cat([left, mean.u.double()], 1)
            right = torch.cat([right, self.inverse.outside(sized) / weight])
        if not _norm(left, right) <= MOST_GROWTH * self.largest:
            return None, UNBOUNDED
        found = nearest(left, right, self.inverse, rank)
        return Terms(found.u, weight * found.s, found.vt), note


class InputSums:
    """Sums over the clients of the Gram matrices of the inputs of ``lora_A``, and of products with them.

    Modules without Gram matrices (embeddings, convolutions) have no evidence.

    Args:
        alpha: see ``fedrot.aggregation.RegMean``.
    """

    def __init__(self, alpha: float) -> None:
        self._grams = GramSums(alpha)
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

    def evidence(self) -> dict[str, Evidence]:
        """Return the evidence by the name of ``lora_A``."""
        inverses, found = self._grams.inverses(), {}
        for name, weighted in self._weighted.items():
            layer: Layer = KIND, name
            note = self._grams.note(layer)
            found[name] = Evidence(inverses.get(layer), weighted, self._largest[name], note)
        return found


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
