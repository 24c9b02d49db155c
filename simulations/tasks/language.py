"""Language modelling: predicting hidden tokens, or each token from those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.encoding import Batch, EncodedText, tokenizer_for
from fedrot.simulations.data.readers import TEXT, Reader
from fedrot.simulations.data.texts import TextData
from fedrot.simulations.tasks.masking import IGNORED, Array, Vocabulary, for_evaluation, for_training
from fedrot.simulations.tasks.objective import Objective, by_length, model_inputs, pieces


@dataclass(frozen=True)
class MaskedLanguageModelling(Objective):
    """Predict hidden tokens of a row; labels of the data set play no part.

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

    @staticmethod
    def configure(settings: Any, data: TextData) -> None:
        """Leave it alone: the output is the vocabulary, which the configuration has."""

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Rows without an ordinary token (empty text, unknown characters only) have nothing to hide."""
        found = [bool(self.vocabulary.maskable(encoded.ids[row]).any()) for row in rows]
        return rows[np.array(found, dtype=bool)]

    def batch(self, encoded: EncodedText, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        return _hiding(encoded, rows, lambda ids, text: for_training(ids, text, self.vocabulary, rng))

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(*_predictions(model, batch))

    def evaluate(
        self, model: torch.nn.Module, encoded: EncodedText, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        hits = tokens = 0
        for places in pieces(by_length(encoded, rows), 64):
            logits, labels = _predictions(model, self.fixed_batch(encoded, rows[places]))
            surprise += torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
            hits += int((logits.argmax(dim=1) == labels).sum())
            tokens += len(labels)
        loss = surprise / tokens
        if not torch.isfinite(loss):
            return dict.fromkeys((*self.metrics, "loss"), float("nan"))
        return {
            "pseudo_perplexity": float(loss.exp()),
            "accuracy": hits / tokens,
            "loss": float(loss),
        }

    def fixed_batch(self, encoded: EncodedText, rows: np.ndarray) -> Batch:
        """Return the rows as inputs and ``labels`` of an evaluation, the same at every call."""
        return _hiding(encoded, rows, lambda ids, text: for_evaluation(ids, text, self.vocabulary, rows))


@dataclass(frozen=True)
class CausalLanguageModelling(Objective):
    """Predict each token of a row but the first from those before it; labels play no part.

    The headline metric is the perplexity: ``exp`` of the loss, which is the mean negative log
    likelihood of all predicted tokens of all rows, the token that ends a text included.
    """

    auto_model: ClassVar[str] = "AutoModelForCausalLM"
    reader: ClassVar[Reader] = TEXT

    metrics: tuple[str, ...] = ("perplexity",)

    @classmethod
    def of(cls, config: SimulationConfig, data: TextData) -> CausalLanguageModelling:
        return cls()

    @staticmethod
    def configure(settings: Any, data: TextData) -> None:
        """Leave it alone: the output is the vocabulary, which the configuration has."""

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """A row of one token has no second one to predict."""
        return rows[encoded.lengths(rows) > 1]

    def batch(self, encoded: EncodedText, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        """``labels`` are the tokens, as transformers has it: each is predicted a place before."""
        batch = encoded.batch(rows)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return {**batch, "labels": labels}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(*_predictions(model, _shifted(batch)))

    def evaluate(
        self, model: torch.nn.Module, encoded: EncodedText, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        tokens, unused = 0, np.random.default_rng(0)
        # Every token has logits over the whole vocabulary: 16 rows of a pretrained model fill 200 MB.
        for places in pieces(by_length(encoded, rows), 16):
            batch = _shifted(self.batch(encoded, rows[places], unused))
            logits, labels = _predictions(model, batch)
            of_tokens = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
            surprise += of_tokens.double().sum()
            tokens += len(labels)
        loss = surprise / tokens
        if not torch.isfinite(loss):
            return dict.fromkeys((*self.metrics, "loss"), float("nan"))
        return {"perplexity": float(loss.exp()), "loss": float(loss)}


def _shifted(batch: Batch) -> Batch:
    """Put every label where it is predicted, a place before its token."""
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return {**batch, "labels": labels}


def _hiding(
    encoded: EncodedText, rows: np.ndarray, hide: Callable[[Array, Array], tuple[Array, Array]]
) -> Batch:
    batch = encoded.batch(rows)
    shown, labels = hide(batch["input_ids"].numpy(), batch["attention_mask"].numpy())
    return {**batch, "input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}


def _predictions(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[labels, vocabulary]`` where a batch has labels, and these labels."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    labelled = labels != IGNORED
    with _output_at(model, labelled):
        return model(**model_inputs(model, inputs)).logits, labels[labelled]


@contextmanager
def _output_at(model: Any, chosen: torch.Tensor) -> Iterator[None]:
    """Let the output layer, the most work of a small model, see the chosen ``[rows, tokens]`` only."""
    output = model.get_output_embeddings()
    handle = output.register_forward_pre_hook(lambda _, inputs: (inputs[0][chosen],))
    try:
        yield
    finally:
        handle.remove()
