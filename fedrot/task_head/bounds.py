"""``largest_inputs``: bounds of the features that a task head reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from fedrot.symmetry import FAMILIES
from fedrot.symmetry.describe.family import Config
from fedrot.symmetry.describe.task_heads import AfterNorm, AfterTanh
from fedrot.symmetry.resolve import layers_read, settings_of
from fedrot.tensors import Tensors


def largest_inputs(config: object, tensors: Tensors, task_head: str) -> Tensor | None:
    """Return the largest absolute value that each input of a task head can have.

    float64 ``[inputs]``: 1 after tanh; ``|g| sqrt(d) + |b|`` after a norm of ``d``
    units with gain ``g`` and bias ``b``. A pooling of tokens has the bound of the
    hidden states of each layer that it reads. None if the model's family has no bound
    for one of these layers (states before a last norm have none), or if other layers
    stand before the head.

    Args:
        config: a transformers configuration, or its dictionary.
        tensors: the model's state dict, in its order.
        task_head: the layer's name, from ``task_head_of``.

    Example: ``largest_inputs(model.config, model.state_dict(), "classifier")``
    """
    settings = settings_of(config)
    model_type = settings.get("model_type")
    is_pooled = "pooling" in settings
    names = list(tensors)
    weight = f"{task_head}.weight"
    size = tensors[weight].shape[1]
    # A state dict lists layers in the order of the forward pass.
    before = names[names.index(weight) - 1].rpartition(".")[0]
    for family in FAMILIES:
        if model_type not in family.model_types:
            continue
        match family.features_of(model_type, is_pooled):
            case AfterTanh(layer) if before.endswith(layer):
                return torch.ones(size, dtype=torch.float64)
            case AfterNorm(norm) if is_pooled or before == norm:
                layers = layers_read(settings)
                gains = [_gain_of(norm, layer, names, settings) for layer in layers]
                known = [gain for gain in gains if gain is not None]
                if len(known) < len(gains):
                    return None
                return torch.cat([_behind_norm(gain, tensors) for gain in known])
    return None


def _gain_of(
    norm: str, layer: int, names: Sequence[str], settings: Config
) -> str | None:
    """Return the gain that a layer's states have passed; None if there is none.

    ``layer`` is -1 for the last one.
    """
    ends = f"{norm}.weight"
    if layer == -1:
        # Each layer may have a norm of this name: the last one counts.
        return next(name for name in reversed(names) if name.endswith(ends))
    of_layers = rf".*\.\d+\.{re.escape(ends)}"
    gains = [name for name in names if re.fullmatch(of_layers, name)]
    numbered = settings.get("num_hidden_layers", len(gains))
    # A layer of ALBERT may be a group of layers, which may share a norm.
    count = numbered * settings.get("inner_group_num", 1)
    return gains[layer] if count == len(gains) >= -layer else None


def _behind_norm(gain: str, tensors: Tensors) -> Tensor:
    """Return the largest output of each unit of a norm."""
    scale = tensors[gain].double().abs()
    bias = tensors.get(f"{gain.removesuffix('weight')}bias", torch.zeros(()))
    return scale * len(scale) ** 0.5 + bias.double().abs()
