"""Contexts for numerical precision: float32 products without TF32, and float64 in place of float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices without rounding to TF32 or bfloat16; a context and a decorator.

    Users may allow the rounding for training (``torch.set_float32_matmul_precision``); rotations would
    then be orthogonal only to 1e-3. The user's setting, which holds for all threads, is restored.
    """
    try:
        chosen = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user set the switches below to values that have no common name
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


#: The settings of the backends; torch before 2.9 has one setting for all.
_SWITCHES: tuple[Any, ...] = tuple(
    products
    for products in (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    if hasattr(products, "fp32_precision")
)


class Float64(TorchFunctionMode):
    """Replace ``float32`` by ``float64`` in all calls of torch functions inside the context.

    Norms and softmaxes of many models compute in float32, whatever the model's dtype. Sums in another
    order then differ by 1e-7, which would hide small mistakes. ``torch.full`` of a float without a dtype
    makes float64 too, because XGLM fills a mask with the smallest number of its dtype.
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
        named = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        filled = func is torch.full and named.get("dtype") is None
        if filled and isinstance(named.get("fill_value", args[-1] if args else None), float):
            named["dtype"] = torch.float64
        return func(*args, **named)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
