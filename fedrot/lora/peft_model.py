"""Functions for a client's PEFT model: ``adapter_tensors``, ``load_adapter`` and ``train_only``."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapters import LoraSettings, pairs_of, residual_name, without_residuals
from fedrot.lora.fitting import fitted
from fedrot.tensors import Tensors

#: Key of the training configuration that says which factors a client trains: A, B or both.
TRAIN = "fedrot-train"
#: Key that says whether a residual for the base weights will come.
FOLDS = "fedrot-folds"
#: Name of a module's base weight before a residual was added.
_BASE = "fedrot_base_weight"


def adapter_tensors(model: Any, adapter: str = "default") -> dict[str, Tensor]:
    """Return copies of an adapter's tensors, to be sent to ``FedRotLoRA``.

    They are those of ``peft.get_peft_model_state_dict``, without the base model's embeddings.

    Args:
        model: a ``peft.PeftModel``.
        adapter: its name.
    """
    from peft import get_peft_model_state_dict

    _check_adapter(model, adapter)
    found = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def load_adapter(model: Any, tensors: Tensors, adapter: str = "default", best: bool = True) -> None:
    """Load the tensors that ``FedRotLoRA`` sends into a PEFT model in place.

    An adapter of larger ranks is reduced to the model's own (``fitted``). A residual is added to the
    original base weights; it is the sum over all rounds, so that a client may miss rounds. A model takes
    the residuals of one adapter: those of a second one would replace them.
    ``save_pretrained`` of PEFT does not save it: save ``model.merge_and_unload()``.

    Args:
        model: a ``peft.PeftModel``.
        tensors: the broadcast adapter.
        adapter: name of the model's adapter.
        best: how larger ranks are cut, see ``fitted``.

    Raises:
        UpdateError: the tensors are not those of this adapter.
        FedrotError: the adapter is merged; or there is a residual for quantised or shared weights.
            Nothing has been loaded then.
    """
    from peft import set_peft_model_state_dict

    own = adapter_tensors(model, adapter)
    inside = rf"\.lora_(embedding_)?[AB]\.{re.escape(adapter)}(\.weight)?"
    named = [name for name in tensors if name not in own and re.search(f"{inside}$", name)]
    if named:
        raise UpdateError(
            f"The received tensor '{named[0]}' has the adapter's name in it, as model.state_dict() has. "
            "Send adapter_tensors(model)."
        )
    merged = [n for n, m in model.named_modules() if adapter in getattr(m, "merged_adapters", ())]
    if merged:
        raise FedrotError(
            f"The adapter is merged into the weights of '{merged[0]}'. Call model.unmerge_adapter()."
        )
    cut = fitted(without_residuals(tensors), model.peft_config[adapter], own, best)
    different = own.keys() ^ cut.keys() or [n for n in own if cut[n].shape != own[n].shape]
    if different:
        raise UpdateError(
            f"The tensor '{min(different)}' of the model's adapter '{adapter}' and that of the received "
            "one differ, or one of them is missing. Client and server need the same LoraConfig; a "
            "client's rank may be smaller, not larger."
        )
    _fold(model, tensors, adapter)
    set_peft_model_state_dict(model, cut, adapter_name=adapter)


def train_only(model: Any, factors: str | Mapping[str, Any], adapter: str = "default") -> None:
    """Set ``requires_grad`` of an adapter's factors; other parameters, such as task heads, keep theirs.

    Call it before the optimiser is built.

    Example: ``train_only(model, config)`` with the ``ConfigRecord`` that the client received.

    Args:
        model: a ``peft.PeftModel``.
        factors: ``A``, ``B`` or ``both``; or the training configuration, which says so under
            ``fedrot-train``.
        adapter: name of the model's adapter.

    Raises:
        FedrotError: the value is not ``A``, ``B`` or ``both``; or the configuration says that a residual
            will come (``residual="fold"``), which the model's base weights cannot take.
    """
    given = {TRAIN: factors} if isinstance(factors, str) else factors
    chosen = str(given.get(TRAIN, "both")) if isinstance(given, Mapping) else str(given)
    if chosen not in ("A", "B", "both"):
        raise FedrotError(
            f"Factors to train are '{chosen}'; they are A, B or both, or a training configuration."
        )
    _check_adapter(model, adapter)
    parameters = factor_parameters(model, adapter)
    if given.get(FOLDS):
        _check_foldable(model, [pair.module for pair in pairs_of(parameters)], adapter)
    for pair in pairs_of(parameters):
        parameters[pair.a].requires_grad_(chosen in ("A", "both"))
        parameters[pair.b].requires_grad_(chosen in ("B", "both"))


def factor_parameters(model: Any, adapter: str) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of an adapter's factors by the names of ``adapter_tensors``."""
    named = re.compile(rf"(.+\.lora_(?:embedding_)?[AB])\.{re.escape(adapter)}(\.weight)?")
    found = ((named.fullmatch(name), parameter) for name, parameter in model.named_parameters())
    return {match[1] + (match[2] or ""): parameter for match, parameter in found if match}


def _check_adapter(model: Any, adapter: str) -> None:
    configs = getattr(model, "peft_config", {})
    if adapter not in configs:
        known = f"its adapters are {', '.join(configs)}" if configs else "it has no adapters"
        raise FedrotError(
            f"A {type(model).__name__} has no adapter '{adapter}'; {known}. Give the model of "
            "peft.get_peft_model."
        )
    LoraSettings.of(configs[adapter])


def _fold(model: Any, tensors: Tensors, adapter: str) -> None:
    """Set each base weight to what it was at first, plus its residual if there is one."""
    residuals = {pair.module: tensors.get(residual_name(pair)) for pair in pairs_of(tensors)}
    _check_foldable(
        model, [name for name, residual in residuals.items() if residual is not None], adapter
    )
    layers = ((model.get_submodule(name), residual) for name, residual in residuals.items())
    found = [(layer, r) for layer, r in layers if r is not None or hasattr(layer, _BASE)]
    folded = [layer for layer, residual in found if residual is not None]
    half = {str(layer.get_base_layer().weight.dtype) for layer in folded}
    if half & {"torch.float16", "torch.bfloat16"}:
        warnings.warn(
            f"The base weights are {', '.join(sorted(half))}, which rounds most of a residual away. "
            "Load the base model in float32.",
            stacklevel=3,
        )
    for layer, residual in found:
        weight: Tensor = layer.get_base_layer().weight
        if not hasattr(layer, _BASE):
            layer.register_buffer(_BASE, weight.detach().clone(), persistent=False)
        base = getattr(layer, _BASE)
        with torch.no_grad():
            weight.copy_(base if residual is None else base + _laid_out(layer, residual, base))


def _check_foldable(model: Any, modules: Sequence[str], adapter: str) -> None:
    """Raise ``FedrotError`` if the base weights of one of these modules cannot take a residual."""
    if not modules:
        return
    owners = Counter(id(getattr(m, "_parameters", {}).get("weight")) for m in model.modules())
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
            problem = "act on every token, while this adapter waits for its invocation tokens"
        else:
            continue
        raise FedrotError(
            f"The base weights of '{module}' {problem}, and cannot take a residual. Give "
            "AdapterOptions(residual='drop') at the server."
        )


def _laid_out(layer: Any, residual: Tensor, base: Tensor) -> Tensor:
    """Return a residual ``[out, in]`` in the layout of the layer's weight."""
    is_table = isinstance(layer.get_base_layer(), torch.nn.Embedding)
    turned = residual.mT if is_table or getattr(layer, "fan_in_fan_out", False) else residual
    return turned.reshape(base.shape).to(base)
