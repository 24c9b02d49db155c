"""The registry of methods of averaging adapters: a function each, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedrot.lora.adapters import Pair
from fedrot.lora.gauges import Factors
from fedrot.lora.module_sums import Merge, ModuleSums, Plan
from fedrot.lora.products import Terms


@dataclass(frozen=True)
class Method:
    """A method of averaging adapters.

    Attributes:
        merge: the function, see ``Merge``.
        any_rank: whether clients may have different ranks.
        used: the names of the fields of ``AdapterOptions`` that the method uses.
        sums: builds the sums of a module; for methods that change clients' factors
            before the sum.
    """

    merge: Merge
    any_rank: bool = False
    used: tuple[str, ...] = ()
    sums: Callable[[Pair, Plan], ModuleSums] = ModuleSums


def mean(sums: ModuleSums, terms: Terms, rank: int) -> Factors | None:
    """Return the means of the factors (FedIT)."""
    return sums.wanted(terms, rank).mean


def exact(sums: ModuleSums, terms: Terms, rank: int) -> Factors:
    """Return factors of the best approximation of the mean product (FlexLoRA)."""
    return sums.gauged(terms, rank)


#: The methods by name. Plug-ins add theirs.
METHODS = {
    "mean": Method(mean),
    "exact": Method(exact, any_rank=True, used=("gauge",)),
}
