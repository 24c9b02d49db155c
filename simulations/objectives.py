"""What models are trained for: classification (or regression) and masked language modelling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from fedrot.simulations.data import TextData, evaluate_predictions
from fedrot.simulations.masking import IGNORED, Array, Vocabulary, for_evaluation, for_training
from fedrot.simulations.metrics import Kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fedrot.simulations.models import Encoded

Batch = dict[str, torch.Tensor]


class Objective(ABC):
    """How to build, train and evaluate a model for one purpose.

    Attributes:
        auto_model: name of the class of ``transformers`` that builds the model.
        metrics: what ``evaluate`` returns beside ``loss``, the headline metric first.
    """

    auto_model: ClassVar[str]
    metrics: tuple[str, ...]

    @classmethod
    @abstractmethod
    def of(cls, data: TextData, tokenizer: Tokenizer) -> Objective:
        """Return the objective for a data set; raises ``DataError`` if the tokenizer cannot serve it."""

    @staticmethod
    @abstractmethod
    def configure(settings: Any, data: TextData) -> None:
        """Set in a transformers configuration what the objective needs."""

    def usable(self, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
        """Return those of the rows that there is something to predict in."""
        return rows

    @abstractmethod
    def batch(self, encoded: Encoded, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        """Return the rows as inputs and ``labels`` of a training step."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a training batch, a scalar with a gradient."""

    @abstractmethod
    def evaluate(self, model: torch.nn.Module, encoded: Encoded, rows: np.ndarray) -> dict[str, float]:
        """Return the metrics and ``loss`` on usable rows, at least one; all NaN if it is not finite.

        The model is in evaluation mode, and gradients are off.
        """


@dataclass(frozen=True)
class Classification(Objective):
    """Predict a row's label, labels or score."""

    auto_model: ClassVar[str] = "AutoModelForSequenceClassification"

    kind: Kind
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, data: TextData, tokenizer: Tokenizer) -> Classification:
        return cls(data.kind, data.metrics)

    @staticmethod
    def configure(settings: Any, data: TextData) -> None:
        settings.num_labels = 1 if data.kind == "regression" else len(data.label_names)
        settings.problem_type = {
            "single": "single_label_classification",
            "multi": "multi_label_classification",
            "regression": "regression",
        }[data.kind]

    def batch(self, encoded: Encoded, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        return {**encoded.batch(rows), "labels": torch.from_numpy(encoded.labels[rows])}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return model(**model_inputs(model, batch)).loss

    def evaluate(self, model: torch.nn.Module, encoded: Encoded, rows: np.ndarray) -> dict[str, float]:
        order = _by_length(encoded, rows)
        outputs = [
            model(**model_inputs(model, encoded.batch(rows[places]))).logits.float().numpy()
            for places in _pieces(order, 128)
        ]
        logits = np.concatenate(outputs)[np.argsort(order)]
        return evaluate_predictions(self.kind, self.metrics, logits, encoded.labels[rows])


@dataclass(frozen=True)
class MaskedLanguageModelling(Objective):
    """Predict hidden tokens of a row; labels of the data set play no part.

    The headline metric is the pseudo-perplexity of Verma & Elbayad (2024), equation 11: ``exp`` of
    the loss, which is the mean negative log likelihood of the hidden tokens.
    """

    auto_model: ClassVar[str] = "AutoModelForMaskedLM"

    vocabulary: Vocabulary
    metrics: tuple[str, ...] = ("pseudo_perplexity", "accuracy")

    @classmethod
    def of(cls, data: TextData, tokenizer: Tokenizer) -> MaskedLanguageModelling:
        return cls(Vocabulary.of(tokenizer))

    @staticmethod
    def configure(settings: Any, data: TextData) -> None:
        """Leave it alone: the output is the vocabulary, which the configuration has."""

    def usable(self, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
        """Rows without an ordinary token (empty text, unknown characters only) have nothing to hide."""
        found = [bool(self.vocabulary.maskable(encoded.ids[row]).any()) for row in rows]
        return rows[np.array(found, dtype=bool)]

    def batch(self, encoded: Encoded, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        return _hiding(encoded, rows, lambda ids, text: for_training(ids, text, self.vocabulary, rng))

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(*_predictions(model, batch))

    def evaluate(self, model: torch.nn.Module, encoded: Encoded, rows: np.ndarray) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        hits = tokens = 0
        for places in _pieces(_by_length(encoded, rows), 64):
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

    def fixed_batch(self, encoded: Encoded, rows: np.ndarray) -> Batch:
        """Return the rows as inputs and ``labels`` of an evaluation, the same at every call."""
        return _hiding(encoded, rows, lambda ids, text: for_evaluation(ids, text, self.vocabulary, rows))


OBJECTIVES: Mapping[str, type[Objective]] = {
    "classification": Classification,
    "mlm": MaskedLanguageModelling,
}


def _by_length(encoded: Encoded, rows: np.ndarray) -> np.ndarray:
    """Places in ``rows``, shortest text first, so that batches are padded little."""
    return np.argsort([len(encoded.ids[row]) for row in rows], kind="stable")


def _pieces(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (order[start : start + size] for start in range(0, len(order), size))


def model_inputs(model: torch.nn.Module, batch: Batch) -> Batch:
    """DistilBERT and RoBERTa-like models have no segments."""
    segments = getattr(model.config, "type_vocab_size", 0) >= 2
    return {name: value for name, value in batch.items() if segments or name != "token_type_ids"}


def _hiding(
    encoded: Encoded, rows: np.ndarray, hide: Callable[[Array, Array], tuple[Array, Array]]
) -> Batch:
    batch = encoded.batch(rows)
    shown, labels = hide(batch["input_ids"].numpy(), batch["attention_mask"].numpy())
    return {**batch, "input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}


def _predictions(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[hidden tokens, vocabulary]`` and labels ``[hidden tokens]`` of a batch."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    hidden = labels != IGNORED
    with _output_at(model, hidden):
        return model(**model_inputs(model, inputs)).logits, labels[hidden]


@contextmanager
def _output_at(model: Any, chosen: torch.Tensor) -> Iterator[None]:
    """Let the output layer, the most work of a small model, see the chosen ``[rows, tokens]`` only."""
    output = model.get_output_embeddings()
    handle = output.register_forward_pre_hook(lambda _, inputs: (inputs[0][chosen],))
    try:
        yield
    finally:
        handle.remove()
