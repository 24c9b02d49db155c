"""``encode`` and ``decode``: Python values as JSON and NumPy arrays, and back, bit for bit."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from torch import Tensor

#: NumPy type codes that safetensors supports: booleans, integers and floats of up to eight bytes.
_NUMBERS = "?bBhHiIlLqQefd"
_RECORDS = {"arrays": ArrayRecord, "metrics": MetricRecord, "config": ConfigRecord}


class UnknownValueError(TypeError):
    """A value, or a part of it, has a type that cannot be encoded."""


def encode(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value as JSON values, and add its arrays to ``arrays``.

    Supported types: None, bool, int, float, str, bytes, NumPy arrays and scalars, torch tensors,
    Flower's ``Array`` and records, and lists, tuples, sets and dictionaries, but no subclasses. A type
    that JSON lacks becomes an object with one key, the name of the type. Arrays and tensors are not
    copied if they are contiguous; their names in ``arrays`` contain ``path``.

    Raises:
        UnknownValueError: the value has another type, or an array has a dtype that safetensors lacks.
    """

    def keep(array: np.ndarray) -> str:
        arrays[name := f"{len(arrays)}:{path}"] = array
        return name

    def inner(items: Any) -> list[Any]:
        return [encode(item, f"{path}/{index}", arrays) for index, item in enumerate(items)]

    def pairs(items: Any) -> list[Any]:
        return [[encode(k, path, arrays), encode(v, f"{path}/{k}", arrays)] for k, v in items.items()]

    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is list:
        return inner(value)
    if kind in (tuple, set, frozenset):
        return {kind.__name__: inner(value)}
    if kind is dict:
        return {"dict": pairs(value)}
    for name, record in _RECORDS.items():
        if kind is record:
            return {name: pairs(value)}
    if kind is Array:
        data = keep(np.frombuffer(value.data, np.uint8))
        return {"array": [value.dtype, list(value.shape), value.stype, data]}
    if isinstance(value, np.generic):
        return {"scalar": encode(np.asarray(value), path, arrays)}
    if kind is np.ndarray:
        if value.dtype.char not in _NUMBERS or not value.dtype.isnative:
            raise UnknownValueError(f"{path} is an array of {value.dtype}.")
        return {"ndarray": keep(np.asarray(value, order="C"))}
    if kind is Tensor:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), str(value.device), keep(flat.numpy())]}
    raise UnknownValueError(f"{path} is a {kind.__name__}.")


def decode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return the value that ``encode`` was given; arrays are writable copies."""
    if isinstance(value, list):
        return [decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind in ("dict", *_RECORDS):
        made = {decode(k, arrays): decode(v, arrays) for k, v in body}
        return _RECORDS[kind](made) if kind in _RECORDS else made
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(body, arrays))
    match kind:
        case "float":
            return struct.unpack(">d", bytes.fromhex(body))[0]
        case "bytes":
            return base64.b64decode(body)
        case "array":
            dtype, shape, stype, data = body
            return Array(dtype, tuple(shape), stype, arrays[data].tobytes())
        case "scalar":
            return decode(body, arrays)[()]
        case "ndarray":
            return np.array(arrays[body], order="C")
        case "tensor":
            dtype, shape, device, data = body
            flat = torch.from_numpy(np.array(arrays[data]))
            return flat.view(getattr(torch, dtype)).reshape(shape).to(device)
    raise UnknownValueError(f"'{kind}' is not a known kind of value.")
