"""``loaded``: a model with the tensors that a message holds."""

from __future__ import annotations

from torch import nn

from fedrot.lora.peft_model import load_as_sent
from fedrot.tensors import Tensors


def loaded(model: nn.Module, tensors: Tensors) -> nn.Module:
    """Return the model with other tensors; an adapter keeps its ranks."""
    if hasattr(model, "peft_config"):
        load_as_sent(model, tensors)
    else:
        model.load_state_dict({**tensors})
    return model
