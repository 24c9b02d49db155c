"""``ModuleSums``: one module's sums over the clients, and its average."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, linalg

from fedrot.aggregation.mean import Mean
from fedrot.errors import UpdateError
from fedrot.lora.adapters import LoraSettings, Pair, factors, named, wide_factors
from fedrot.lora.gauges import GAUGES, Factors, Wanted, gauged
from fedrot.lora.products import ProductSum, Terms
from fedrot.tensors import TensorDict, Tensors, compute_dtype

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: A sum of products keeps this many times the largest rank so far, or the result's rank
#: if it is larger. The sum is cut to this rank when it has more than twice as many
#: terms.
KEPT_RANKS = 4
#: Maximum norm of a factor, times its scale: products of larger factors could overflow.
LARGEST_FACTOR = 1e7
#: Maximum number of modules computed at a time; each needs memory for intermediate
#: results.
MOST_AT_A_TIME = 8
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Plan:
    """What is known of an average before the adapters, see ``average_adapters``."""

    settings: LoraSettings
    gauge: str
    previous: Tensors | None = None
    server_round: int = 1
    rank: int | None = None


@dataclass(frozen=True)
class AveragedModule:
    """One module's factors, the scale of its product, and the errors of the report."""

    tensors: TensorDict
    scale: float
    error_of_factors: float | None
    error: float
    lost: float


class ModuleSums:
    """The sums over clients of one module's products and factors, with the scale."""

    def __init__(self, pair: Pair, plan: Plan) -> None:
        self.pair = pair
        self.plan = plan
        self.products = ProductSum(limit=0)
        self.mean = Mean()
        self.weight = 0.0
        self.ranks: set[int] = set()

    def check(self, a: Tensor, b: Tensor, settings: LoraSettings) -> None:
        """Raise ``UpdateError`` if a client's factors cannot be added.

        They are as the client sent them, without the scale.
        """
        rank = self._previous_rank() or min(self.ranks, default=len(a))
        if settings.changed_base and len(a) != rank:
            raise UpdateError(
                f"'{self.pair.module}' has rank {len(a)}, others {rank}. With "
                f"init_lora_weights='{settings.changed_base}' base weights depend on "
                "the rank: adapters of different ranks belong to different models. Use "
                "one rank, or another initialisation."
            )
        scale = settings.scale(self.pair.module, len(a))
        for name, factor, by in ((self.pair.a, a, 1.0), (self.pair.b, b, scale)):
            norm = by * float(linalg.vector_norm(factor, dtype=torch.float64))
            if not norm <= LARGEST_FACTOR:
                raise UpdateError(
                    f"The factor '{name}' has norm {norm:.3g} (with the adapter's "
                    f"scale), above {LARGEST_FACTOR:g}: products of it would overflow. "
                    "Check the client's training (learning rate, mixed precision) "
                    "before sending it."
                )

    def add(self, sent: Factors, weight: float) -> None:
        """Add the factors of one client; ``B`` includes the scale."""
        a, b = sent
        self.products.limit = self.limit(a, b)
        self.products.add(b, a, weight)
        self.ranks.add(len(a))
        self.weight += weight
        if len(self.ranks) == 1:
            self.mean.add({"a": a, "b": b}, weight)

    def limit(self, a: Tensor, b: Tensor) -> int:
        """Return the rank that the sum keeps when these factors are added."""
        largest = max(len(a), self._previous_rank())
        return max(KEPT_RANKS * largest, self.products.limit, self.plan.rank or 0)

    def received(self, like: Tensor) -> Factors | None:
        """Return the factors that clients received, to be computed with ``like``."""
        if self.plan.previous is None:
            return None
        received = factors(self.plan.previous, self.pair)
        a, b = (factor.to(like.device, compute_dtype(like)) for factor in received)
        return a, b

    def _previous_rank(self) -> int:
        """Return the rank of the factors that clients received; 0 if unknown."""
        previous = self.plan.previous
        if previous is None:
            return 0
        if self.pair.a not in previous:
            raise UpdateError(
                "The adapter that the clients received does not contain "
                f"'{self.pair.module}'."
            )
        a, _ = factors(previous, self.pair)
        return len(a)

    def factors(self, scale: float) -> Factors | None:
        """Return the means of ``A`` and ``B / scale``; None if ranks differ."""
        if len(self.ranks) > 1:
            return None
        means = self.mean.current
        return means["a"], means["b"] / scale

    def wanted(self, terms: Terms, rank: int) -> Wanted:
        """Return a sum, divided by weight and scale, and the factors for the gauge."""
        scale = self.plan.settings.scale(self.pair.module, rank)
        first = terms.first(rank)
        s = first.s / (self.weight * scale)
        mean = _of_rank(rank, self.factors(scale))
        previous = _of_rank(rank, self.received(terms.vt))
        return Wanted(first.u, s, first.vt, mean, previous)

    def gauged(self, terms: Terms, rank: int) -> Factors:
        """Return the factors that the gauge chooses for a sum of products."""
        wanted = self.wanted(terms, rank)
        return gauged(GAUGES[self.plan.gauge], wanted, self.pair.of_embedding)

    def averaged(self, merge: Merge, like: Tensors) -> AveragedModule:
        """Return the average by a method, in the shapes and dtypes of ``like``.

        Raises:
            UpdateError: the method has no factors of the result's rank.
        """
        pair = self.pair
        rank = self.plan.rank or self._previous_rank() or max(self.ranks)
        scale = self.plan.settings.scale(pair.module, rank)
        terms = self.products.terms(rank)
        merged = merge(self, terms, rank)
        if merged is None:
            what = "factors of different ranks have no mean"
            if len(self.ranks) == 1:
                what = f"their mean cannot have rank {rank}"
            raise UpdateError(
                f"The clients' ranks of '{pair.module}' are {sorted(self.ranks)}: "
                f"{what}. Take method='exact'."
            )
        tensors = named(merged, pair, like)
        compared = [wide_factors(tensors, pair)]
        mean = self.factors(scale)
        if mean is not None:
            compared.append(mean)
        error, *of_factors = self._errors(terms, scale, compared)
        lost = share(self.products.lost, terms.norm)
        return AveragedModule(tensors, scale, next(iter(of_factors), None), error, lost)

    def _errors(
        self,
        terms: Terms,
        scale: float,
        compared: Sequence[Factors],
    ) -> list[float]:
        """Return ``|D - s B A| / |D|`` for each pair of factors; 0 if both are 0.

        The terms that the bounded sum left out are assumed orthogonal to the rest of
        ``D`` and to ``B A``.
        """
        left_out = self.products.left_out
        whole = math.hypot(terms.norm, left_out)
        products = [(self.weight * scale * b, a) for a, b in compared]
        distances = self.products.distances(*products)
        return [share(math.hypot(distance, left_out), whole) for distance in distances]


