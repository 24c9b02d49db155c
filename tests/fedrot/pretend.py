"""An accelerator that is not there: tensors on it say so, and what CUDA would refuse is
refused.

The numbers live in the host's memory. While ``Pretend`` lasts,

* an operation on tensors of the host and of the device together raises, as on CUDA
  (scalars of the host excepted, where CUDA takes them), and so does giving a device
  tensor to numpy or scipy;
* what makes the host wait for the device is counted (``reads``), and so are copies to
  it (``uploads``);
* products in half precision raise, and in float32 where TF32 is allowed;
* ``peak`` is the most bytes that device tensors held at a time;
* a copy from pinned memory that need not be waited for is made when somebody waits, and
  no earlier: what reads the copy before reads NaN, and what changes the original before
  changes the copy;
* ``unrecorded`` counts such copies that nobody recorded the stream of: their memory
  could go to the next copy while something is still computed from them.

It is stricter than CUDA in one thing: indexing a device tensor by a host tensor raises
too, for that is a copy each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from threading import Lock
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

#: Where ``Pretend`` puts tensors.
DEVICE = torch.device("cuda", 0)

_HOST = torch.device("cpu")
_WAIT = {
    "item",
    "__float__",
    "__bool__",
    "__int__",
    "__index__",
    "__contains__",
    "tolist",
    "cpu",
}
_WAIT |= {"nonzero", "masked_select", "equal", "allclose"}
_PRODUCTS = {
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "dot",
    "einsum",
}
_JOINS = {"cat", "stack", "block_diag"}


class OnDevice(Tensor):
    """A tensor on the device."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(
            "a tensor of the pretended device, used where nothing is pretended"
        )


class Stream:
    """What the device has been told to do in order, but has not done yet."""

    def __init__(self, device=None):
        self.waiting: list[Callable[[], object]] = []

    def wait_event(self, event):
        """Do what was asked for before the event."""
        event.synchronize()


class Event:
    """A point in a stream."""

    def __init__(self, enable_timing=False):
        self._before: list[Callable[[], object]] = []
        self._done = Lock()

    def record(self, stream=None):
        """Mark what the stream has been told so far; without a stream there is nothing
        to wait for.
        """
        if stream is not None:
            self._before = stream.waiting
            stream.waiting = []

    def elapsed_time(self, later):
        """Return milliseconds, always the same."""
        return 1.0

    def synchronize(self):
        """Do it."""
        with self._done:
            while self._before:
                self._before.pop(0)()


