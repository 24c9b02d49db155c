"""Messages to clients, and messages and arrays that Flower's strategies can read."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from flwr.app import ArrayRecord, Message, RecordDict

from fedrot.strategies.round.update import Moved
from fedrot.strategies.wire.arrays import (
    STATISTICS,
    TIED,
    Precision,
    encode,
    from_arrays,
    model_records,
    only_model,
    replace_changed,
    to_arrays,
)
from fedrot.strategies.wire.flower_compat import NUMPY, Messages
from fedrot.tensors import TensorDict, rounded, same_bits


def plain(arrays: ArrayRecord) -> ArrayRecord:
    """Return arrays in Flower's format, which every strategy reads; maybe the same."""
    if all(array.stype == NUMPY for array in arrays.values()):
        return arrays
    tensors = from_arrays(arrays)
    return replace_changed(arrays, tensors, tensors)


def common_model(messages: Sequence[Message], record: str | None) -> ArrayRecord | None:
    """Return the ArrayRecord that all messages hold, None if there is none.

    The name ``record`` is not needed if messages hold one ArrayRecord.
    """
    common: ArrayRecord | None = None
    for message in messages:
        records = model_records(message.content)
        (model,) = (
            records.values() if len(records) == 1 else (records.get(record or ""),)
        )
        if model is None or (common is not None and dict(model) != dict(common)):
            return None
        common = model
    return common


def to_send(
    messages: Messages,
    before: ArrayRecord,
    arrays: ArrayRecord,
    wire: Precision,
) -> list[Message]:
    """Return messages with ``arrays``, in the wire's precision, for ``before``."""
    changed = list(messages)
    contents = dict[int, RecordDict]()
    after = arrays if wire is None else to_arrays(from_arrays(arrays), wire)
    for message in changed if after is not before else ():
        content = message.content
        records = {
            name: after if record is before else record
            for name, record in content.items()
        }
        message.content = contents.setdefault(id(content), RecordDict(records))
    return changed


def as_sent(tensors: TensorDict, sent: ArrayRecord) -> ArrayRecord:
    """Return tensors encoded like the broadcast model: in its precision, with its ties.

    Integers and booleans are rounded. Tensors that were not broadcast are last.
    ``tensors`` is emptied, so that the memory of each tensor is free after it is
    encoded.
    """
    ties = {name: a.data.decode() for name, a in sent.items() if a.stype == TIED}
    tied = {n for n, other in ties.items() if same_bits(tensors[n], tensors[other])}
    arrays = ArrayRecord()
    for name, array in sent.items():
        if name in tied:
            arrays[name] = array
            del tensors[name]
        else:
            dtype = getattr(torch, array.dtype)
            arrays[name] = encode(name, rounded(tensors.pop(name), dtype).to(dtype))
    for name in tuple(tensors):
        arrays[name] = encode(name, tensors.pop(name))
    return arrays


def restored(
    arrays: ArrayRecord, sent: ArrayRecord, integers: ArrayRecord
) -> ArrayRecord:
    """Return a strategy's new model encoded ``as_sent``, with these ``integers``."""
    model = as_sent(from_arrays(arrays), sent)
    model.update(integers)
    return model


def integers_of(arrays: ArrayRecord) -> ArrayRecord:
    """Return the arrays of integers and booleans."""
    floating = ("float", "bfloat")
    return ArrayRecord(
        {name: a for name, a in arrays.items() if not a.dtype.startswith(floating)}
    )


def with_tensors(moved: Moved) -> Message:
    """Return a copy of a reply's message: the moved tensors, no records of fedrot."""
    update = moved.update
    content = RecordDict(dict(update.message.content))
    content.pop(STATISTICS, None)
    name, arrays = only_model(content)
    content[name] = replace_changed(arrays, update.tensors, moved.tensors)
    message = copy.copy(update.message)
    message.content = content
    return message
