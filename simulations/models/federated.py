"""The tensors that clients and server exchange: all of a model, or those of its LoRA adapter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.lora import adapter_tensors, load_adapter
from fedrot.simulations.adapter import ALL_LINEAR, PEFT_TASKS, Adapter


def with_adapter(model: Any, adapter: Adapter, task: str, rank: int) -> nn.Module:
    """Return a transformers model with a LoRA adapter; PEFT freezes the base model.

    Raises:
        FedrotError: PEFT is not installed, or cannot adapt the model, such as without these modules.
    """
    try:
        import peft
    except ModuleNotFoundError:
        raise FedrotError(
            "lora needs PEFT. Install fedrot's extra 'lora': in a checkout, pip install -c "
            "constraints.txt -e '.[lora]'."
        ) from None
    targets = ALL_LINEAR if adapter.targets == (ALL_LINEAR,) else list(adapter.targets)
    alpha: Any = adapter.alpha  # PEFT accepts fractions, too.
    config = peft.LoraConfig(
        task_type=PEFT_TASKS[task],
        r=rank,
        lora_alpha=alpha,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        target_modules=targets,
    )
    try:
        with warnings.catch_warnings():
            # PEFT reads an attribute that transformers has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, config)
    except ValueError as error:
        raise FedrotError(f"lora: PEFT cannot adapt this {type(model).__name__}: {error}") from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors to exchange."""
    if hasattr(model, "peft_config"):
        return adapter_tensors(model)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


#: Functions that load an adapter, by the name that the server sends. Plug-ins add theirs.
LOADERS: dict[str, Callable[[Any, Mapping[str, Tensor]], None]] = {"": load_adapter}


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], how: str = "") -> None:
    """Load the tensors of ``tensors_of``; ``how`` names the loader of adapters, of any rank."""
    if hasattr(model, "peft_config"):
        LOADERS[how](model, tensors)
    else:
        model.load_state_dict(dict(tensors))


def number_of_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
