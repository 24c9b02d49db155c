"""``to_arrays`` and ``from_arrays``: a model's tensors as Flower arrays, and back.

Most tensors become Flower's own arrays (npy bytes). fedrot adds two kinds of arrays
with another ``stype``: bfloat16, which NumPy lacks; and tied tensors, which share the
memory of another tensor and are sent as its name. ``Array.numpy()`` refuses both, so no
stock strategy averages their bytes by mistake.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.wire.flower_compat import NUMPY
from fedrot.symmetry.resolve import tied_tensors
from fedrot.tensors import Shape, Shaped, TensorDict, Tensors, flat_bytes, unusable

R = TypeVar("R", ArrayRecord, MetricRecord, ConfigRecord)

#: The ``stype`` of: npy bytes of the bits as uint16; the name of another tensor of the
#: record.
BFLOAT16 = "fedrot.bfloat16"
TIED = "fedrot.tied"

#: Name of the ArrayRecord of a reply's statistics. Also the key, in a request's
#: configuration, of the kinds that the server wants this round, separated by commas.
STATISTICS = "fedrot-statistics"

#: The precision of floating-point tensors on the wire; None is their own.
Precision = torch.dtype | None

#: The precisions in which floating-point tensors can be sent.
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_NAMES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)
_TORCH = {np.dtype(name): getattr(torch, name) for name in _NAMES}

#: Largest number of dimensions, and of bytes in an npy header with this number.
_DIMENSIONS = 32
_HEADER = 1024

#: Largest number of elements in a tensor: far above real ones, and far below an
#: overflow of sizes.
_ELEMENTS = 2**48


def to_arrays(tensors: Tensors, dtype: Precision = None) -> ArrayRecord:
    """Return a model's tensors as arrays, under all of their names.

    Tensors of one shape and layout that share memory (tied embeddings) are sent once.
    Values are not checked: a value too large for float16 arrives as Inf, and the server
    drops the reply.

    Args:
        tensors: on any device.
        dtype: of floating-point tensors on the wire, one of ``PRECISIONS``; their own
            if None. Integer and boolean tensors keep their dtypes.

    Raises:
        FedrotError: ``dtype`` is not in ``PRECISIONS``, or a tensor cannot be sent
            (complex, float8, sparse).
    """
    check_precision("dtype", dtype)
    for name, tensor in tensors.items():
        if why := unusable(tensor):
            raise FedrotError(f"The tensor '{name}' {why}.")
    first = {name: names[0] for names in tied_tensors(tensors) for name in names[1:]}
    arrays = ArrayRecord()
    for name, tensor in tensors.items():
        wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        sent = tensor.detach().to(wanted).cpu()
        if name in first:
            arrays[name] = _array(sent, TIED, first[name].encode())
        else:
            arrays[name] = encode(name, sent)
    return arrays


def check_precision(
    name: str, dtype: object, choices: Sequence[torch.dtype] = PRECISIONS
) -> None:
    """Raise ``FedrotError`` unless the argument ``name`` is None or a precision."""
    if dtype is not None and dtype not in choices:
        raise FedrotError(
            f"{name} is {dtype!r}; choose from {', '.join(map(str, choices))}."
        )


def from_arrays(record: ArrayRecord, *, writable: bool = False) -> TensorDict:
    """Return the arrays of ``to_arrays``, or Flower's own arrays, as CPU tensors.

    Received bytes are not trusted: an array whose contents differ from its claimed
    shape and dtype is refused before memory of the claimed size is allocated. Tied
    names have the same tensor object.

    Args:
        record: the arrays.
        writable: copy every tensor. Otherwise tensors are views of the received bytes
            if these are aligned; writing to a view would change the record.
            (``load_state_dict`` copies.)

    Raises:
        UpdateError: a tensor cannot be decoded; the error names the tensor and the
            reason.
    """
    return decoded(record, headers(record), writable=writable)


class Header(NamedTuple):
    """What an array's bytes hold, known before they are decoded.

    Attributes:
        stored: the dtype of the bytes, uint16 for bfloat16.
        fortran: whether the values are in Fortran order.
        start: the place of the first value among the bytes.
    """

    shape: Shape
    dtype: torch.dtype
    stored: np.dtype[Any]
    fortran: bool
    start: int


def headers(record: ArrayRecord) -> dict[str, Header]:
    """Return the headers of all arrays; a tied name has the header of its tensor.

    Raises:
        UpdateError: an array differs from its header, or a tie leads nowhere.
    """
    with_values = {
        name: header(name, array)
        for name, array in record.items()
        if array.stype != TIED
    }
    return {
        name: with_values.get(name) or _tied(name, record, with_values)
        for name in record
    }


def decoded(
    record: ArrayRecord, of: Mapping[str, Header], *, writable: bool
) -> TensorDict:
    """Return a record's tensors, given its ``headers``; see ``from_arrays``."""
    # Tied names share a header; a tie may point to a later name.
    tensors: dict[int, Tensor] = {}
    for name, known in of.items():
        if record[name].stype == TIED:
            continue
        tensor = decode(name, record[name], known)
        if writable:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        tensors[id(known)] = tensor
    return {name: tensors[id(known)] for name, known in of.items()}


