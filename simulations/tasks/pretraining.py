"""Start ``pretrained``: a small model that was trained as a language model on other texts."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from torch import Tensor, nn

from fedrot.simulations.config import SimulationConfig as Experiment
from fedrot.simulations.models import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import task_of


def load_pretrained(model: nn.Module, experiment: Experiment, seed: int = 0) -> None:
    """Train a model as ``experiment.pretraining``, and load all but its head into ``model`` in place.

    The default ``seed`` gives all runs the same pretrained model.

    Raises:
        DataError: the texts cannot be used.
    """
    model.load_state_dict(_trained(experiment.pretraining.to_json(), seed), strict=False)


@lru_cache(maxsize=8)
def _trained(experiment_json: str, seed: int) -> dict[str, Tensor]:
    """Return the trained tensors of the encoder or decoder, without those of the head."""
    task = task_of(experiment_json)
    model = build_model(task.experiment, task.data, seed)
    training.train(model, task, np.arange(len(task.train.labels)), seed)
    body = f"{model.base_model_prefix}."
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith(body)}
