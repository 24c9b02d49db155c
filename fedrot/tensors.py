"""``Tensors``, a mapping from names to tensors, their precision, and their checks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError

#: Tensors by name, as in a state dict.
Tensors = Mapping[str, Tensor]

#: The same as a new dictionary, which its receiver may change.
TensorDict = dict[str, Tensor]

#: The sizes of a tensor's axes, and of all tensors by name.
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute with a tensor: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor with values that a dtype, also of integers or bool, can hold."""
    if dtype.is_floating_point or not tensor.is_floating_point():
        return tensor
    whole = tensor.double().round()
    if dtype == torch.bool:
        return whole.clamp(0, 1)
    limits = torch.iinfo(dtype)
    # float64 rounds the largest int64 up to 2**63, which is no int64.
    return whole.clamp(limits.min, min(limits.max, 2**63 - 1024))


def same_bits(first: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have equal bits, also NaN and -0."""
    return first.dtype == other.dtype and torch.equal(
        flat_bytes(first), flat_bytes(other)
    )


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's values in C order, uint8 ``[bytes]``, on the CPU.

    They share the tensor's memory if possible.
    """
    values = tensor.detach().cpu().contiguous()
    # Of a single value, ``reshape`` keeps a stride that ``view`` refuses.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


def along_axis(vector: Tensor, axis: int, like: Tensor) -> Tensor:
    """Return a vector in the dtype of ``like``, to broadcast along one of its axes."""
    return vector.to(like).reshape([-1 if d == axis else 1 for d in range(like.ndim)])


def identity(like: Tensor) -> Tensor:
    """Return the identity with the size, dtype and device of square matrices."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """Return a copy of the diagonal blocks of a matrix, ``[n / size, size, size]``."""
    return torch.stack(
        [matrix[i : i + size, i : i + size] for i in range(0, len(matrix), size)]
    )


#: A device, or its name.
Device = torch.device | str


class Shaped(Protocol):
    """A tensor, or a tensor that is not decoded yet."""

    @property
    def shape(self) -> Shape:
        """The size of every axis."""


#: Limits of the norms of tensors in alignment. Squares of larger norms, summed over all
#: tensors of a model, could overflow float32 (3.4e38); squares of smaller norms are
#: denormal (below 1.2e-38).
SMALLEST_NORM = 1e-17
LARGEST_NORM = 1e17

#: Weights of updates outside of this range would overflow or vanish in float32 sums.
SMALLEST_WEIGHT = 1e-9
LARGEST_WEIGHT = 1e12


#: The name of an adapter in the names of a PEFT model's tensors:
#: ``lora_A.NAME.weight``, ``lora_embedding_A.NAME``, ``modules_to_save.NAME.weight``.
ADAPTER_NAME = re.compile(
    r"((?<=\.lora_[AB])|(?<=\.lora_embedding_[AB])|\.modules_to_save)\.[^.]+"
)


def check_weight(weight: float) -> None:
    """Raise ``UpdateError`` if an update's weight is too small or too large."""
    if not SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT:
        raise UpdateError(
            f"The weight is {weight}; it must be positive, from {SMALLEST_WEIGHT:g} to "
            f"{LARGEST_WEIGHT:g}."
        )


def unusable(tensor: object) -> str:
    """Return why a tensor cannot be used; empty if it can, or is no tensor."""
    if not isinstance(tensor, Tensor):
        return ""
    if tensor.layout != torch.strided:
        return f"is sparse ({tensor.layout}); give it as a dense tensor: to_dense()"
    if tensor.is_complex():
        return (
            f"is {tensor.dtype}; give real numbers, such as its real and imaginary part"
        )
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype}); give its values: dequantize()"
    if tensor.is_meta:
        return (
            "is on the device 'meta' and has no values; load the model's weights first"
        )
    return ""


def check_update(update: Mapping[str, Shaped], shapes: Shapes) -> None:
    """Check names and shapes of an update.

    Raises:
        UpdateError: the update is no mapping; or a tensor is missing, extra,
            ``unusable`` or misshapen.
    """
    if not isinstance(update, Mapping):
        raise UpdateError(
            f"The update is a {type(update).__name__}, not tensors by name; pass "
            "model.state_dict()."
        )
    for name, shape in shapes.items():
        if name not in update:
            raise UpdateError(_missing(name, update, shapes))
        tensor = update[name]
        if tuple(tensor.shape) != shape:
            raise UpdateError(
                f"The tensor '{name}' has shape {list(tensor.shape)}, the model "
                f"has {list(shape)}. Send the tensors of the same model."
            )
        why = unusable(tensor)
        if why:
            raise UpdateError(f"The tensor '{name}' {why}.")
    extra = [name for name in update if name not in shapes]
    if extra:
        raise UpdateError(
            f"The tensor '{extra[0]}' is not part of the model ({len(extra)} extra in "
            "all). Send only the tensors that were received."
        )


