"""Classification of texts and images: a label, several labels or a score for a row; domains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from fedrot.simulations.config import SimulationConfig as Experiment
from fedrot.simulations.data.data_set import DataSet, Kind
from fedrot.simulations.data.domains import SEEN, UNSEEN, DomainData, metric_of
from fedrot.simulations.data.encoding import Batch, Encoded
from fedrot.simulations.models import pad_id_of
from fedrot.simulations.tasks.objective import Objective, model_inputs, shortest_first
from fedrot.simulations.tasks.scores import CALIBRATION, evaluate_predictions

_PROBLEMS = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}


@dataclass(frozen=True)
class Classification(Objective):
    """Prediction of a row's label, labels or score."""

    auto_model: ClassVar[str] = "AutoModelForSequenceClassification"

    kind: Kind
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, experiment: Experiment, data: DataSet[Any]) -> Classification:
        if isinstance(data, DomainData):
            return DomainClassification(data.kind, data.metrics, data.domains)
        return cls(data.kind, data.metrics + (CALIBRATION if data.kind == "single" else ()))

    @staticmethod
    def configure(settings: Any, data: DataSet[Any]) -> None:
        settings.num_labels = 1 if data.kind == "regression" else len(data.label_names)
        settings.problem_type = _PROBLEMS[data.kind]
        if getattr(settings, "pad_token_id", None) is None:
            # Decoders classify with the last token that is not padding.
            settings.pad_token_id = pad_id_of(settings)

    def evaluate(self, model: torch.nn.Module, encoded: Encoded, rows: np.ndarray) -> dict[str, float]:
        logits = _logits(model, encoded, rows)
        return evaluate_predictions(self.kind, self.metrics, logits, encoded.labels[rows])


@dataclass(frozen=True)
class DomainClassification(Classification):
    """Prediction of the labels of texts of several domains; each domain has its own labels.

    Labels that a domain lacks (NaN) are left out of loss and scores. The headline metric is the mean
    macro F1 of the domains with training rows, ``unseen_macro_f1`` that of the domains without. The loss
    is the mean over domains with training rows. Domains without an evaluated row have no score.
    """

    domains: tuple[str, ...]

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, labels = model(**model_inputs(model, inputs)).logits, batch["labels"]
        known = ~labels.isnan()
        return binary_cross_entropy_with_logits(logits[known], labels[known])

    def evaluate(self, model: torch.nn.Module, encoded: Any, rows: np.ndarray) -> dict[str, float]:
        logits, labels = _logits(model, encoded, rows), encoded.labels[rows]
        if not np.isfinite(logits).all():
            return self.diverged()
        of_row = np.array(encoded.domains)[rows]
        found: dict[str, dict[str, float]] = {}
        for domain in dict.fromkeys(of_row):
            own = of_row == domain
            known = ~np.isnan(labels[own][0])
            outputs, targets = logits[own][:, known], labels[own][:, known]
            found[domain] = evaluate_predictions(self.kind, ("macro_f1",), outputs, targets)
        seen = [scores for domain, scores in found.items() if domain in self.domains]
        unseen = [scores for domain, scores in found.items() if domain not in self.domains]
        means = {
            name: float(np.mean([one["macro_f1"] for one in scores]))
            for name, scores in ((SEEN, seen), (UNSEEN, unseen))
            if scores
        }
        of_domains = {metric_of(domain): scores["macro_f1"] for domain, scores in found.items()}
        loss = float(np.mean([scores["loss"] for scores in seen or unseen]))
        return {**means, **of_domains, "loss": loss}


@dataclass(frozen=True)
class ImageClassification(Classification):
    """Prediction of the label of an image."""

    auto_model: ClassVar[str] = "AutoModelForImageClassification"


def _logits(model: torch.nn.Module, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
    """Return a classifier's outputs, float32 ``[rows, classes]``."""
    order = list(shortest_first(encoded, rows, 128))
    outputs = [
        model(**model_inputs(model, encoded.batch(rows[places]))).logits.float().numpy()
        for places in order
    ]
    return np.concatenate(outputs)[np.argsort(np.concatenate(order))]
