"""``ModuleSums``: the sums of one module's products and factors over the clients; ``in_threads``."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from fedrot.aggregation.mean import Mean
from fedrot.lora.gauges import Factors, Wanted
from fedrot.lora.products import ProductSum, Terms

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

#: Maximum number of modules computed at a time; each needs memory for intermediate results.
MOST_AT_A_TIME = 8
_ONE_AT_A_TIME = threading.Lock()


class ModuleSums:
    """The sums over the clients of one module's products and factors; both include the scale."""

    def __init__(self) -> None:
        self.products, self.mean, self.weight = ProductSum(), Mean(), 0.0
        self.ranks: set[int] = set()

    def add(self, sent: Factors, weight: float) -> None:
        """Add the factors of one client."""
        a, b = sent
        self.products.add(b, a, weight)
        self.ranks.add(len(a))
        self.weight += weight
        if len(self.ranks) == 1:
            self.mean.add({"a": a, "b": b}, weight)

    def factors(self, scale: float) -> Factors | None:
        """Return the means of the factors, with ``B`` divided by a scale; None if ranks differ."""
        if len(self.ranks) > 1:
            return None
        return self.mean.current["a"], self.mean.current["b"] / scale

    def wanted(self, terms: Terms, rank: int, scale: float, previous: Factors | None) -> Wanted:
        """Return the mean product, divided by a scale, and the factors for the gauge."""
        first = terms.first(rank)
        mean, previous = (
            f if f is not None and len(f[0]) == rank else None for f in (self.factors(scale), previous)
        )
        return Wanted(first.u, first.s / (self.weight * scale), first.vt, mean, previous)

    def errors(self, terms: Terms, scale: float, *found: Factors) -> list[float]:
        """Return ``|D - s B A| / |D|`` for each pair of factors; 0 if both are 0.

        The terms that the bounded sum left out are assumed orthogonal to the rest of ``D`` and to
        ``B A``.
        """
        left_out = self.products.left_out
        whole = math.hypot(terms.norm, left_out)
        distances = self.products.distances(*((self.weight * scale * b, a) for a, b in found))
        return [share(math.hypot(distance, left_out), whole) for distance in distances]


def share(part: float, whole: float) -> float:
    """Return ``part / whole``; 0 if both are 0, 1 if only ``whole`` is."""
    return part / whole if whole > 0 else float(part > 0)


def in_threads(
    work: Callable[[_Item], _Found], items: Sequence[_Item], device: torch.device
) -> list[_Found]:
    """Return ``work`` of every item; on a CPU, several items are computed at a time.

    The matrices of one module are too small to use several threads. PyTorch's number of threads, which
    holds for the process, is divided among the items and restored afterwards.

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
            with ThreadPoolExecutor(workers, "fedrot", torch.set_num_threads, (each,)) as pool:
                return list(pool.map(work, items))
        finally:
            torch.set_num_threads(threads)
