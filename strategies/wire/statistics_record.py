"""Statistics of a reply as a Flower record, and back."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedrot.aggregation import Statistics
from fedrot.collect.statistics import check_statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.wire.arrays import (
    STATISTICS,
    check_precision,
    decode,
    encode,
    header,
    records_of_type,
)
from fedrot.tensors import Shapes, TensorDict

#: Kinds of statistics.
Kinds = tuple[str, ...]

#: Separators of a kind from names, and of the names that share one matrix.
_KIND = "/"
_NAMES = "|"

#: The precisions in which statistics can be sent.
STATISTICS_PRECISIONS = (torch.float32, torch.bfloat16)


def wanted_statistics(message: Message) -> Kinds:
    """Return the kinds of statistics that the server asks for in a training request."""
    for config in records_of_type(message.content, ConfigRecord).values():
        if STATISTICS in config:
            return tuple(kind for kind in str(config[STATISTICS]).split(",") if kind)
    return ()


def statistics_record(
    statistics: Statistics, dtype: torch.dtype = torch.float32
) -> ArrayRecord:
    """Return statistics as the ArrayRecord ``fedrot-statistics`` of a client's reply.

    Matrices that several layers share are sent once.

    Args:
        statistics: by kind, then by tensor name.
        dtype: float32, or bfloat16 for half the bytes and three significant digits.

    Raises:
        FedrotError: another dtype, or the name of a tensor has a '|'.
    """
    check_precision("dtype", dtype, STATISTICS_PRECISIONS)
    arrays = ArrayRecord()
    for kind, by_name in statistics.items():
        sharing: dict[int, list[str]] = {}
        for name, value in by_name.items():
            if _NAMES in name:
                raise FedrotError(
                    f"Statistics of '{name}' cannot be sent, because '{_NAMES}' "
                    "separates names. Rename the module."
                )
            sharing.setdefault(id(value), []).append(name)
        for names in sharing.values():
            key = f"{kind}{_KIND}{_NAMES.join(names)}"
            value = by_name[names[0]]
            arrays[key] = encode(
                key, value.to(dtype) if value.is_floating_point() else value
            )
    return arrays


def read_statistics(
    content: RecordDict,
    shapes: Shapes | None = None,
    copy: bool = False,
) -> dict[str, TensorDict]:
    """Return the statistics of a reply, empty if it has none.

    Each array is checked before the next one is decoded: many keys can share one large
    array, which travels once.

    Args:
        shapes: of the model's tensors; None checks nothing, for a client's own
            statistics.
        copy: as in ``Schema.read``.

    Raises:
        UpdateError: they cannot be decoded, a tensor has two of one kind, or see
            ``check_statistics``.
    """
    statistics: dict[str, TensorDict] = {}
    for key, array in records_of_type(content, ArrayRecord).get(STATISTICS, {}).items():
        kind, separator, joined = key.partition(_KIND)
        if not separator:
            raise UpdateError(
                f"The statistics '{key}' have no kind; use statistics_record."
            )
        value = decode(key, array, header(key, array))
        if value.dtype == torch.bfloat16:
            value = value.float()
        elif copy:
            value = value.clone()
        named = dict.fromkeys(joined.split(_NAMES), value)
        by_name = statistics.setdefault(kind, {})
        if twice := named.keys() & by_name.keys():
            raise UpdateError(
                f"The {kind} statistics of '{min(twice)}' come twice; send them once."
            )
        if shapes is not None:
            check_statistics({kind: named}, shapes)
        by_name |= named
    return statistics
