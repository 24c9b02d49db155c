"""Methods: which factors the clients' adapters become."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fedrot.lora.gauges import GAUGES, Factors, Wanted

#: Returns the new factors, None if factors of different ranks have no mean. The second argument names a
#: gauge, the third is a random seed.
Method = Callable[[Wanted, str, int], Factors | None]


def _mean(of: Wanted, gauge: str, seed: int) -> Factors | None:
    return of.mean


def _exact(of: Wanted, gauge: str, seed: int) -> Factors | None:
    return GAUGES[gauge](of)


def _anew(of: Wanted, gauge: str, seed: int) -> Factors | None:
    """Return a start of LoRA as PEFT draws it: ``A`` uniform, for embeddings normal, and ``B = 0``."""
    draw = torch.randn if of.of_embedding else torch.rand
    drawn = draw(of.vt.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    a = drawn if of.of_embedding else (2 * drawn - 1) * of.vt.shape[1] ** -0.5
    return a.to(of.vt), torch.zeros_like(of.u)


#: The methods by name.
METHODS: Mapping[str, Method] = {
    "mean": _mean,
    "pad": _mean,
    "rotate": _mean,
    "exact": _exact,
    "stack": _anew,
}
#: Methods for which clients may have different ranks.
OF_ANY_RANK = ("pad", "exact", "stack")
