"""``fitted``: an adapter for a client of a smaller rank."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index

from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.lora.adapters import LoraSettings, Pair, check_rank, pairs_of, shaped, wide_factors
from fedrot.lora.gauges import Wanted, keep_a, near_previous, transposed
from fedrot.lora.products import decomposed
from fedrot.tensors import Tensors


def fitted(tensors: Tensors, settings: object, rank: int | Tensors) -> dict[str, Tensor]:
    """Return an adapter of a smaller rank: the best approximation of the products.

    A client of rank 4 can start from an adapter of rank 16. The new factors are rotated as near as
    possible to the first ``rank`` rows and columns of the given factors. A product of 0 stays 0.

    Args:
        settings: the ``LoraConfig`` of either adapter; only alpha is used, ranks are read from tensors.
        rank: rank of the result, or an adapter with the same names whose ranks are used. Modules of
            smaller ranks stay as they are.

    Raises:
        FedrotError: the rank is below 1.
        UpdateError: the tensors are no adapter, or the adapter ``rank`` lacks a module.
    """
    if not isinstance(rank, Mapping):
        check_rank(rank)
    found, scales = dict(tensors), LoraSettings.of(settings)
    for pair in pairs_of(tensors):
        a, b = wide_factors(tensors, pair)
        wanted = _rank_in(rank, pair) if isinstance(rank, Mapping) else index(rank)
        if wanted >= len(a):
            continue
        own = scales.scale(pair.module, len(a)) / scales.scale(pair.module, wanted)
        b = own * b
        cut = (a[:wanted], b[:, :wanted])
        first = decomposed(b, a, most=wanted).first(wanted)
        product = Wanted(first.u, first.s, first.vt, None, cut)
        # A product of 0 determines no direction of A; keep_a leaves A as it is.
        near = near_previous if first.s.any() else keep_a
        cut = transposed(near(product.transposed)) if pair.of_embedding else near(product)
        for name, matrix in zip((pair.a, pair.b), cut, strict=True):
            found[name] = shaped(matrix, tensors[name].shape).to(tensors[name])
        if pair.bias in tensors:
            found[pair.bias] = own * tensors[pair.bias]
    return found


def _rank_in(adapter: Tensors, pair: Pair) -> int:
    if pair.a not in adapter:
        raise UpdateError(f"'{pair.module}' is adapted at the server but not here. Use one LoraConfig.")
    return len(adapter[pair.a])
