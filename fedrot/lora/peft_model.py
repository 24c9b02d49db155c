"""A client's PEFT model: read, load, fit and freeze its adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapters import (
    LoraSettings,
    by_pattern,
    check_rank,
    factors,
    named,
    pairs_of,
    rescale,
    wide_factors,
)
from fedrot.lora.gauges import Wanted, gauged, keep_a, near_previous
from fedrot.lora.products import decomposed
from fedrot.tensors import ADAPTER_NAME, TensorDict, Tensors


def fitted(tensors: Tensors, settings: object, rank: int | Tensors) -> TensorDict:
    """Return an adapter of a smaller rank: the best approximation of the products.

    A client of rank 4 can start from an adapter of rank 16. The new factors are rotated
    as near as possible to the first ``rank`` rows and columns of the given factors. A
    product of 0 stays 0.

    Args:
        settings: the ``LoraConfig`` of either adapter; only alpha is used, ranks are
            read from tensors.
        rank: rank of the result, or an adapter with the same names whose ranks are
            used. Modules of smaller ranks stay as they are.

    Raises:
        FedrotError: the rank is below 1.
        UpdateError: the tensors are no adapter, or the adapter ``rank`` lacks a module.
    """
    if not isinstance(rank, Mapping):
        check_rank(rank)
    reduced = dict(tensors)
    scales = LoraSettings.of(settings)
    for pair in pairs_of(tensors):
        a, b = wide_factors(tensors, pair)
        if not isinstance(rank, Mapping):
            wanted = rank
        elif pair.a in rank:
            wanted = len(rank[pair.a])
        else:
            raise UpdateError(
                f"'{pair.module}' is adapted at the server but not here. Use one "
                "LoraConfig."
            )
        if wanted >= len(a):
            continue
        # The scale depends on the rank; the product must not.
        before = scales.scale(pair.module, len(a))
        factor = before / scales.scale(pair.module, wanted)
        b = factor * b
        first = decomposed(b, a, most=wanted).first(wanted)
        product = Wanted(first.u, first.s, first.vt, None, (a[:wanted], b[:, :wanted]))
        # A product of 0 determines no direction of A; keep_a leaves A as it is.
        near = near_previous if first.s.any() else keep_a
        matrices = gauged(near, product, pair.of_embedding)
        reduced |= named(matrices, pair, tensors)
        rescale(reduced, pair.bias, factor)
    return reduced


def adapter_tensors(model: Any, adapter: str | None = None) -> TensorDict:
    """Return copies of an adapter's tensors, to be sent to ``FedRotLoRA``.

    These are the tensors of ``peft.get_peft_model_state_dict``, without the base
    model's embeddings.

    Args:
        model: a ``peft.PeftModel``.
        adapter: its name; None takes the active one, as in all functions here.
    """
    from peft import get_peft_model_state_dict

    adapter = _adapter_of(model, adapter)
    tensors = get_peft_model_state_dict(
        model, adapter_name=adapter, save_embedding_layers=False
    )
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def load_adapter(model: Any, tensors: Tensors, adapter: str | None = None) -> None:
    """Load the tensors that ``FedRotLoRA`` sends into a PEFT model in place.

    An adapter of larger ranks is reduced to the ranks of the model's ``LoraConfig``
    (``fitted``).

    Args:
        model: a ``peft.PeftModel``.
        tensors: the broadcast adapter.
        adapter: name of the model's adapter.

    Raises:
        UpdateError: the tensors are not those of this adapter.
        FedrotError: the adapter is merged. After an error, nothing has been loaded.
    """
    _load(model, tensors, adapter, reduced=True)


def load_as_sent(model: Any, tensors: Tensors, adapter: str | None = None) -> None:
    """Load the tensors that ``FedRotLoRA`` sends in place, and reduce nothing.

    The model takes the ranks and scales of the tensors, so that clients of all ranks
    compute the same; ``load_adapter`` gives it its own again. Build optimisers after
    that. Errors are those of ``load_adapter``.

    Args:
        model: a ``peft.PeftModel`` of any rank, with the sender's alpha.
        tensors: the broadcast adapter.
        adapter: name of the model's adapter.
    """
    _load(model, tensors, adapter, reduced=False)


def train_only(model: Any, factors: str, adapter: str | None = None) -> None:
    """Set ``requires_grad`` of an adapter's factors.

    Task heads and other parameters are unchanged. Call this function before the
    optimiser is built.

    Example: ``train_only(model, "B")``. The mean of the factors is exact if all clients
    have the same ``A``.

    Args:
        model: a ``peft.PeftModel``.
        factors: ``A``, ``B`` or ``both``.
        adapter: name of the model's adapter.

    Raises:
        FedrotError: the value is not ``A``, ``B`` or ``both``.
    """
    if factors not in ("A", "B", "both"):
        raise FedrotError(f"factors is '{factors}'; choose A, B or both.")
    parameters = factor_parameters(model, _adapter_of(model, adapter))
    for pair in pairs_of(parameters):
        parameters[pair.a].requires_grad_(factors != "B")
        parameters[pair.b].requires_grad_(factors != "A")


def factor_parameters(model: Any, adapter: str) -> dict[str, torch.nn.Parameter]:
    """Return an adapter's factors, as parameters, by names of ``adapter_tensors``."""
    pattern = re.compile(
        rf"(.+\.lora_(?:embedding_)?[AB])\.{re.escape(adapter)}((?:\.weight)?)"
    )
    factors = {}
    for name, parameter in model.named_parameters():
        match = pattern.fullmatch(name)
        if match:
            factors[match[1] + match[2]] = parameter
    return factors


