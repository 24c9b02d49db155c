"""What clients of rival averages of adapters do: fold residuals, cut ranks, freeze
factors.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora import peft_model
from fedrot.lora.adapters import LoraSettings, factors, named, pairs_of, wide_factors
from fedrot.lora.peft_model import adapter_tensors, load_adapter
from fedrot.tensors import Tensors
from reproductions.lora_rivals import residual_name, without_residuals

#: Key of the training configuration that says which factors a client trains: A, B or
#: both.
TRAIN = "fedrot-train"
#: Key that says whether a residual for the base weights will come.
FOLDS = "fedrot-folds"
#: Name of a module's base weight before a residual was added.
_BASE = "fedrot_base_weight"


def load_folded(model: Any, tensors: Tensors, adapter: str = "default") -> None:
    """Load an adapter as ``fedrot.lora.load_adapter`` does, with its residual.

    A residual is added to the original base weights; it is the sum over all rounds, so
    that a client may miss rounds. A model takes the residuals of one adapter: those of
    a second one would replace them. ``save_pretrained`` of PEFT does not save it: save
    ``model.merge_and_unload()``.

    Raises:
        UpdateError: the tensors are not those of this adapter.
        FedrotError: the adapter is merged; or there is a residual for quantised or
            shared weights. Nothing has been loaded then.
    """
    own = {pair.module for pair in pairs_of(adapter_tensors(model, adapter))}
    residuals = {
        pair.module: tensors.get(residual_name(pair)) for pair in pairs_of(tensors)
    }
    given = [name for name, residual in residuals.items() if residual is not None]
    _check_foldable(model, [name for name in given if name in own], adapter)
    load_adapter(model, without_residuals(tensors), adapter)
    _fold(model, residuals)


def load_first(model: Any, tensors: Tensors, adapter: str = "default") -> None:
    """Load an adapter as clients of method ``pad`` do: of larger ranks, the first
    directions.
    """
    own = adapter_tensors(model, adapter)
    load_adapter(
        model, first_directions(tensors, model.peft_config[adapter], own), adapter
    )


def first_directions(
    tensors: Tensors, settings: object, like: Tensors
) -> dict[str, Tensor]:
    """Return an adapter with as many of the first directions as another one has
    ranks.
    """
    found, scales = dict(tensors), LoraSettings.of(settings)
    for pair in pairs_of(tensors):
        if pair.a not in like:
            raise UpdateError(
                f"'{pair.module}' is adapted at the server, and not here."
            )
        (a, b), wanted = wide_factors(tensors, pair), len(factors(like, pair)[0])
        if wanted >= len(a):
            continue
        own = scales.scale(pair.module, len(a)) / scales.scale(pair.module, wanted)
        found |= named((a[:wanted], own * b[:, :wanted]), pair, tensors)
        if pair.bias in tensors:
            found[pair.bias] = own * tensors[pair.bias]
    return found


def train_only(model: Any, config: Mapping[str, Any], adapter: str = "default") -> None:
    """Set ``requires_grad`` of an adapter's factors as the training configuration of a
    rival says.

    Raises:
        FedrotError: the configuration says that a residual will come
            (``residual="fold"``), which the model's base weights cannot take.
    """
    peft_model.train_only(model, str(config.get(TRAIN, "both")), adapter)
    if config.get(FOLDS):
        parameters = peft_model.factor_parameters(model, adapter)
        _check_foldable(model, [pair.module for pair in pairs_of(parameters)], adapter)


def _fold(model: Any, residuals: Mapping[str, Tensor | None]) -> None:
    """Set each base weight to what it was at first, plus its residual if there is
    one.
    """
    layers = (
        (model.get_submodule(name), residual) for name, residual in residuals.items()
    )
    found = [
        (layer, r) for layer, r in layers if r is not None or hasattr(layer, _BASE)
    ]
    folded = [layer for layer, residual in found if residual is not None]
    half = {str(layer.get_base_layer().weight.dtype) for layer in folded}
    if half & {"torch.float16", "torch.bfloat16"}:
        warnings.warn(
            f"The base weights are {', '.join(sorted(half))}, which rounds most of a "
            "residual away. Load the base model in float32.",
            stacklevel=3,
        )
    for layer, residual in found:
        weight: Tensor = layer.get_base_layer().weight
        if not hasattr(layer, _BASE):
            layer.register_buffer(_BASE, weight.detach().clone(), persistent=False)
        base = getattr(layer, _BASE)
        with torch.no_grad():
            weight.copy_(
                base if residual is None else base + _laid_out(layer, residual, base)
            )


def _check_foldable(model: Any, modules: Sequence[str], adapter: str) -> None:
    """Raise ``FedrotError`` if the base weights of one of these modules cannot take a
    residual.
    """
    if not modules:
        return
    owners = Counter(
        id(getattr(m, "_parameters", {}).get("weight")) for m in model.modules()
    )
    conditional = getattr(model.peft_config[adapter], "alora_invocation_tokens", None)
    for module in modules:
        weight = getattr(model.get_submodule(module).get_base_layer(), "weight", None)
        if weight is None:
            problem = "are not in one tensor 'weight'"
        elif not weight.is_floating_point():
            problem = "are quantised"
        elif owners[id(weight)] > 1:
            problem = "are those of another module, too (tied embeddings)"
        elif conditional:
            problem = (
                "act on every token, while this adapter waits for its invocation tokens"
            )
        else:
            continue
        raise FedrotError(
            f"The base weights of '{module}' {problem}, and cannot take a residual. "
            "Give AdapterOptions(residual='drop') at the server."
        )


def _laid_out(layer: Any, residual: Tensor, base: Tensor) -> Tensor:
    """Return a residual ``[out, in]`` in the layout of the layer's weight."""
    is_table = isinstance(layer.get_base_layer(), torch.nn.Embedding)
    turned = (
        residual.mT if is_table or getattr(layer, "fan_in_fan_out", False) else residual
    )
    return turned.reshape(base.shape).to(base)