def _missing(name: str, update: Mapping[str, Shaped], shapes: Shapes) -> str:
    """Return the message for a missing tensor, with the likely reason."""
    if update and all(other.isdigit() for other in update):
        return (
            "The tensors have numbers in place of names ('0', '1', ...), as in a "
            "record made from a list. Send ArrayRecord(model.state_dict())."
        )
    adapters = any(".lora_" in other for other in update)
    if adapters and not any(".lora_" in other for other in shapes):
        return (
            f"The tensors are a LoRA adapter's; the model's tensors, such as '{name}', "
            "are missing. Average adapters with FedRotLoRA, or merge the adapter "
            "(peft: merge_and_unload) and send the whole model."
        )
    alike = (other for other in update if other not in shapes and _alike(other, name))
    like = next(alike, None)
    instead = f"; the update has '{like}' instead" if like else ""
    count = sum(other not in update for other in shapes)
    return (
        f"The tensor '{name}' is missing ({count} of {len(shapes)} are){instead}. Send "
        "every tensor of the model, under the name that it was received with."
    )


def _alike(other: str, name: str) -> bool:
    """Return whether names differ by a prefix, or by PEFT's name of an adapter."""
    unnamed = ADAPTER_NAME.sub("", other)
    return unnamed == name or other.endswith(f".{name}") or name.endswith(f".{other}")


def check_finite(update: Tensors) -> None:
    """Raise ``UpdateError`` for NaN, Inf, or values whose squares overflow float32."""
    for name, tensor in update.items():
        if tensor.is_floating_point() and not _square(tensor) <= LARGEST_NORM**2:
            finite = torch.isfinite(tensor).all()
            what = "values whose squares overflow float32" if finite else "NaN or Inf"
            raise UpdateError(
                f"The tensor '{name}' holds {what}. Check the client's training "
                "(learning rate, mixed precision) before sending it."
            )


def _square(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's squares in its ``compute_dtype``."""
    value = tensor.detach()
    dtype = compute_dtype(value)
    if value.dtype == dtype and value.is_contiguous():
        # All threads share it; of a norm, one thread computes everything.
        flat = value.view(-1)
        return torch.dot(flat, flat)
    return torch.linalg.vector_norm(value, dtype=dtype).square()


def widened(tensors: Tensors) -> TensorDict:
    """Return tensors, floating-point ones in their ``compute_dtype``."""
    return {
        name: tensor.to(compute_dtype(tensor)) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def checked_device(device: Device) -> torch.device:
    """Return the device; raise ``FedrotError`` if tensors cannot be put on it."""
    try:
        checked = torch.device(device)
        torch.empty(0, device=checked)
    except (RuntimeError, AssertionError) as error:
        raise FedrotError(
            f"The device '{device}' cannot be used: {error}. Take 'cpu', or install "
            "the torch that is built for this device."
        ) from error
    return checked


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices without rounding to TF32 or bfloat16.

    A context and a decorator. Users may allow the rounding for training
    (``torch.set_float32_matmul_precision``); rotations would then be orthogonal only to
    1e-3. The user's setting, which holds for all threads, is restored.
    """
    try:
        chosen = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The user set the switches below to values that have no common name.
        chosen = "highest"
    had = [switch.fp32_precision for switch in _SWITCHES]
    torch.set_float32_matmul_precision("highest")
    for switch in _SWITCHES:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
        for switch, value in zip(_SWITCHES, had, strict=True):
            switch.fp32_precision = value


@contextmanager
def spare_threads(most: int = 0) -> Iterator[None]:
    """Use no more of torch's threads than there are idle cores.

    It is a context and a decorator. Threads wait for each other in every operation:
    beside eight busy processes two of them take thirty times as long as one. Results of
    another number of threads may differ in their last bits. The user's setting, which
    holds for all threads of the process, is restored.

    Args:
        most: so many threads, however many cores are idle; 0: no such number. With 1,
            results have the same bits on every machine of this kind.
    """
    chosen = torch.get_num_threads()
    torch.set_num_threads(min(chosen, most or max(1, _idle_cores())))
    try:
        yield
    finally:
        torch.set_num_threads(chosen)


def _idle_cores() -> int:
    """Return the number of cores on which no other process runs now.

    Only Linux tells what runs; elsewhere all cores count as idle.
    """
    cores = os.cpu_count() or 1
    with suppress(OSError):
        running = Path("/proc/loadavg").read_text().split()[3].split("/")[0]
        # torch's threads wait actively for some milliseconds after an operation.
        tasks = Path("/proc/self/task").glob("*/stat")
        ours = sum(") R " in task.read_text() for task in tasks)
        return cores - (int(running) - ours)
    return cores


#: The settings of the backends; torch before 2.9 has one setting for all.
_BACKENDS = (torch.backends.cuda, torch.backends.mkldnn)
_PRODUCTS = [getattr(backend, "matmul", None) for backend in _BACKENDS]
_SWITCHES: list[Any] = [x for x in _PRODUCTS if hasattr(x, "fp32_precision")]
