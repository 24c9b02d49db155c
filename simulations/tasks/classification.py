"""Classification of texts, images and words: a label, several labels or a score; domains."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fedrot.simulations.data.encode import IGNORED, Batch, Encoded, EncodedText
from fedrot.simulations.data.labels import DataSet
from fedrot.simulations.data.texts import SEEN, UNSEEN, metric_of
from fedrot.simulations.models import pad_id_of
from fedrot.simulations.settings import Experiment
from fedrot.simulations.tasks.objective import Objective, model_inputs, shortest_first
from fedrot.simulations.tasks.scores import CALIBRATION, entity_scores, evaluate_predictions

PROBLEMS = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}


class Classification(Objective):
    """Prediction of a row's label, labels or score."""

    auto_model: ClassVar[str] = "AutoModelForSequenceClassification"

    def __init__(self, experiment: Experiment, data: DataSet) -> None:
        super().__init__(experiment, data)
        self.kind = data.kind
        self.metrics = data.metrics + (CALIBRATION if data.kind == "single" else ())

    @classmethod
    def of(cls, experiment: Experiment, data: DataSet) -> Objective:
        kind = DomainClassification if data.domains else cls
        return kind(experiment, data)

    @staticmethod
    def configure(settings: Any, data: DataSet) -> None:
        settings.num_labels = 1 if data.kind == "regression" else len(data.label_names)
        settings.problem_type = PROBLEMS[data.kind]
        if getattr(settings, "pad_token_id", None) is None:
            # Decoders classify with the last token that is not padding.
            settings.pad_token_id = pad_id_of(settings)

    def evaluate(self, model: torch.nn.Module, encoded: Encoded, rows: np.ndarray) -> dict[str, float]:
        logits = _logits(model, encoded, rows)
        return evaluate_predictions(self.kind, self.metrics, logits, encoded.labels[rows])


class DomainClassification(Classification):
    """Prediction of the labels of texts of several domains; each domain has its own labels.

    Labels that a domain lacks (NaN) are left out of loss and scores. The headline metric is the mean
    macro F1 of the domains with training rows, ``unseen_macro_f1`` that of the domains without. The loss
    is the mean over domains with training rows. Domains without an evaluated row have no score.
    """

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, labels = model(**model_inputs(model, inputs)).logits.cpu(), batch["labels"]
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
        seen = [scores for domain, scores in found.items() if domain in self.data.domains]
        unseen = [scores for domain, scores in found.items() if domain not in self.data.domains]
        means = {
            name: float(np.mean([one["macro_f1"] for one in scores]))
            for name, scores in ((SEEN, seen), (UNSEEN, unseen))
            if scores
        }
        of_domains = {metric_of(domain): scores["macro_f1"] for domain, scores in found.items()}
        loss = float(np.mean([scores["loss"] for scores in seen or unseen]))
        return {**means, **of_domains, "loss": loss}


class ImageClassification(Classification):
    """Prediction of the label of an image."""

    auto_model: ClassVar[str] = "AutoModelForImageClassification"


class TokenClassification(Objective):
    """Prediction of the tag of every word at its first token.

    The headline metric is the F1 of ``entity_scores``. Words beyond the maximum length are predicted as
    ``O``. The loss is the mean over the words within it.
    """

    auto_model: ClassVar[str] = "AutoModelForTokenClassification"

    def __init__(self, experiment: Experiment, data: DataSet) -> None:
        super().__init__(experiment, data)
        self.metrics = data.metrics

    @staticmethod
    def configure(settings: Any, data: DataSet) -> None:
        settings.id2label = dict(enumerate(data.tags))
        settings.label2id = {tag: number for number, tag in enumerate(data.tags)}

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Return the rows with a tag to predict; empty rows and unknown characters have none."""
        return rows[np.array([len(encoded.places[row]) > 0 for row in rows], dtype=bool)]

    def evaluate(
        self, model: torch.nn.Module, encoded: EncodedText, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        words = 0
        guesses = [np.zeros_like(encoded.words[row]) for row in rows]
        for places in shortest_first(encoded, rows, 64):
            inputs, targets = encoded.batch(rows[places]), encoded.targets(rows[places])
            logits = model(**model_inputs(model, inputs)).logits.cpu().double()
            tagged = targets != IGNORED
            surprise += cross_entropy(logits[tagged], targets[tagged], reduction="sum")
            words += int(tagged.sum())
            for place, seen, found in zip(places, tagged, logits.argmax(dim=-1), strict=True):
                guesses[place][encoded.places[rows[place]]] = found[seen].numpy()
        loss = surprise / words
        if not torch.isfinite(loss):
            return self.diverged()
        truth = [encoded.words[row] for row in rows]
        return {**entity_scores(truth, guesses, self.data.tags), "loss": float(loss)}


def _logits(model: torch.nn.Module, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
    """Return a classifier's outputs, float32 ``[rows, classes]``."""
    order = list(shortest_first(encoded, rows, 128))
    outputs = [
        model(**model_inputs(model, encoded.batch(rows[places]))).logits.cpu().float().numpy()
        for places in order
    ]
    return np.concatenate(outputs)[np.argsort(np.concatenate(order))]
