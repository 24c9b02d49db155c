"""Language modelling: prediction of masked tokens, or of each next token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
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
from fedrot.simulations.data.sources import DataError
from fedrot.simulations.data.texts import TextData
from fedrot.simulations.tasks.objective import Objective, model_inputs, shortest_first

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Array: TypeAlias = npt.NDArray[Any]


#: Share of a row's ordinary tokens that is predicted; at least one token is.
SHARE = 0.15
#: In training, the shares of predicted tokens that are replaced by the mask and by a random token.
MASKED, RANDOM = 0.8, 0.1
MASK_TOKENS = ("[MASK]", "<mask>")
_EVALUATION_SEED = 15


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a tokenizer: the mask token, special tokens (with it) and ordinary tokens."""

    mask: int
    special: Array
    ordinary: Array

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Read a tokenizer; raises ``DataError`` if it has no mask token."""
        vocabulary = tokenizer.get_vocab()
        mask = next((vocabulary[token] for token in MASK_TOKENS if token in vocabulary), None)
        if mask is None:
            raise DataError(
                f"the model's tokenizer has no mask token ({' or '.join(MASK_TOKENS)}), which task "
                "'mlm' needs; choose another model, or task 'classification'"
            )
        added = tokenizer.get_added_tokens_decoder()
        special = np.array(sorted({mask, *(id_ for id_, token in added.items() if token.special)}))
        return cls(mask, special, np.setdiff1d(list(vocabulary.values()), special))

    def maskable(self, ids: Array) -> npt.NDArray[np.bool_]:
        """Return where ``ids`` are ordinary tokens; padding is a special token."""
        return ~np.isin(ids, self.special)


@dataclass(frozen=True)
class MaskedLanguageModelling(Objective):
    """Prediction of the masked tokens of a row; labels of the data set are not used.

    The headline metric is the pseudo-perplexity of Verma & Elbayad (2024), equation 11: ``exp`` of
    the loss, which is the mean negative log likelihood of the masked tokens.
    """

    auto_model: ClassVar[str] = "AutoModelForMaskedLM"
    reader: ClassVar[Reader] = TEXT

    vocabulary: Vocabulary
    metrics: tuple[str, ...] = ("pseudo_perplexity", "accuracy")

    @classmethod
    def of(cls, config: SimulationConfig, data: TextData) -> MaskedLanguageModelling:
        return cls(Vocabulary.of(tokenizer_for(config)))

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Return the rows with an ordinary token; empty texts and unknown characters have none."""
        found = [bool(self.vocabulary.maskable(encoded.ids[row]).any()) for row in rows]
        return rows[np.array(found, dtype=bool)]

    def batch(self, encoded: EncodedText, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        return _hiding(encoded, rows, lambda ids, text: for_training(ids, text, self.vocabulary, rng))

    def fixed_batch(self, encoded: EncodedText, rows: np.ndarray) -> Batch:
        """Return rows as inputs and ``labels`` of an evaluation; every call returns the same."""
        return _hiding(encoded, rows, lambda ids, text: for_evaluation(ids, text, self.vocabulary, rows))

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(*_predictions(model, batch))

    def evaluate(
        self, model: torch.nn.Module, encoded: EncodedText, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        hits = tokens = 0
        for places in shortest_first(encoded, rows, 64):
            logits, labels = _predictions(model, self.fixed_batch(encoded, rows[places]))
            surprise += cross_entropy(logits.double(), labels, reduction="sum")
            hits += int((logits.argmax(dim=1) == labels).sum())
            tokens += len(labels)
        return _scores(self, surprise / tokens, accuracy=hits / tokens)


@dataclass(frozen=True)
class CausalLanguageModelling(Objective):
    """Prediction of each token of a row from those before it; labels of the data set are not used.

    The headline metric is the perplexity: ``exp`` of the loss, which is the mean negative log likelihood
    of all tokens of all rows except the first token of each; the token that ends a text is included.
    """

    auto_model: ClassVar[str] = "AutoModelForCausalLM"
    reader: ClassVar[Reader] = TEXT

    metrics: tuple[str, ...] = ("perplexity",)

    @classmethod
    def of(cls, config: SimulationConfig, data: TextData) -> CausalLanguageModelling:
        return cls()

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Return the rows with at least two tokens."""
        return rows[encoded.lengths(rows) > 1]

    def batch(self, encoded: EncodedText, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        """Return rows with the tokens as ``labels``; as in transformers, these are not shifted."""
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
        # Every token has logits over the whole vocabulary: 16 rows of a pretrained model need 200 MB.
        for places in shortest_first(encoded, rows, 16):
            batch = _shifted(self.batch(encoded, rows[places], unused))
            logits, labels = _predictions(model, batch)
            surprise += cross_entropy(logits.float(), labels, reduction="none").double().sum()
            tokens += len(labels)
        return _scores(self, surprise / tokens)


def _scores(objective: Objective, loss: Tensor, **others: float) -> dict[str, float]:
    """Return the perplexity (the headline metric), the other metrics and the loss."""
    if not torch.isfinite(loss):
        return objective.diverged()
    return {objective.metrics[0]: float(loss.exp()), **others, "loss": float(loss)}


def _shifted(batch: Batch) -> Batch:
    """Shift the labels by one, to the position at which a token is predicted."""
    return {**batch, "labels": pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)}


def _hiding(
    encoded: EncodedText, rows: np.ndarray, hide: Callable[[Array, Array], tuple[Array, Array]]
) -> Batch:
    batch = encoded.batch(rows)
    shown, labels = hide(batch["input_ids"].numpy(), batch["attention_mask"].numpy())
    return {**batch, "input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}


def _predictions(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the logits ``[labels, vocabulary]`` at labelled tokens, and the labels ``[labels]``."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    labelled = labels != IGNORED
    with _output_at(model, labelled):
        return model(**model_inputs(model, inputs)).logits, labels[labelled]


@contextmanager
def _output_at(model: Any, chosen: Tensor) -> Iterator[None]:
    """Apply the output layer, most of a small model's work, only at the chosen ``[rows, tokens]``."""
    output = model.get_output_embeddings()
    handle = output.register_forward_pre_hook(lambda _, inputs: (inputs[0][chosen],))
    try:
        yield
    finally:
        handle.remove()


def for_training(
    ids: Array, attended: Array, vocabulary: Vocabulary, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Mask tokens as in BERT: 80 % become the mask, 10 % a random ordinary token, 10 % stay.

    ``ids`` are ``[rows, tokens]``; ``attended`` is 1 at text and 0 at padding. Returns the input ids,
    and the labels, which are ``IGNORED`` at tokens that are not predicted.
    """
    chosen = _chosen(vocabulary.maskable(ids) & (attended == 1), rng.random(ids.shape))
    fate = rng.random(ids.shape)
    shown = np.select(
        [chosen & (fate < MASKED), chosen & (fate < MASKED + RANDOM)],
        [vocabulary.mask, rng.choice(vocabulary.ordinary, ids.shape)],
        ids,
    )
    return shown, np.where(chosen, ids, IGNORED)


def for_evaluation(
    ids: Array, attended: Array, vocabulary: Vocabulary, rows: Array
) -> tuple[Array, Array]:
    """Replace tokens by the mask; for a row of the data set, every call chooses the same tokens.

    ``rows`` are the numbers of the rows in the data set. All else is as in ``for_training``.
    """
    scores = np.stack(
        [np.random.default_rng([_EVALUATION_SEED, int(row)]).random(ids.shape[1]) for row in rows]
    )
    chosen = _chosen(vocabulary.maskable(ids) & (attended == 1), scores)
    return np.where(chosen, vocabulary.mask, ids), np.where(chosen, ids, IGNORED)


def _chosen(maskable: Array, scores: Array) -> Array:
    """Return each row's ``SHARE`` of maskable tokens with the lowest scores, at least one, as a mask."""
    counts = maskable.sum(axis=1)
    wanted = np.minimum(counts, np.maximum(1, np.rint(SHARE * counts)))
    ranks = np.where(maskable, scores, np.inf).argsort(axis=1, kind="stable").argsort(axis=1)
    return ranks < wanted[:, None]
