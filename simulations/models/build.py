"""Models of a simulation: small ones from scratch, or pretrained."""

from __future__ import annotations

from typing import Any

import torch

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.data_set import DataSet
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
    """Return the model; parameters that are not pretrained are drawn from ``seed``.

    With ``lora`` that is the adapter alone: all models have one base, its task head included.

    Args:
        rank: of the adapter; None: the global one's.
    """
    import transformers

    adapter = config.adapter
    torch.manual_seed(0 if adapter else seed)
    settings = model_config(config, data)
    auto_model = getattr(transformers, OBJECTIVES[config.task].auto_model)
    if config.model is None:
        return auto_model.from_config(settings)
    with loading(config.model), no_bar_for_files(config.model):
        model = auto_model.from_pretrained(**loading_of(config.model), config=settings)
    if adapter is None:
        return model
    torch.manual_seed(seed)
    return with_adapter(model, adapter, config.task, rank or adapter.rank)
