"""Objectives, the loss and scores of a task: classification, tags of words, language
modelling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, pad

from fedrot.simulations.data.encode import (
    IGNORED,
    Batch,
    Encoded,
    EncodedText,
    tokenizer_for,
)
from fedrot.simulations.data.read import DataError
from fedrot.simulations.data.texts import SEEN, UNSEEN, metric_of
from fedrot.simulations.experiment import Experiment, TaskName
from fedrot.simulations.models import settings_of
from fedrot.simulations.tasks.scores import entity_scores, evaluate_predictions

#: Share of a row's ordinary tokens that is predicted; at least one token is.
SHARE = 0.15
#: In training, the shares of predicted tokens that are replaced by the mask and by a
#: random token.
MASKED, RANDOM = 0.8, 0.1
#: Rows that are evaluated together: as a pretrained decoder's logits, 16 rows need 200
#: MB.
_ROWS = 16
_EVALUATION_SEED = 15


class Objective(ABC):
    """The training loss and evaluation of a task.

    ``metrics`` are the names in the result of ``evaluate``, without ``loss``, the
    headline metric first.
    """

    metrics: tuple[str, ...]

    def __init__(self, experiment: Experiment, data: Any) -> None:
        """Read what the objective needs; raises ``DataError`` if the model does not
        fit.
        """
        self.data = data

    def usable(self, encoded: Any, rows: np.ndarray) -> np.ndarray:
        """Return the rows that have something to predict; default: all rows."""
        return rows

    def batch(
        self, encoded: Any, rows: np.ndarray, rng: np.random.Generator | None = None
    ) -> Batch:
        """Return rows as inputs and ``labels`` of a training step; without ``rng`` of
        an evaluation.
        """
        return {**encoded.batch(rows), "labels": encoded.targets(rows)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a training batch, a scalar with a gradient."""
        return model(**model_inputs(model, batch)).loss

    @abstractmethod
    def evaluate(
        self, model: nn.Module, encoded: Any, rows: np.ndarray
    ) -> dict[str, float]:
        """Return the metrics and ``loss`` on one or more usable rows; all NaN if the
        loss is not finite.

        The model must be in evaluation mode, and gradients must be off. It is called
        once for a batch.
        """

    def diverged(self) -> dict[str, float]:
        """Return the result of an evaluation with an undefined loss: NaN for all
        metrics.
        """
        return dict.fromkeys((*self.metrics, "loss"), float("nan"))


def shortest_first(
    encoded: Encoded, rows: np.ndarray, size: int
) -> Iterator[np.ndarray]:
    """Yield batches of indices of ``rows``, shortest rows first, so that there is
    little padding.
    """
    order = np.argsort(encoded.lengths(rows), kind="stable")
    return (order[start : start + size] for start in range(0, len(order), size))


def model_inputs(model: nn.Module, batch: Batch) -> Batch:
    """Return the inputs, without segments for models that have none.

    DistilBERT, RoBERTa and decoders have none.
    """
    segments = getattr(model.config, "type_vocab_size", 0) >= 2
    return {
        name: rows
        for name, rows in batch.items()
        if segments or name != "token_type_ids"
    }


