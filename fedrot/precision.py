"""What is computed to many digits, whatever the model or the user asks for.

Products that have to stay orthogonal are float32 to the last bit, never TF32; and what is checked to
many digits is computed in float64 where a model asks for float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def full_float32() -> Iterator[None]:
    """While it lasts, float32 matrices are multiplied as they are, not rounded to TF32 or bfloat16.

    A user may have allowed that for training (``torch.set_float32_matmul_precision``), on a GPU or on a
    CPU; a rotation would lose its orthogonality to 1e-3. What the user had is restored. Also a
    decorator. Like torch's own switches it holds for all threads of the process.
    """
    try:
        chosen = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user chose with the switches below, which the old way cannot express
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


def _switches() -> tuple[Any, ...]:
    """Return what says how a backend multiplies; torch before 2.9 has one setting for all."""
    products = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return tuple(switch for switch in products if hasattr(switch, "fp32_precision"))


_SWITCHES = _switches()


class Float64(TorchFunctionMode):
    """While it lasts, every ``float32`` that torch is asked for becomes ``float64``.

    Norms and softmaxes of many models compute in float32 whatever the model's dtype; reordered sums then
    differ by 1e-7, which hides small mistakes.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [_doubled(value) for value in args]
        return func(*args, **{name: _doubled(value) for name, value in (kwargs or {}).items()})


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