#: A method's function: it returns the new factors of one module, None if the clients'
#: have no mean. Arguments: the sums over the clients; the terms of the weighted sum of
#: their products, with vectors of the first ``rank``; the rank of the result.
Merge = Callable[[ModuleSums, Terms, int], Factors | None]


def _of_rank(rank: int, factors: Factors | None) -> Factors | None:
    """Return the factors if they have this rank, else None."""
    return factors if factors and len(factors[0]) == rank else None


def share(part: float, whole: float) -> float:
    """Return ``part / whole``; 0 if both are 0, 1 if only ``whole`` is."""
    return part / whole if whole > 0 else float(part > 0)


def in_threads(
    work: Callable[[_Item], _Result],
    items: Sequence[_Item],
    device: torch.device,
) -> list[_Result]:
    """Return ``work`` of every item; on a CPU, several items are computed at a time.

    The matrices of one module are too small to use several threads. PyTorch's number of
    threads, which holds for the process, is divided among the items and restored
    afterwards.

    Args:
        work: reads and writes only data of its item.
        device: the device that ``work`` computes on.
    """
    with _ONE_AT_A_TIME:
        threads = torch.get_num_threads()
        workers = min(threads, len(items), MOST_AT_A_TIME)
        if workers < 2 or device.type != "cpu":
            return [work(item) for item in items]
        each = threads // workers
        torch.set_num_threads(each)
        try:
            with ThreadPoolExecutor(
                workers, "fedrot", torch.set_num_threads, (each,)
            ) as pool:
                return list(pool.map(work, items))
        finally:
            torch.set_num_threads(threads)
