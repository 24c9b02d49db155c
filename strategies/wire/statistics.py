"""Statistics of a reply as a Flower record, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from torch import Tensor

from fedrot.aggregation import Statistics
from fedrot.collect.gram_sketch import GramSketch
from fedrot.collect.statistics import INPUT_AXIS, check_statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.wire.arrays import STATISTICS, decode, encode, wire_bytes
from fedrot.strategies.wire.sketches import SKETCH, SketchReader, encode_sketch, sketches_within

#: Separators of a kind from names, and of the names that share one matrix.
_KIND, _NAMES = "/", "|"


def wanted_statistics(message: Message) -> tuple[str, ...]:
    """Return the kinds of statistics that the server asks for in a training request."""
    for config in message.content.config_records.values():
        if STATISTICS in config:
            return tuple(kind for kind in str(config[STATISTICS]).split(",") if kind)
    return ()


def check_precision(dtype: torch.dtype) -> None:
    """Raise ``FedrotError`` unless statistics can be sent in a dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise FedrotError(f"Statistics are sent as float32 or bfloat16, not as {dtype}.")


def check_share(share: float | None) -> None:
    """Raise ``FedrotError`` unless a share of the model's bytes is positive, or None."""
    if share is not None and not 0 < share < float("inf"):
        raise FedrotError(
            f"share is {share}; give a positive share of the model's bytes, such as 0.1, or None to "
            "send Gram matrices in full."
        )


def budget_of(share: float | None, models: Collection[ArrayRecord]) -> int | None:
    """Return the bytes that Gram matrices may take, a share of a model's on the wire; None for None."""
    if share is not None and not models:
        raise FedrotError(
            "share is a share of the model's bytes, and there is no model. Put the model's ArrayRecord "
            "into the reply first."
        )
    return None if share is None else int(share * sum(map(wire_bytes, models)))


def statistics_record(
    statistics: Statistics, dtype: torch.dtype = torch.float32, budget: int | None = None
) -> ArrayRecord:
    """Return statistics as the ArrayRecord ``fedrot-statistics`` of a client's reply.

    Matrices that several layers share are sent once.

    Args:
        statistics: by kind, then by tensor name.
        dtype: float32, or bfloat16 for half the bytes and three significant digits. Sketches have
            precisions of their own.
        budget: bytes that the full Gram matrices may take; the matrices travel
            as sketches that fit. None sends them in full. Everything else travels as it is.

    Raises:
        FedrotError: another dtype; the name of a tensor has a '|'; or with a budget, it is too small for
            the diagonals, or a matrix is not finite.
    """
    check_precision(dtype)
    odd = [name for by_name in statistics.values() for name in by_name if _NAMES in name]
    if odd:
        raise FedrotError(
            f"Statistics of '{odd[0]}' cannot be sent, because '{_NAMES}' separates names. Rename the "
            "module."
        )
    values = {
        f"{kind}{_KIND}{_NAMES.join(names)}": statistics[kind][names[0]]
        for kind, by_name in statistics.items()
        for names in _sharing(by_name)
    }
    kinds = {key: key.partition(_KIND)[0] for key in values}

    def encoded(key: str) -> Array:
        value = values[key]
        return encode(key, value.to(dtype) if value.is_floating_point() else value)

    sketches: Mapping[str, GramSketch] = {}
    if budget is not None:
        full = {k: v for k, v in values.items() if kinds[k] in INPUT_AXIS and v.ndim == 2}
        sketches = sketches_within(budget, full, dtype.itemsize)
    return ArrayRecord(
        {key: encode_sketch(sketches[key]) if key in sketches else encoded(key) for key in values}
    )


def _sharing(by_name: Mapping[str, Tensor]) -> Iterable[list[str]]:
    """Return the names that share one value, by value."""
    names: dict[int, list[str]] = {}
    for name, value in by_name.items():
        names.setdefault(id(value), []).append(name)
    return names.values()


def read_statistics(
    content: RecordDict, shapes: Mapping[str, tuple[int, ...]] | None = None, copy: bool = False
) -> dict[str, dict[str, Tensor]]:
    """Return the statistics of a reply, empty if it has none.

    Each array is checked before the next one is decoded: many keys can share one large array, which
    travels once.

    Args:
        shapes: of the model's tensors; None checks nothing, for a client's own statistics.
        copy: as in ``Schema.read``.

    Raises:
        UpdateError: they cannot be decoded, a tensor has two of one kind, or see ``check_statistics``
            and ``SketchReader.read``.
    """
    found: dict[str, dict[str, Tensor]] = {}
    sketches = SketchReader(shapes)
    for key, array in content.array_records.get(STATISTICS, {}).items():
        kind, separator, joined = key.partition(_KIND)
        if not separator:
            raise UpdateError(f"The statistics '{key}' have no kind; use statistics_record.")
        names = joined.split(_NAMES)
        try:
            sketched = array.stype == SKETCH
            value = sketches.read(kind, names, array) if sketched else decode(key, array)
        except UpdateError as error:
            raise UpdateError(f"The statistics '{key}' cannot be decoded: {error}") from error
        value = value.float() if value.dtype == torch.bfloat16 else value.clone() if copy else value
        given, by_name = dict.fromkeys(names, value), found.setdefault(kind, {})
        if twice := given.keys() & by_name.keys():
            raise UpdateError(f"The {kind} statistics of '{min(twice)}' come twice; send them once.")
        if shapes is not None:
            check_statistics({kind: given}, shapes)
        by_name |= given
    return found
