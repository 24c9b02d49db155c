"""``loaded``: a model with the tensors that a message holds; ``tensors_of`` a model."""

from __future__ import annotations

from torch import nn

from fedrot.lora.peft_model import adapter_tensors, load_as_sent
from fedrot.tensors import TensorDict, Tensors


def loaded(model: nn.Module, tensors: Tensors) -> nn.Module:
    """Return the model with other tensors; an adapter keeps its ranks."""
    if hasattr(model, "peft_config"):
        load_as_sent(model, tensors)
    else:
        model.load_state_dict({**tensors})
    return model


def tensors_of(model: nn.Module) -> TensorDict:
    """Return copies of a model's tensors, as a message holds them."""
    of_adapter = hasattr(model, "peft_config")
    tensors = adapter_tensors(model) if of_adapter else model.state_dict()
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
