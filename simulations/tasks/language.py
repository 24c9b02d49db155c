"""Language modelling: the prediction of hidden tokens, or of each token from those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.encoding import (
    IGNORED,
    TEXT,
    Batch,
    EncodedText,
    Reader,
    tokenizer_for,
)
from fedrot.simulations.data.texts import TextData
from fedrot.simulations.tasks.masking import Array, Vocabulary, for_evaluation, for_training
from fedrot.simulations.tasks.objective import Objective, by_length, model_inputs, pieces


@dataclass(frozen=True)
class MaskedLanguageModelling(Objective):
    """Prediction of the hidden tokens of a row; labels of the data set are not used.

    The headline metric is the pseudo-perplexity of Verma & Elbayad (2024), equation 11: ``exp`` of
    the loss, which is the mean negative log likelihood of the hidden tokens.
    """

    auto_model: ClassVar[str] = "AutoModelForMaskedLM"
    reader: ClassVar[Reader] = TEXT

    vocabulary: Vocabulary
    metrics: tuple[str, ...] = ("pseudo_perplexity", "accuracy")

    @classmethod
    def of(cls, config: SimulationConfig, data: TextData) -> MaskedLanguageModelling:
        return cls(Vocabulary.of(tokenizer_for(config)))

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Leave out rows without an ordinary token: empty ones, unknown characters only."""
        found = [bool(self.vocabulary.maskable(encoded.ids[row]).any()) for row in rows]
        return rows[np.array(found, dtype=bool)]

    def batch(self, encoded: EncodedText, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        return _hiding(encoded, rows, lambda ids, text: for_training(ids, text, self.vocabulary, rng))

    def fixed_batch(self, encoded: EncodedText, rows: np.ndarray) -> Batch:
        """Return the rows as inputs and ``labels`` of an evaluation, the same at every call."""
        return _hiding(encoded, rows, lambda ids, text: for_evaluation(ids, text, self.vocabulary, rows))

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(*_predictions(model, batch))

    def evaluate(
        self, model: torch.nn.Module, encoded: EncodedText, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        hits = tokens = 0
        for places in pieces(by_length(encoded, rows), 64):
            logits, labels = _predictions(model, self.fixed_batch(encoded, rows[places]))
            surprise += cross_entropy(logits.double(), labels, reduction="sum")
            hits += int((logits.argmax(dim=1) == labels).sum())
            tokens += len(labels)
        return _scores(self, surprise / tokens, accuracy=hits / tokens)


@dataclass(frozen=True)
class CausalLanguageModelling(Objective):
    """Prediction of each token of a row from those before it; labels of the data set are not used.

    The headline metric is the perplexity: ``exp`` of the loss, which is the mean negative log
    likelihood of all tokens but the first of all rows, the token that ends a text included.
    """

    auto_model: ClassVar[str] = "AutoModelForCausalLM"
    reader: ClassVar[Reader] = TEXT

    metrics: tuple[str, ...] = ("perplexity",)

    @classmethod
    def of(cls, config: SimulationConfig, data: TextData) -> CausalLanguageModelling:
        return cls()

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Leave out rows of one token, which have no second one to predict."""
        return rows[encoded.lengths(rows) > 1]

    def batch(self, encoded: EncodedText, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        """``labels`` are the tokens, as transformers has it: each is predicted at the place before."""
        batch = encoded.batch(rows)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return {**batch, "labels": labels}

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(*_predictions(model, _shifted(batch)))

    def evaluate(
        self, model: torch.nn.Module, encoded: EncodedText, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        tokens, unused = 0, np.random.default_rng(0)
        # Every token has logits over the whole vocabulary: 16 rows of a pretrained model fill 200 MB.
        for places in pieces(by_length(encoded, rows), 16):
            batch = _shifted(self.batch(encoded, rows[places], unused))
            logits, labels = _predictions(model, batch)
            surprise += cross_entropy(logits.float(), labels, reduction="none").double().sum()
            tokens += len(labels)
        return _scores(self, surprise / tokens)


def _scores(objective: Objective, loss: Tensor, **others: float) -> dict[str, float]:
    """Return the perplexity, which is the headline metric, the other metrics and the loss."""
    if not torch.isfinite(loss):
        return objective.diverged()
    return {objective.metrics[0]: float(loss.exp()), **others, "loss": float(loss)}


def _shifted(batch: Batch) -> Batch:
    """Move every label to the place where it is predicted, one before its token."""
    return {**batch, "labels": pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)}


def _hiding(
    encoded: EncodedText, rows: np.ndarray, hide: Callable[[Array, Array], tuple[Array, Array]]
) -> Batch:
    batch = encoded.batch(rows)
    shown, labels = hide(batch["input_ids"].numpy(), batch["attention_mask"].numpy())
    return {**batch, "input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}


def _predictions(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the logits ``[labels, vocabulary]`` at the labelled tokens, and the labels."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    labelled = labels != IGNORED
    with _output_at(model, labelled):
        return model(**model_inputs(model, inputs)).logits, labels[labelled]


@contextmanager
def _output_at(model: Any, chosen: Tensor) -> Iterator[None]:
    """Apply the output layer, the most work of a small model, at the chosen ``[rows, tokens]`` only."""
    output = model.get_output_embeddings()
    handle = output.register_forward_pre_hook(lambda _, inputs: (inputs[0][chosen],))
    try:
        yield
    finally:
        handle.remove()