class Classification(Objective):
    """Prediction of a row's label, labels or score.

    If texts are of several domains, each domain has its own labels, and labels that a
    domain lacks (NaN) are left out of loss and scores. The headline metric is then the
    mean macro F1 of the domains with training rows, ``unseen_macro_f1`` that of the
    domains without. The loss is the mean over domains with training rows. Domains
    without an evaluated row have no score.
    """

    def __init__(self, experiment: Experiment, data: Any) -> None:
        super().__init__(experiment, data)
        more = ("ece", "calibrated_loss") if data.kind == "single" else ()
        self.metrics = (*data.metrics, *more)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if not self.data.domains:
            return super().loss(model, batch)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, labels = model(**model_inputs(model, inputs)).logits, batch["labels"]
        known = ~labels.isnan()
        return binary_cross_entropy_with_logits(logits[known], labels[known])

    def evaluate(
        self, model: nn.Module, encoded: Any, rows: np.ndarray
    ) -> dict[str, float]:
        order = list(shortest_first(encoded, rows, 128))
        batches = (model_inputs(model, encoded.batch(rows[places])) for places in order)
        outputs = [model(**batch).logits.float().numpy() for batch in batches]
        logits = np.concatenate(outputs)[np.argsort(np.concatenate(order))]
        labels = encoded.labels[rows]
        if not self.data.domains:
            return evaluate_predictions(self.data.kind, self.metrics, logits, labels)
        if not np.isfinite(logits).all():
            return self.diverged()
        of_row = np.array(encoded.domains)[rows]
        found: dict[str, float] = {}
        groups: dict[str, list[dict[str, float]]] = {SEEN: [], UNSEEN: []}
        for domain in dict.fromkeys(of_row):
            own = of_row == domain
            known = ~np.isnan(labels[own][0])
            outputs, targets = logits[own][:, known], labels[own][:, known]
            scores = evaluate_predictions(
                self.data.kind, ("macro_f1",), outputs, targets
            )
            found[metric_of(domain)] = scores["macro_f1"]
            groups[SEEN if domain in self.data.domains else UNSEEN].append(scores)
        macro = {
            name: float(np.mean([scores["macro_f1"] for scores in group]))
            for name, group in groups.items()
            if group
        }
        loss = float(
            np.mean([scores["loss"] for scores in groups[SEEN] or groups[UNSEEN]])
        )
        return {**macro, **found, "loss": loss}


