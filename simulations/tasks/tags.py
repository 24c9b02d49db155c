"""Classification of words, such as named-entity recognition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fedrot.simulations.config import SimulationConfig as Experiment
from fedrot.simulations.data.encoding import IGNORED, EncodedTags
from fedrot.simulations.data.texts import TagData
from fedrot.simulations.tasks.objective import Objective, model_inputs, shortest_first
from fedrot.simulations.tasks.scores import entity_scores


@dataclass(frozen=True)
class TokenClassification(Objective):
    """Prediction of the tag of every word at its first token.

    The headline metric is the F1 of ``entity_scores``. Words beyond the maximum length are predicted as
    ``O``. The loss is the mean over the words within it.
    """

    auto_model: ClassVar[str] = "AutoModelForTokenClassification"

    tags: tuple[str, ...]
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, experiment: Experiment, data: TagData) -> TokenClassification:
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