class Pretend(TorchFunctionMode):
    """While it lasts there is a device; see the module."""

    def __init__(self):
        super().__init__()
        self.reads = self.uploads = self.peak = self.unrecorded = 0
        self._stream = self._usual = Stream()
        self._pinned: dict[int, Tensor] = {}
        self._patches = ExitStack()
        self._storages: list[tuple[weakref.ref[Tensor], int, int]] = []

    def __enter__(self):
        fakes = {
            "Stream": Stream,
            "Event": Event,
            "stream": self._on,
            "current_stream": lambda device=None: self._usual,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": self._forget,
            "max_memory_allocated": lambda device=None: self.peak,
            "get_device_name": lambda device=None: "a pretended device",
        }
        for name, fake in fakes.items():
            self._patches.enter_context(patch.object(torch.cuda, name, fake))
        super().__enter__()
        return self

    def __exit__(self, *error):
        self._patches.close()
        super().__exit__(*error)

    def _forget(self, device=None):
        self.peak = self.held

    @contextmanager
    def _on(self, stream):
        self._stream = stream
        yield
        self._stream = self._usual

    def put(self, tensors):
        """Return copies on the device, which count as no upload."""
        return {name: self._wrapped(tensor.clone()) for name, tensor in tensors.items()}

    @property
    def held(self):
        """The bytes that device tensors hold now, those that share storage counted
        once.
        """
        self._storages = [entry for entry in self._storages if entry[0]() is not None]
        return sum({place: size for _, place, size in self._storages}.values())

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return self._called(func, args, dict(kwargs or {}))

    def _called(self, func, args, given):
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return _place(args[0])
        if func == Tensor.is_cuda.__get__:
            return isinstance(args[0], OnDevice)
        if func in (Tensor.to, Tensor.cpu):
            return self._moved(
                args[0], (_HOST,) if func is Tensor.cpu else args[1:], given
            )
        tensors = [t for t in tree_leaves((args, given)) if isinstance(t, Tensor)]
        there = any(isinstance(t, OnDevice) for t in tensors)
        name = getattr(func, "__name__", "")
        if there:
            self._check(name, tensors)
        if name == "copy_":
            self._count(*map(_place, (args[1], args[0])))
        if given.pop("pin_memory", False):
            result = func(*args, **given)
            self._pinned[result.untyped_storage().data_ptr()] = result
            return result
        if given.get("device") is not None:
            there = torch.device(given["device"]).type == DEVICE.type
            given["device"] = _HOST
        result = func(*args, **given)
        in_place = bool(args) and result is args[0]
        return tree_map(self._wrapped, result) if there and not in_place else result

    def _check(self, name, tensors):
        """Refuse what CUDA refuses, and count what waits for it."""
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert a device tensor to numpy; use .cpu() first")
        host = [t for t in tensors if not isinstance(t, OnDevice)]
        written = (name.endswith("_") and not name.endswith("__")) or name.startswith(
            "__i"
        )
        mixed = any(t.ndim for t in host) or (host and name in _JOINS)
        mixed = mixed or (written and any(t is tensors[0] for t in host))
        if mixed and name != "copy_":
            raise RuntimeError(
                f"'{name}': expected all tensors to be on the same device"
            )
        if name in _PRODUCTS and any(
            t.dtype in (torch.float16, torch.bfloat16) for t in tensors
        ):
            raise RuntimeError(f"'{name}': a product in half precision")
        single = name in _PRODUCTS and any(t.dtype == torch.float32 for t in tensors)
        if single and torch.get_float32_matmul_precision() != "highest":
            raise RuntimeError(f"'{name}': a product that may be rounded to TF32")
        selects = name == "__getitem__" and any(
            t.dtype == torch.bool for t in tensors[1:]
        )
        self.reads += name in _WAIT or selects

    def _moved(self, tensor, args, kwargs):
        """Do what ``to`` and ``cpu`` do; another device's tensor is always a copy."""
        source, target, dtype = _place(tensor), None, kwargs.get("dtype")
        for value in (*args, kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, Tensor):
                target = _place(value)
                dtype = value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, str | torch.device):
                target = torch.device(value)
        target = source if target is None else target
        self._count(source, target)
        if (
            kwargs.get("non_blocking")
            and tensor.untyped_storage().data_ptr() in self._pinned
        ):
            later = torch.full_like(
                tensor, 255 if tensor.dtype == torch.uint8 else torch.nan
            )
            self._stream.waiting.append(lambda: later.copy_(tensor))
            packet = self._wrapped(later)
            self.unrecorded = self.unrecorded + 1
            packet.record_stream = self._record
            return packet
        copied = source.type != target.type or bool(kwargs.get("copy"))
        moved = tensor.to(dtype or tensor.dtype, copy=copied)
        if moved is not tensor:
            moved = moved.as_subclass(Tensor)
        return self._wrapped(moved) if target.type == DEVICE.type else moved

    def _record(self, stream):
        assert stream is self._usual
        self.unrecorded -= 1

    def _count(self, source, target):
        self.uploads += source.type != DEVICE.type == target.type
        self.reads += target.type != DEVICE.type == source.type

    def _wrapped(self, result):
        """Put a tensor on the device, and note what it holds."""
        if not isinstance(result, Tensor) or isinstance(result, OnDevice):
            return result
        storage = result.untyped_storage()
        place = storage.data_ptr()
        size = storage.nbytes()
        found = result.as_subclass(OnDevice)
        self._storages.append((weakref.ref(found), place, size))
        self.peak = max(self.peak, self.held)
        return found


def _place(tensor):
    return DEVICE if isinstance(tensor, OnDevice) else _HOST