def model_hash(tensors: Tensors, without: Collection[str] = ()) -> str:
    """Return the SHA-256 of a model; of a sent one, of its ``from_arrays(record)``.

    Hashed are, in the order of the names, a line of JSON such as ``["fc.weight",
    "float32", [2, 3]]`` and the values of each tensor in C order; of the names in
    ``without`` only the line.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{json.dumps([name, dtype, [*tensor.shape]])}\n".encode())
        if name not in without:
            digest.update(flat_bytes(tensor).numpy().data)
    return digest.hexdigest()


def encode(name: str, tensor: Tensor) -> Array:
    """Return a tensor as an array: one of Flower's own, except for bfloat16."""
    value = tensor.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        return _array(value, BFLOAT16, _npy(value.view(torch.uint16)))
    if value.dtype not in _TORCH.values():
        raise FedrotError(
            f"The tensor '{name}' is {value.dtype}, which cannot be sent; convert it."
        )
    return _array(value, NUMPY, _npy(value))


def decode(name: str, array: Array, known: Header) -> Tensor:
    """Return an array's tensor, given its ``header``; see ``from_arrays``.

    It is a view of the array's bytes if they are aligned.
    """
    values = np.frombuffer(array.data, known.stored, prod(known.shape), known.start)
    if known.dtype == torch.bool and values.view(np.uint8).max(initial=0) > 1:
        raise _unreadable(name, "holds truth values other than 0 and 1")
    # A header of an odd length leaves the values unaligned; a copy is aligned.
    values = np.require(values, requirements="A")
    values = values.reshape(known.shape, order="F" if known.fortran else "C")
    tensor = torch.from_numpy(np.asarray(_Unlocked(values)))
    return tensor.view(torch.bfloat16) if known.dtype == torch.bfloat16 else tensor


def header(name: str, array: Array) -> Header:
    """Return an array's plausible header, checked against the array's claims."""
    if array.stype not in (NUMPY, BFLOAT16):
        raise _unreadable(
            name, f"is serialised as {array.stype!r:.60}, which is not supported here"
        )
    try:
        # Bytes 8 and 9 are the header's length in npy's version 1; a later version is
        # read whole.
        length = _HEADER
        if array.data[6:7] == b"\1":
            length = int.from_bytes(array.data[8:10], "little") + 10
        dims, fortran, stored, start = _parsed(array.data[: min(length, _HEADER)])
    except Exception as error:
        # NumPy calls Python's parser, which raises many types.
        raise _unreadable(
            name, f"has no readable npy header ({error!s:.200})"
        ) from error
    if stored not in _TORCH:
        raise _unreadable(
            name, f"holds {str(stored)!r:.60}, not numbers in this machine's byte order"
        )
    elements = prod(n or 1 for n in dims)
    if len(dims) > _DIMENSIONS or min(dims, default=0) < 0 or elements > _ELEMENTS:
        raise _unreadable(name, f"has the impossible shape {dims!r:.60}")
    shape = tuple(map(int, dims))
    bits = array.stype == BFLOAT16
    held = "bfloat16" if bits and stored == np.uint16 else str(stored)
    possible = [(held, shape)]
    if not bits:
        # Flower's legacy workflows leave both fields empty.
        possible.append(("", ()))
    if (array.dtype, array.shape) not in possible or bits != (held == "bfloat16"):
        raise _unreadable(
            name,
            f"claims to be {array.dtype!r:.60} {array.shape!r:.60}, but its header "
            f"says {held} {shape!r:.60}",
        )
    size = len(array.data) - start
    expected = prod(shape) * stored.itemsize
    if size != expected:
        raise _unreadable(name, f"has {size} bytes of values instead of {expected}")
    return Header(
        shape, torch.bfloat16 if bits else _TORCH[stored], stored, fortran, start
    )


