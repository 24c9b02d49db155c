"""``OBJECTIVES``, the registry of tasks, and the objectives for texts, images and tagged words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fedrot.simulations.config import SimulationConfig, TaskName
from fedrot.simulations.data.data_set import DataSet, Kind
from fedrot.simulations.data.domains import SEEN, UNSEEN, DomainData, metric_of
from fedrot.simulations.data.encoding import (
    IGNORED,
    IMAGE,
    LABELLED_TEXT,
    TAGGED,
    Batch,
    Encoded,
    EncodedTags,
    Reader,
)
from fedrot.simulations.data.texts import TagData
from fedrot.simulations.models.architectures import pad_id_of
from fedrot.simulations.tasks.language import CausalLanguageModelling, MaskedLanguageModelling
from fedrot.simulations.tasks.objective import Objective, model_inputs, shortest_first
from fedrot.simulations.tasks.scores import CALIBRATION, entity_scores, evaluate_predictions


@dataclass(frozen=True)
class Classification(Objective):
    """Prediction of a row's label, labels or score."""

    auto_model: ClassVar[str] = "AutoModelForSequenceClassification"
    reader: ClassVar[Reader] = LABELLED_TEXT

    kind: Kind
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, config: SimulationConfig, data: DataSet[Any]) -> Classification:
        if isinstance(data, DomainData):
            return DomainClassification(data.kind, data.metrics, data.domains)
        return cls(data.kind, data.metrics + (CALIBRATION if data.kind == "single" else ()))

    @staticmethod
    def configure(settings: Any, data: DataSet[Any]) -> None:
        settings.num_labels = 1 if data.kind == "regression" else len(data.label_names)
        settings.problem_type = {
            "single": "single_label_classification",
            "multi": "multi_label_classification",
            "regression": "regression",
        }[data.kind]
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
            found[domain] = evaluate_predictions(
                self.kind, ("macro_f1",), logits[own][:, known], labels[own][:, known]
            )
        seen = [scores for domain, scores in found.items() if domain in self.domains]
        unseen = [scores["macro_f1"] for domain, scores in found.items() if domain not in self.domains]
        own_scores = {metric_of(domain): scores["macro_f1"] for domain, scores in found.items()}
        return {
            **({SEEN: float(np.mean([scores["macro_f1"] for scores in seen]))} if seen else {}),
            **({UNSEEN: float(np.mean(unseen))} if unseen else {}),
            **own_scores,
            "loss": float(np.mean([scores["loss"] for scores in seen or found.values()])),
        }


def _logits(model: torch.nn.Module, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
    """Return a classifier's outputs, float32 ``[rows, classes]``."""
    order = list(shortest_first(encoded, rows, 128))
    outputs = [
        model(**model_inputs(model, encoded.batch(rows[places]))).logits.float().numpy()
        for places in order
    ]
    return np.concatenate(outputs)[np.argsort(np.concatenate(order))]


@dataclass(frozen=True)
class ImageClassification(Classification):
    """Prediction of the label of an image."""

    auto_model: ClassVar[str] = "AutoModelForImageClassification"
    reader: ClassVar[Reader] = IMAGE


@dataclass(frozen=True)
class TokenClassification(Objective):
    """Prediction of the tag of every word at its first token.

    The headline metric is the F1 of ``entity_scores``. Words beyond the maximum length are predicted as
    ``O``. The loss is the mean over the words within it.
    """

    auto_model: ClassVar[str] = "AutoModelForTokenClassification"
    reader: ClassVar[Reader] = TAGGED

    tags: tuple[str, ...]
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, config: SimulationConfig, data: TagData) -> TokenClassification:
        return cls(data.tags, data.metrics)

    @staticmethod
    def configure(settings: Any, data: TagData) -> None:
        settings.id2label = dict(enumerate(data.tags))
        settings.label2id = {tag: number for number, tag in enumerate(data.tags)}

    def usable(self, encoded: EncodedTags, rows: np.ndarray) -> np.ndarray:
        """Return the rows with a tag to predict; empty rows and unknown characters have none."""
        return rows[np.array([len(encoded.places[row]) > 0 for row in rows], dtype=bool)]

    def evaluate(
        self, model: torch.nn.Module, encoded: EncodedTags, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        words = 0
        guesses = [np.zeros_like(encoded.words[row]) for row in rows]
        for places in shortest_first(encoded, rows, 64):
            inputs, targets = encoded.batch(rows[places]), encoded.targets(rows[places])
            logits = model(**model_inputs(model, inputs)).logits.double()
            tagged = targets != IGNORED
            surprise += cross_entropy(logits[tagged], targets[tagged], reduction="sum")
            words += int(tagged.sum())
            for place, seen, found in zip(places, tagged, logits.argmax(dim=-1), strict=True):
                guesses[place][encoded.places[rows[place]]] = found[seen].numpy()
        loss = surprise / words
        if not torch.isfinite(loss):
            return self.diverged()
        truth = [encoded.words[row] for row in rows]
        return {**entity_scores(truth, guesses, self.tags), "loss": float(loss)}


#: Objectives by task. A new task is added here and to ``config.TASKS``.
OBJECTIVES: Mapping[TaskName, type[Objective]] = {
    "classification": Classification,
    "mlm": MaskedLanguageModelling,
    "clm": CausalLanguageModelling,
    "ner": TokenClassification,
    "image": ImageClassification,
}
