"""Models of a simulation: small models from scratch, and pretrained models."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch

from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.labels import DataSet
from fedrot.simulations.models.architectures import settings_of
from fedrot.simulations.models.federated import with_adapter
from fedrot.simulations.models.packaged import loading, loading_of, no_bar_for_files
from fedrot.simulations.tasks.objectives import OBJECTIVES


def model_config(config: SimulationConfig, data: DataSet[Any]) -> Any:
    """Return the transformers configuration of the model, with the task's head."""
    settings = settings_of(config, data)
    OBJECTIVES[config.task].configure(settings, data)
    return settings


def build_model(
    config: SimulationConfig, data: DataSet[Any], seed: int, rank: int | None = None
) -> torch.nn.Module:
    """Return the model; parameters that are not pretrained are drawn with ``seed``.

    With ``lora``, ``seed`` decides only the adapter: all models have the same base, with its task head.

    Args:
        rank: rank of the adapter; None: that of the global adapter.
    """
    import transformers

    adapter = config.adapter
    torch.manual_seed(0 if adapter else seed)
    settings = model_config(config, data)
    auto_model = getattr(transformers, OBJECTIVES[config.task].auto_model)
    if config.model is None:
        return auto_model.from_config(settings)
    model = _pretrained(auto_model, config.model, settings)
    if adapter is None:
        return model
    torch.manual_seed(seed)
    return with_adapter(model, adapter, config.task, rank or adapter.rank)


def _pretrained(auto_model: Any, name: str, settings: Any) -> Any:
    """Load a pretrained model; log new tensors, such as a task head's.

    Raises:
        FedrotError: the model cannot be loaded, or lacks a tensor other than a head's or pooler's.
    """
    with loading(name), no_bar_for_files(name):
        model, found = auto_model.from_pretrained(
            **loading_of(name), config=settings, output_loading_info=True
        )
    new = sorted(found["missing_keys"])
    # A model saved for another task may have no pooler.
    body = [n for n in new if n.startswith(f"{model.base_model_prefix}.") and ".pooler." not in n]
    if body:
        raise FedrotError(
            f"'{name}' has no tensor '{body[0]}' ({len(body)} missing in all), which a "
            f"{type(model).__name__} needs: it would be random. Check that weights and configuration "
            "belong together, and save the whole model, without wrappers, with save_pretrained."
        )
    if new:
        _say_new(name, ", ".join(new))
    return model


@lru_cache(maxsize=64)
def _say_new(name: str, tensors: str) -> None:
    """Log which tensors are not pretrained, once per process."""
    logging.getLogger("flwr").info("Not in '%s', therefore random: %s", name, tensors)
