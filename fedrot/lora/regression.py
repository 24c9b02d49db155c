"""``RegressedProducts``: least squares on the clients' inputs, for products of bounded rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

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
from fedrot.lora.adapter_options import METHODS, AdapterReport
from fedrot.lora.adapters import Pair, wide_factors
from fedrot.lora.averaging import AdapterUpdate, MeanOfProducts
from fedrot.lora.products import SMALLEST, ProductSum, Terms


class RegressedProducts(MeanOfProducts):
    """The best product of the result's rank for the clients' inputs (RegMean for adapters).

    ``M`` minimises ``sum_i w_i tr((M - P_i) G_i (M - P_i)^T)`` over the matrices of the result's rank,
    with the clients' products ``P_i = s_i B_i A_i`` and the Gram matrices ``G_i`` of the inputs of
    ``lora_A``, shrunk as by ``fedrot.aggregation.RegMean``. In directions in which the inputs of all
    clients are 0, ``M`` is the mean product, as far as the rank allows. Modules without Gram matrices
    (embeddings, convolutions) get the mean product.
    """

    used = ("gauge", "regmean_alpha")
    needs = (GRAMS[1],)
    of_dora = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grams = GramSums(self.options.regmean_alpha)
        self._inverses: Mapping[Layer, Inverse] = {}
        #: By module, ``sum_i w_i s_i B_i A_i G_i`` in float64, and the largest norm of a product.
        self._weighted: dict[str, ProductSum] = defaultdict(ProductSum)
        self._largest: dict[str, float] = defaultdict(float)

    def result(self) -> tuple[dict[str, Tensor], AdapterReport]:
        """Return the average and its report; raises the errors of ``AdapterAverage.result``."""
        self._inverses, self._notes = self._grams.inverses(), {}
        try:
            return super().result()
        finally:
            self._inverses = {}

    def _check_statistics(self, update: AdapterUpdate, pairs: tuple[Pair, ...]) -> None:
        given = {kind: update.statistics.get(kind, {}) for kind in self.needs}
        shapes = {pair.a: tuple(update.tensors[pair.a].shape) for pair in pairs if not pair.of_embedding}
        linear = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        odd = {name for by_name in given.values() for name in by_name} - linear.keys()
        if odd:
            raise UpdateError(
                f"The Gram matrix of '{min(odd)}' belongs to no lora_A of a linear layer. Send those of "
                "fedrot.collect_gram(peft_model, batches)."
            )
        check_statistics(given, linear)
        self._grams.check(grams_of(given, set()))

    def _add_statistics(
        self, update: AdapterUpdate, pairs: tuple[Pair, ...], scales: Mapping[str, float]
    ) -> None:
        by_name = {pair.a: pair for pair in pairs}
        grams = grams_of({kind: update.statistics[kind] for kind in self.needs}, set())
        for layers, gram in self._grams.added(grams, update.weight, set()):
            for pair in (by_name[name] for _, name in layers):
                a, b = (factor.double() for factor in wide_factors(update.tensors, pair))
                b, weighted = b * scales[pair.module], self._weighted[pair.module]
                # The rank of a product is at most this: what the sum is cut to loses nothing.
                weighted.limit = min(len(b), a.shape[1])
                weighted.add(b, a @ gram, 1.0)
                self._largest[pair.module] = max(self._largest[pair.module], _norm(b, a))

    def _product(self, pair: Pair, terms: Terms, rank: int) -> Terms:
        layer = self.needs[0], pair.a
        if layer in self._grams.totals and (note := self._grams.note(layer)):
            self._notes[pair.module] = note
        inverse = self._inverses.get(layer)
        if inverse is None:
            return terms
        module = self._modules[pair.module]
        left, right = self._weighted[pair.module].stacks
        left, right = left.mT, inverse.solved(right)
        if inverse.unseen:
            self._notes[pair.module] = unseen_note(inverse)
            mean = module.products.terms()
            sized = mean.s[: len(mean.vt), None].double() * mean.vt.double()
            left = torch.cat([left, mean.u.double()], 1)
            right = torch.cat([right, inverse.outside(sized) / module.weight])
        if not _norm(left, right) <= MOST_GROWTH * self._largest[pair.module]:
            self._notes[pair.module] = UNBOUNDED
            return terms
        found = nearest(left, right, inverse, rank)
        u, s, vt = (part.to(terms.u) for part in (found.u, module.weight * found.s, found.vt))
        return Terms(u, s, vt)


METHODS["regmean"] = RegressedProducts


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
