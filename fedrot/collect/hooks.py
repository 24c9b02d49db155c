"""Forward hooks for all collectors: inputs and outputs of named modules, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def watched(
    model: nn.Module, names: Iterable[str], seen: Callable[[str, Tensor, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call ``seen(name, input, output)`` whenever a named module runs.

    If ``seen`` returns a tensor, this tensor replaces the module's output. Inside the context the model
    is in evaluation mode and no gradients are recorded.
    """
    with ExitStack() as stack, torch.no_grad(), evaluating(model):
        for name in names:

            def hook(
                module: nn.Module, args: Any, kwargs: Any, output: Tensor, name: str = name
            ) -> Tensor | None:
                return seen(name, (*args, *kwargs.values())[0], output)

            handle = model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def without_padding(units: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``[..., units]`` as rows ``[tokens, units]``, without tokens that the mask excludes."""
    if mask is not None and units.ndim == 3 and units.shape[:2].numel() == mask.numel():
        return units[mask.reshape(units.shape[:2]).bool()]
    return units.flatten(0, -2)


def input_axis(module: nn.Module | None) -> int | None:
    """Return the input axis of a module's weight; None if the module is no linear layer."""
    if isinstance(module, nn.Linear):
        return 1
    # Conv1D of transformers, recognised by name: this package does not import transformers.
    return 0 if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None
