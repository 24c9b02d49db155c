"""``Objective``, the base class of tasks: traits, encoding, loss and evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from fedrot.simulations.data import BUNDLED, IGNORED, Names
from fedrot.simulations.scenario import Scenario

# Help reads the traits of tasks: what computes is imported at first use.
if TYPE_CHECKING:
    from numpy import ndarray
    from numpy.random import Generator
    from torch import Tensor
    from torch.nn import Module

Batch: TypeAlias = "dict[str, Tensor]"
Scores = dict[str, float]
#: A data set, and its training and held-out rows as ``data.encode.Encoded``.
EncodedData = tuple[Any, Any, Any]


class Objective(ABC):
    """A task: its traits, and for the data of one scenario its loss and evaluation.

    Attributes:
        name: in ``--task``.
        architectures: architectures of models from scratch, the default first.
        auto_model: what the class of transformers that builds models is for:
            ``AutoModelFor...``.
        usual_data: the default data set; empty if the user has to name one.
        peft: PEFT's task type, which decides what is trained beside an adapter; empty:
            no adapters.
        classifies: whether models have one output per row, and a task head that can be
            fitted.
        uses_labels: whether the labels of the data are read.
        reads_pooling: whether a sentence-transformers model is pooled as it was saved.
        metrics: names in the result of ``evaluate``, without ``loss``, the headline
            metric first; if a class has none, those of its data.
    """

    name: str
    architectures: Names
    auto_model: str
    usual_data = BUNDLED
    peft = ""
    classifies = False
    uses_labels = True
    reads_pooling = False
    metrics: Names = ()

    def __init__(self, scenario: Scenario, data: Any) -> None:
        """Read what the objective needs.

        Raises ``DataError`` if the model does not fit.
        """
        self.data = data
        self.metrics = self.metrics or data.metrics

    @staticmethod
    @abstractmethod
    def read(scenario: Scenario) -> EncodedData:
        """Return the data set, and its rows encoded for the model.

        Raises ``DataError``.
        """

    @staticmethod
    def sizes_of_inputs(scenario: Scenario, data: Any) -> dict[str, int]:
        """Return what a small model's configuration says about its inputs."""
        from fedrot.simulations.data.tokenizers import bundled_tokenizer

        vocabulary = bundled_tokenizer().get_vocab()
        return {
            "vocab_size": len(vocabulary),
            "max_position_embeddings": scenario.max_length,
            "pad_token_id": vocabulary["[PAD]"],
            "bos_token_id": vocabulary["[CLS]"],
            "eos_token_id": vocabulary["[SEP]"],
        }

    def usable(self, encoded: Any, rows: ndarray) -> ndarray:
        """Return the rows that have something to predict; default: all rows."""
        return rows

    def batch(
        self,
        encoded: Any,
        rows: ndarray,
        rng: Generator | None = None,
    ) -> Batch:
        """Return rows as inputs and ``labels`` of a training step.

        Without ``rng`` they are those of an evaluation.
        """
        return {**encoded.batch(rows), "labels": encoded.targets(rows)}

    def loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the mean loss of a training batch, a scalar with a gradient."""
        return model(**model_inputs(model, batch)).loss

    @abstractmethod
    def evaluate(
        self,
        model: Module,
        encoded: Any,
        rows: ndarray,
    ) -> Scores:
        """Return the metrics and ``loss`` on one or more usable rows.

        All are NaN if the loss is not finite.

        The model must be in evaluation mode, and gradients must be off. It is called
        once for a batch.
        """

    def diverged(self) -> Scores:
        """Return the result of an evaluation without a loss: NaN for all metrics."""
        return dict.fromkeys((*self.metrics, "loss"), math.nan)

    def check(self, model: Module, name: str, batch: Batch) -> None:  # noqa: B027
        """Raise ``FedrotError`` if a model, in evaluation mode, is not for this task.

        ``name`` is the model's, for the message; ``batch`` is one encoded row.
        """


class OfTokens(Objective):
    """A task that predicts a class of each labelled token.

    Attributes:
        together: number of rows that are evaluated together.
        shifted: whether a token is predicted at the one before it.
    """

    together: int
    shifted = False

    def predictions(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits at labelled tokens, their labels, and numbers of labels.

        They are ``[labels, classes]``, ``[labels]`` and ``[rows]``.
        """
        from torch.nn.functional import pad

        inputs = model_inputs(model, batch)
        labels = inputs.pop("labels")
        if self.shifted:
            labels = pad(labels[:, 1:], (0, 1), value=IGNORED)
        labelled = labels != IGNORED
        logits = self.logits_at(labelled, model, inputs)
        return logits, labels[labelled], labelled.sum(dim=1)

    def logits_at(self, labelled: Tensor, model: Any, inputs: Batch) -> Tensor:
        """Return the logits at labelled tokens, ``[labels, classes]``."""
        return model(**inputs).logits[labelled]

    def evaluate(
        self,
        model: Module,
        encoded: Any,
        rows: ndarray,
    ) -> Scores:
        import torch
        from torch.nn.functional import cross_entropy

        surprise = torch.zeros((), dtype=torch.float64)
        truth: list[Any] = []
        guesses: list[Any] = []
        for places in shortest_first(encoded, rows, self.together):
            batch = self.batch(encoded, rows[places])
            logits, labels, sizes = self.predictions(model, batch)
            losses = cross_entropy(logits.float(), labels, reduction="none")
            surprise += losses.double().sum()
            truth += labels.split(sizes.tolist())
            guesses += logits.argmax(dim=1).split(sizes.tolist())
        loss = surprise / sum(map(len, truth))
        if not torch.isfinite(loss):
            return self.diverged()
        return {**self.scores(loss, truth, guesses), "loss": float(loss)}

    @abstractmethod
    def scores(self, loss: Tensor, truth: Any, guesses: Any) -> Scores:
        """Return the metrics, by the loss (a scalar) and rows of tags or tokens.

        These are true and predicted ones, int64 ``[labels]`` for each row.
        """


def rows_with(rows: ndarray, has: Callable[[int], bool]) -> ndarray:
    """Return the rows for which ``has`` is true."""
    import numpy as np

    return rows[np.array([has(row) for row in rows], dtype=bool)]


def shortest_first(encoded: Any, rows: ndarray, size: int) -> Iterator[ndarray]:
    """Yield batches of indices of ``rows``, shortest rows first, for little padding."""
    order = encoded.lengths(rows).argsort(kind="stable")
    for start in range(0, len(order), size):
        yield order[start : start + size]


def model_inputs(model: Module, batch: Batch) -> Batch:
    """Return the inputs, without segments for models that have none.

    DistilBERT, RoBERTa and decoders have none.
    """
    inputs = dict(batch)
    config: Any = model.config
    if getattr(config.get_text_config(), "type_vocab_size", 0) < 2:
        inputs.pop("token_type_ids", None)
    return inputs
