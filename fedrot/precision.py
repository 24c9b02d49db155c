"""Float64 where a model asks for float32: what is checked to many digits must be computed to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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
