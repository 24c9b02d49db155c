"""``encode`` and ``decode``: Python values as JSON and NumPy arrays, bit for bit."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from types import NoneType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from torch import Tensor

from fedrot.tensors import flat_bytes

#: Arrays by name, beside JSON values.
NamedArrays = dict[str, np.ndarray]

#: NumPy type codes that safetensors supports: booleans, integers and floats of up to
#: eight bytes.
_NUMBERS = "?bBhHiIlLqQefd"


class UnknownValueError(TypeError):
    """A value, or a part of it, has a type that cannot be encoded."""


def _of_tensor(tensor: Tensor) -> list[Any]:
    return [
        str(tensor.dtype).removeprefix("torch."),
        list(tensor.shape),
        str(tensor.device),
        flat_bytes(tensor).numpy(),
    ]


def _tensor(parts: list[Any]) -> Tensor:
    dtype, shape, device, flat = parts
    return torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(shape).to(device)


#: By type that JSON lacks: functions that return a value of other types, and the value
#: again.
_CODES: dict[type, Any] = {
    float: (
        lambda x: struct.pack(">d", x).hex(),
        lambda x: struct.unpack(">d", bytes.fromhex(x))[0],
    ),
    bytes: (bytes.hex, bytes.fromhex),
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    dict: (lambda items: [[*pair] for pair in items.items()], dict),
    **{
        kind: (dict, kind)
        for kind in (OrderedDict, ArrayRecord, MetricRecord, ConfigRecord)
    },
    Array: (
        lambda array: [
            array.dtype,
            [*array.shape],
            array.stype,
            np.frombuffer(array.data, np.uint8),
        ],
        lambda parts: Array(parts[0], tuple(parts[1]), parts[2], parts[3].tobytes()),
    ),
    Tensor: (_of_tensor, _tensor),
    np.generic: (np.asarray, lambda array: array[()]),
}
_DECODERS = {kind.__name__: decoder for kind, (_, decoder) in _CODES.items()}


def encode(value: Any, path: str, arrays: NamedArrays) -> Any:
    """Return a value as JSON values, and add its arrays to ``arrays``.

    Supported types: None, bool, int, float, str, lists, NumPy arrays, and those of
    ``_CODES``, but no subclasses. A type that JSON lacks becomes an object with one
    key, the name of the type. Arrays and tensors are not copied if they are contiguous;
    their names in ``arrays`` contain ``path``.

    Raises:
        UnknownValueError: the value has another type, or an array has a dtype that
            safetensors lacks.
    """
    kind: type = np.generic if isinstance(value, np.generic) else type(value)
    if kind in (NoneType, bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [encode(item, path, arrays) for item in value]
    if kind is np.ndarray and value.dtype.char in _NUMBERS and value.dtype.isnative:
        arrays[name := f"{len(arrays)}:{path}"] = np.asarray(value, order="C")
        return {"ndarray": name}
    if kind not in _CODES:
        raise UnknownValueError(f"{path} holds a {kind.__name__} that cannot be saved.")
    return {kind.__name__: encode(_CODES[kind][0](value), path, arrays)}


def decode(value: Any, arrays: NamedArrays) -> Any:
    """Return the value that ``encode`` was given; arrays are writable copies."""
    if isinstance(value, list):
        return [decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "ndarray":
        return np.array(arrays[body], order="C")
    return _DECODERS[kind](decode(body, arrays))