# A model's arrays have few headers, and Python's parser is slow.
@lru_cache(maxsize=4096)
def _parsed(header: bytes) -> tuple[Sequence[int], bool, np.dtype[Any], int]:
    """Return shape, Fortran order, dtype and length of an npy header."""
    stream = BytesIO(header)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    shape, fortran, dtype = read[npy.read_magic(stream)](
        stream, max_header_size=_HEADER
    )
    return shape, fortran, dtype, stream.tell()


class _Unlocked:
    """A read-only array declared writable, because torch warns about read-only ones."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        interface = values.__array_interface__
        self.values = values
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _npy(value: Tensor) -> bytes:
    """Return the bytes that ``np.save`` writes, with only one copy of the values."""
    values = value.numpy()
    header = BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(values))
    return b"".join((header.getvalue(), values.reshape(-1).view(np.uint8).data))


def _array(like: Tensor, stype: str, data: bytes) -> Array:
    return Array(str(like.dtype).removeprefix("torch."), tuple(like.shape), stype, data)


def _tied(name: str, record: ArrayRecord, with_values: Mapping[str, Header]) -> Header:
    """Return the header of the tensor that a tied name stands for."""
    array = record[name]
    other = array.data.decode(errors="replace")
    if other not in with_values:
        raise _unreadable(
            name, f"is tied to {other!r:.60}, which is not in the record with values"
        )
    if (array.shape, array.dtype) != (record[other].shape, record[other].dtype):
        raise _unreadable(
            name, f"is tied to {other!r:.60}, which has another shape or dtype"
        )
    return with_values[other]


def _unreadable(name: str, problem: str) -> UpdateError:
    return UpdateError(f"The tensor '{name}' cannot be decoded: it {problem}.")


def replace_changed(
    arrays: ArrayRecord, before: Tensors, after: Tensors
) -> ArrayRecord:
    """Return ``after`` as Flower's own arrays, which any strategy can read.

    An array of Flower's own keeps its bytes if its tensor was neither replaced nor
    cast. bfloat16, which NumPy lacks, becomes float32.
    """
    replaced = ArrayRecord()
    for name, tensor in after.items():
        array = arrays[name]
        if (
            array.stype != NUMPY
            or f"torch.{array.dtype}" != str(tensor.dtype)
            or tensor is not before[name]
        ):
            array = encode(
                name, tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            )
        replaced[name] = array
    return replaced


def records_of_type(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return the records of one kind.

    Flower's own views are cycles, which keep a content alive.
    """
    return {
        name: record for name, record in content.items() if isinstance(record, kind)
    }


def singly(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value of a record, also those in lists, with its key."""
    for key, value in record.items():
        for single in value if isinstance(value, list) else [value]:
            yield key, single


def shapes_of(arrays: Mapping[str, Shaped]) -> dict[str, Shape]:
    """Return the shapes of tensors or arrays, by name."""
    return {name: tuple(array.shape) for name, array in arrays.items()}


def model_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return a reply's ArrayRecords that are models; a valid reply has exactly one."""
    return {
        name: arrays
        for name, arrays in records_of_type(content, ArrayRecord).items()
        if name != STATISTICS
    }


def only_model(content: RecordDict) -> tuple[str, ArrayRecord]:
    """Return the name and the arrays of a reply's model.

    Raises:
        UpdateError: the reply does not hold exactly one.
    """
    records = model_records(content)
    if len(records) != 1:
        raise UpdateError(
            f"The reply holds {len(records)} ArrayRecords; send exactly one."
        )
    return records.popitem()


def tensors_in(content: RecordDict, name: str) -> TensorDict:
    """Return the tensors of this record; raises ``UpdateError`` if it is missing."""
    record = records_of_type(content, ArrayRecord).get(name)
    if record is None:
        raise UpdateError(f"The answer has no ArrayRecord '{name}'.")
    return from_arrays(record)


def without_arrays(content: RecordDict) -> RecordDict:
    """Return a content's metrics, and configurations of up to 64 KiB in all."""
    small = RecordDict({**records_of_type(content, MetricRecord)})
    left = _LARGEST_CONFIGURATIONS
    for name, record in records_of_type(content, ConfigRecord).items():
        numbers = sum(
            len(value) if isinstance(value, str | bytes) else 8
            for _, value in singly(record)
        )
        left -= len(name) + numbers + sum(map(len, record))
        if left >= 0:
            small[name] = record
    return small


#: Approximate bytes of a reply's configurations that are kept until the round ends.
_LARGEST_CONFIGURATIONS = 2**16