class TokenClassification(Objective):
    """Prediction of the tag of every word at its first token.

    The headline metric is the F1 of ``entity_scores``. Words beyond the maximum length
    are left out.
    """

    def __init__(self, experiment: Experiment, data: Any) -> None:
        super().__init__(experiment, data)
        self.metrics = data.metrics

    def usable(self, encoded: Any, rows: np.ndarray) -> np.ndarray:
        """Return the rows with a tag to predict; empty rows and unknown characters have
        none.
        """
        return rows[
            np.array([(encoded.tags[row] != IGNORED).any() for row in rows], dtype=bool)
        ]

    def evaluate(
        self, model: nn.Module, encoded: Any, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        truth, guesses = list[np.ndarray](), list[np.ndarray]()
        for places in shortest_first(encoded, rows, 64):
            inputs, targets = encoded.batch(rows[places]), encoded.targets(rows[places])
            logits = model(**model_inputs(model, inputs)).logits.double()
            tagged = targets != IGNORED
            surprise += cross_entropy(logits[tagged], targets[tagged], reduction="sum")
            for own, seen, found in zip(
                targets, tagged, logits.argmax(dim=-1), strict=True
            ):
                truth.append(own[seen].numpy())
                guesses.append(found[seen].numpy())
        loss = surprise / sum(map(len, truth))
        if not torch.isfinite(loss):
            return self.diverged()
        return {**entity_scores(truth, guesses, self.data.tags), "loss": float(loss)}


class LanguageModelling(Objective):
    """Prediction of tokens; labels of the data set are not used.

    The headline metric is the perplexity: ``exp`` of the loss, which is the mean
    negative log likelihood of all predicted tokens of all rows. ``shifted``: a token is
    predicted at the one before it.
    """

    shifted = False

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(*self._predictions(model, batch))

    def evaluate(
        self, model: nn.Module, encoded: EncodedText, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        hits = tokens = 0
        for places in shortest_first(encoded, rows, _ROWS):
            logits, labels = self._predictions(model, self.batch(encoded, rows[places]))
            surprise += (
                cross_entropy(logits.float(), labels, reduction="none").double().sum()
            )
            hits += int((logits.argmax(dim=1) == labels).sum())
            tokens += len(labels)
        loss = surprise / tokens
        if not torch.isfinite(loss):
            return self.diverged()
        found = dict(
            zip(self.metrics, (float(loss.exp()), hits / tokens), strict=False)
        )
        return {**found, "loss": float(loss)}

    def _predictions(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits ``[labels, vocabulary]`` at labelled tokens, and the labels
        ``[labels]``.
        """
        inputs = dict(batch)
        labels = inputs.pop("labels")
        if self.shifted:
            labels = pad(labels[:, 1:], (0, 1), value=IGNORED)
        labelled = labels != IGNORED
        # The output layer, most of a small model's work, is applied only there.
        output = model.get_output_embeddings()
        with output.register_forward_pre_hook(lambda _, states: (states[0][labelled],)):
            return model(**model_inputs(model, inputs)).logits, labels[labelled]


class MaskedLanguageModelling(LanguageModelling):
    """Prediction of the masked tokens of a row.

    The headline metric is the pseudo-perplexity of Verma & Elbayad (2024), equation 11.
    Training hides tokens as BERT's: 80 % become the mask, 10 % a random ordinary token,
    10 % stay. In evaluation all become the mask, and every call hides the same tokens
    of a row of the data set.

    Attributes:
        mask: id of the tokenizer's mask token.
        special, ordinary: ids of special tokens, with the mask, and of all others that
            the model has.
    """

    metrics = ("pseudo_perplexity", "accuracy")

    def __init__(self, experiment: Experiment, data: Any) -> None:
        super().__init__(experiment, data)
        tokenizer = tokenizer_for(experiment)
        vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
        masks = [
            vocabulary[token] for token in ("[MASK]", "<mask>") if token in vocabulary
        ]
        if not masks:
            raise DataError(
                "the model's tokenizer has no mask token ([MASK] or <mask>), which "
                "task 'mlm' needs; choose another model, or task 'classification'"
            )
        self.mask = masks[0]
        self.special = np.unique(
            [self.mask, *(id_ for id_, token in added.items() if token.special)]
        )
        self.ordinary = np.setdiff1d([*vocabulary.values()], self.special)
        self.ordinary = self.ordinary[
            self.ordinary < settings_of(experiment, data).vocab_size
        ]

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Return the rows with an ordinary token; empty texts and unknown characters
        have none.
        """
        found = [not np.isin(encoded.ids[row], self.special).all() for row in rows]
        return rows[np.array(found, dtype=bool)]

    def batch(
        self,
        encoded: EncodedText,
        rows: np.ndarray,
        rng: np.random.Generator | None = None,
    ) -> Batch:
        """Return rows with each row's ``SHARE`` of ordinary tokens hidden, at least
        one.
        """
        batch = encoded.batch(rows)
        ids = batch["input_ids"].numpy()
        if rng is None:
            generators = [
                np.random.default_rng([_EVALUATION_SEED, int(row)]) for row in rows
            ]
            scores = np.stack([own.random(ids.shape[1]) for own in generators])
            shown = np.full_like(ids, self.mask)
        else:
            scores, fate = rng.random(ids.shape), rng.random(ids.shape)
            words = rng.choice(self.ordinary, ids.shape)
            shown = np.select(
                [fate < MASKED, fate < MASKED + RANDOM], [self.mask, words], ids
            )
        maskable = ~np.isin(ids, self.special) & (batch["attention_mask"].numpy() == 1)
        counts = maskable.sum(axis=1)
        wanted = np.minimum(counts, np.maximum(1, np.rint(SHARE * counts)))
        ranks = (
            np.where(maskable, scores, np.inf)
            .argsort(axis=1, kind="stable")
            .argsort(axis=1)
        )
        hidden = ranks < wanted[:, None]
        inputs, labels = np.where(hidden, shown, ids), np.where(hidden, ids, IGNORED)
        return {
            **batch,
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
        }


class CausalLanguageModelling(LanguageModelling):
    """Prediction of each token of a row from those before it; the token that ends a
    text is included.
    """

    metrics = ("perplexity",)
    shifted = True

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Return the rows with at least two tokens."""
        return rows[encoded.lengths(rows) > 1]

    def batch(
        self,
        encoded: EncodedText,
        rows: np.ndarray,
        rng: np.random.Generator | None = None,
    ) -> Batch:
        """Return rows with the tokens as ``labels``; as in transformers, these are not
        shifted.
        """
        batch = encoded.batch(rows)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return {**batch, "labels": labels}


#: Objectives by task. A new task is added here and to ``TASKS``.
OBJECTIVES: Mapping[TaskName, type[Objective]] = {
    "classification": Classification,
    "mlm": MaskedLanguageModelling,
    "clm": CausalLanguageModelling,
    "ner": TokenClassification,
    "image": Classification,
}