def _load(model: Any, tensors: Tensors, adapter: str | None, reduced: bool) -> None:
    """Load an adapter, at its ranks or reduced to those of the ``LoraConfig``."""
    from peft import set_peft_model_state_dict

    adapter = _adapter_of(model, adapter)
    layout = adapter_tensors(model, adapter)
    for name in tensors:
        if name not in layout and ADAPTER_NAME.sub("", name) in layout:
            raise UpdateError(
                f"The name of the received tensor '{name}' contains the adapter's "
                "name, as in model.state_dict(). Send adapter_tensors(model)."
            )
    for name, module in model.named_modules():
        if adapter in getattr(module, "merged_adapters", ()):
            raise FedrotError(
                f"The adapter is merged into the weights of '{name}'. Call "
                "model.unmerge_adapter()."
            )
    config = model.peft_config[adapter]
    ranks = {}
    sent = () if reduced else pairs_of(tensors)
    for pair in pairs_of(layout):
        rank = by_pattern(config.rank_pattern, pair.module, config.r)
        if pair in sent:
            rank = len(factors(tensors, pair)[0])
        ranks[pair] = rank
        # One row or column, repeated: only the shape counts.
        for name, axis in ((pair.a, 0), (pair.b, 1)):
            row = layout[name].narrow(axis, 0, 1)
            layout[name] = row.repeat_interleave(rank, axis)
    adapted = fitted(tensors, config, layout)
    different = layout.keys() ^ adapted.keys()
    if not different:
        different = {n for n in layout if adapted[n].shape != layout[n].shape}
    if different:
        raise UpdateError(
            f"The tensor '{min(different)}' of the model's adapter '{adapter}' and the "
            "received tensor differ in shape, or one of the two is missing. Client and "
            "server need the same LoraConfig; only the client's rank may be smaller."
        )
    for pair, rank in ranks.items():
        layer = model.get_submodule(pair.module)
        if layer.r[adapter] == rank:
            continue
        layer.r[adapter] = rank
        layer.scaling[adapter] = LoraSettings.of(config).scale(pair.module, rank)
        for name in (pair.a, pair.b):
            table = name.removesuffix(".weight")
            full = f"{table}.{adapter}{name.removeprefix(table)}"
            path, _, leaf = full.rpartition(".")
            owner = model.get_submodule(path)
            trained = getattr(owner, leaf).requires_grad
            setattr(owner, leaf, torch.nn.Parameter(layout[name], trained))
    set_peft_model_state_dict(model, adapted, adapter_name=adapter)


def _adapter_of(model: Any, adapter: str | None) -> str:
    """Return the name of a model's LoRA adapter; None is the active one."""
    configs = getattr(model, "peft_config", {})
    names = [adapter or "default"]
    if configs and adapter is None:
        names = model.active_adapters
        # A method of models of transformers.
        names = names() if callable(names) else names
    name = " + ".join(names)
    if name not in configs:
        known = f"its adapters are {', '.join(configs) or 'none'}"
        raise FedrotError(
            f"The {type(model).__name__} has no adapter '{name}'; {known}. Give the "
            "model that peft.get_peft_model returned, and its adapter's name."
        )
    LoraSettings.of(configs[name])
    return name
