"""``Objective``, the interface of training objectives, and common functions of objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from fedrot.simulations.data.encode import Batch, Encoded
from fedrot.simulations.settings import Experiment


class Objective(ABC):
    """The model class, training loss and evaluation of a task.

    ``auto_model`` is the class of ``transformers`` that builds the model. ``metrics`` are the names in
    the result of ``evaluate``, without ``loss``, the headline metric first.
    """

    auto_model: ClassVar[str]
    metrics: tuple[str, ...]

    def __init__(self, experiment: Experiment, data: Any) -> None:
        """Read what the objective needs; raises ``DataError`` if the model does not fit."""
        self.data = data

    @classmethod
    def of(cls, experiment: Experiment, data: Any) -> Objective:
        """Return the objective for a data set; default: of this class."""
        return cls(experiment, data)

    @staticmethod  # noqa: B027
    def configure(settings: Any, data: Any) -> None:
        """Set the fields of a transformers configuration that the objective needs; default: none."""

    def usable(self, encoded: Any, rows: np.ndarray) -> np.ndarray:
        """Return the rows that have something to predict; default: all rows."""
        return rows

    def batch(self, encoded: Any, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        """Return rows as inputs and ``labels`` of a training step."""
        return {**encoded.batch(rows), "labels": encoded.targets(rows)}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a training batch, a scalar with a gradient."""
        return model(**model_inputs(model, batch)).loss

    @abstractmethod
    def evaluate(self, model: torch.nn.Module, encoded: Any, rows: np.ndarray) -> dict[str, float]:
        """Return the metrics and ``loss`` on one or more usable rows; all NaN if the loss is not finite.

        The model must be in evaluation mode, and gradients must be off. It is called once for a batch.
        """

    def diverged(self) -> dict[str, float]:
        """Return the result of an evaluation with an undefined loss: NaN for all metrics."""
        return dict.fromkeys((*self.metrics, "loss"), float("nan"))


def shortest_first(encoded: Encoded, rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield batches of indices of ``rows``, shortest rows first, so that there is little padding."""
    order = np.argsort(encoded.lengths(rows), kind="stable")
    return (order[start : start + size] for start in range(0, len(order), size))


def model_inputs(model: torch.nn.Module, batch: Batch) -> Batch:
    """Return the inputs on the model's device, without segments for models that have none.

    DistilBERT, RoBERTa and decoders have none.
    """
    segments = getattr(model.config, "type_vocab_size", 0) >= 2
    device = next(model.parameters()).device
    used = (name for name in batch if segments or name != "token_type_ids")
    return {name: batch[name].to(device) for name in used}
