"""The registry of methods of averaging adapters: a function each, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedrot.lora.adapters import Pair
from fedrot.lora.gauges import Factors
from fedrot.lora.module_sums import Merge, ModuleSums, Plan
from fedrot.lora.products import Terms
from fedrot.lora.regression import KIND, Evidence


@dataclass(frozen=True)
class Method:
    """A method of averaging adapters.

    Attributes:
        merge: the function, see ``Merge``.
        any_rank: whether clients may have different ranks.
        used: the names of the fields of ``AdapterOptions`` that the method uses.
        needs: the kinds of statistics that every update needs: none, or ``gram``.
        of_dora: whether adapters may have DoRA's magnitudes.
        sums: builds the sums of a module; for methods that change clients' factors before the sum.
    """

    merge: Merge
    any_rank: bool = False
    used: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    of_dora: bool = True
    sums: Callable[[Pair, Plan], ModuleSums] = ModuleSums


def mean(sums: ModuleSums, terms: Terms, rank: int, _: Evidence | None) -> Factors | None:
    """Return the means of the factors (FedIT)."""
    return sums.wanted(terms, rank).mean


def exact(sums: ModuleSums, terms: Terms, rank: int, _: Evidence | None) -> Factors:
    """Return factors of the best approximation of the mean product (FlexLoRA)."""
    return sums.gauged(terms, rank)


def regmean(sums: ModuleSums, terms: Terms, rank: int, evidence: Evidence | None) -> Factors:
    """Return factors of the best product for the clients' inputs; those of ``exact`` without one."""
    if evidence is not None:
        found, sums.note = evidence(sums.pair.a, sums.products, sums.weight, rank)
        terms = terms if found is None else found.to(terms.u)
    return sums.gauged(terms, rank)


#: The methods by name. Plug-ins add theirs.
METHODS = {
    "mean": Method(mean),
    "exact": Method(exact, any_rank=True, used=("gauge",)),
    "regmean": Method(regmean, True, ("gauge", "regmean_alpha"), needs=(KIND,), of_dora=False),
}
