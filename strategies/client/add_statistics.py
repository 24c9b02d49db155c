"""``add_statistics``: a client's answer to the statistics that the server asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor, nn

from fedrot.collect.statistics import Statistics, brings, kind_named
from fedrot.errors import FedrotError
from fedrot.strategies.wire.arrays import STATISTICS, check_precision, model_records
from fedrot.strategies.wire.statistics_record import (
    STATISTICS_PRECISIONS,
    Kinds,
    read_statistics,
    statistics_record,
    wanted_statistics,
)

#: Keyword arguments of a model's forward, batch by batch, or a function that returns
#: them.
Batches = Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]


def add_statistics(
    content: RecordDict,
    message: Message,
    model: nn.Module,
    batches: Batches,
    *,
    max_batches: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Kinds:
    """Collect the statistics that the server asks for, and add them to a reply.

    In a round in which the server asks for none, nothing is read and nothing is added.
    Kinds that the reply has already are not collected again. Random numbers are as
    before.

    Args:
        content: of the reply; statistics go into its ArrayRecord ``fedrot-statistics``.
        message: the training request.
        model: holds the tensors that the reply sends, under their names. It is run in
            evaluation mode, and left in its own mode and on its own device.
        batches: the client's own rows as keyword arguments of forward, for example the
            ``DataLoader`` of training; or a function that returns them. Tensors are
            moved to the model's device.
        max_batches: largest number of batches of each kind. None is the limit of the
            kind: 100 batches for Gram matrices, 256 rows for Fisher information.
        dtype: of the statistics on the wire, float32 or bfloat16, see
            ``statistics_record``.

    Returns the kinds that were added, such as ``("gram",)``.

    Example: ``add_statistics(content, message, model, loader)``

    Raises:
        FedrotError: the kind is unknown here or not computed from batches; there is no
            batch, a batch is no mapping, or an iterator ends before all kinds are
            collected; the model's names are not those of the reply; or ``max_batches``
            or ``dtype`` is wrong.
    """
    check_precision("dtype", dtype, STATISTICS_PRECISIONS)
    if max_batches is not None and max_batches < 1:
        raise FedrotError(
            f"max_batches is {max_batches}; give a positive number, or None."
        )
    present = read_statistics(content)
    kinds = tuple(
        kind for kind in wanted_statistics(message) if not brings(present, kind)
    )
    if len(kinds) > 1 and isinstance(batches, Iterator):
        raise FedrotError(
            f"The server asks for {' and '.join(kinds)}, but an iterator of batches "
            "can be read once. Give a list, a DataLoader, or a function that returns "
            "the batches."
        )
    collected: Statistics = {}
    with torch.random.fork_rng(devices=[]):
        for kind in kinds:
            read = _read(batches, max_batches, model)
            collected = {
                **collected,
                **kind_named(kind).collected(model, read, limited=max_batches is None),
            }
    _check_names(collected, message, content)
    if collected:
        before = content.array_records.get(STATISTICS, ArrayRecord())
        content[STATISTICS] = ArrayRecord(
            {**before, **statistics_record(collected, dtype)}
        )
    return kinds


def _read(
    batches: Batches, most: int | None, model: nn.Module
) -> Iterator[dict[str, Any]]:
    """Yield at most so many batches on the model's device."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    for batch in islice(batches() if callable(batches) else batches, most):
        if not isinstance(batch, Mapping):
            raise FedrotError(
                f"A batch is a {type(batch).__name__}; statistics need the keyword "
                "arguments of the model's forward, such as {'input_ids': ..., "
                "'attention_mask': ...}."
            )
        yield {
            n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()
        }


def _check_names(statistics: Statistics, message: Message, content: RecordDict) -> None:
    """Refuse statistics of tensors that neither the reply nor the request has."""
    known = {
        name
        for part in (message.content, content)
        for arrays in model_records(part).values()
        for name in arrays
    }
    for kind, by_name in statistics.items():
        odd = sorted(by_name.keys() - known)
        if odd and known:
            raise FedrotError(
                f"The {kind} statistics of '{odd[0]}' belong to no tensor of the "
                "reply, nor of the received model. Give the model itself, not one that "
                "wraps it and so changes names."
            )
