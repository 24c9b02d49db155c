"""Language modelling: prediction of masked tokens, or of each next token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from fedrot.simulations.data.encode import IGNORED, Batch, EncodedText, tokenizer_for
from fedrot.simulations.data.read import DataError
from fedrot.simulations.settings import Experiment
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


class LanguageModelling(Objective):
    """Prediction of tokens; labels of the data set are not used.

    The headline metric is the perplexity: ``exp`` of the loss, which is the mean negative log likelihood
    of all predicted tokens of all rows. ``rows_at_once`` rows are evaluated together.
    """

    rows_at_once: ClassVar[int]

    def fixed_batch(self, encoded: EncodedText, rows: np.ndarray) -> Batch:
        """Return rows as inputs and ``labels`` of an evaluation; every call returns the same."""
        return self.batch(encoded, rows, np.random.default_rng(0))

    def at_prediction(self, labels: Tensor) -> Tensor:
        """Return labels ``[rows, tokens]`` at the positions at which they are predicted."""
        return labels

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(*self._predictions(model, batch))

    def evaluate(
        self, model: torch.nn.Module, encoded: EncodedText, rows: np.ndarray
    ) -> dict[str, float]:
        surprise = torch.zeros((), dtype=torch.float64)
        hits = tokens = 0
        for places in shortest_first(encoded, rows, self.rows_at_once):
            logits, labels = self._predictions(model, self.fixed_batch(encoded, rows[places]))
            surprise += cross_entropy(logits.float(), labels, reduction="none").double().sum()
            hits += int((logits.argmax(dim=1) == labels).sum())
            tokens += len(labels)
        loss = surprise / tokens
        if not torch.isfinite(loss):
            return self.diverged()
        found = dict(zip(self.metrics, (float(loss.exp()), hits / tokens), strict=False))
        return {**found, "loss": float(loss)}

    def _predictions(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits ``[labels, vocabulary]`` at labelled tokens, and the labels ``[labels]``."""
        inputs = dict(batch)
        labels = self.at_prediction(inputs.pop("labels"))
        labelled = labels != IGNORED
        with _output_at(model, labelled):
            return model(**model_inputs(model, inputs)).logits.cpu(), labels[labelled]


class MaskedLanguageModelling(LanguageModelling):
    """Prediction of the masked tokens of a row.

    The headline metric is the pseudo-perplexity of Verma & Elbayad (2024), equation 11. Training hides
    tokens as BERT's: 80 % become the mask, 10 % a random ordinary token, 10 % stay. In evaluation all
    become the mask, and every call hides the same tokens of a row of the data set.
    """

    auto_model: ClassVar[str] = "AutoModelForMaskedLM"
    rows_at_once: ClassVar[int] = 64
    metrics = ("pseudo_perplexity", "accuracy")

    def __init__(self, experiment: Experiment, data: Any) -> None:
        super().__init__(experiment, data)
        self.vocabulary = Vocabulary.of(tokenizer_for(experiment))

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Return the rows with an ordinary token; empty texts and unknown characters have none."""
        found = [bool(self._ordinary(encoded.ids[row]).any()) for row in rows]
        return rows[np.array(found, dtype=bool)]

    def batch(self, encoded: EncodedText, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        batch = encoded.batch(rows)
        ids = batch["input_ids"].numpy()
        chosen, fate = self._chosen(batch, rng.random(ids.shape)), rng.random(ids.shape)
        fates = [chosen & (fate < MASKED), chosen & (fate < MASKED + RANDOM)]
        words = rng.choice(self.vocabulary.ordinary, ids.shape)
        return _hidden(batch, chosen, np.select(fates, [self.vocabulary.mask, words], ids))

    def fixed_batch(self, encoded: EncodedText, rows: np.ndarray) -> Batch:
        batch = encoded.batch(rows)
        ids = batch["input_ids"].numpy()
        generators = (np.random.default_rng([_EVALUATION_SEED, int(row)]) for row in rows)
        chosen = self._chosen(batch, np.stack([rng.random(ids.shape[1]) for rng in generators]))
        return _hidden(batch, chosen, np.where(chosen, self.vocabulary.mask, ids))

    def _ordinary(self, ids: Array) -> npt.NDArray[np.bool_]:
        return ~np.isin(ids, self.vocabulary.special)

    def _chosen(self, batch: Batch, scores: Array) -> Array:
        """Return each row's ``SHARE`` of ordinary tokens with the lowest scores, at least one."""
        maskable = self._ordinary(batch["input_ids"].numpy()) & (batch["attention_mask"].numpy() == 1)
        counts = maskable.sum(axis=1)
        wanted = np.minimum(counts, np.maximum(1, np.rint(SHARE * counts)))
        ranks = np.where(maskable, scores, np.inf).argsort(axis=1, kind="stable").argsort(axis=1)
        return ranks < wanted[:, None]


class CausalLanguageModelling(LanguageModelling):
    """Prediction of each token of a row from those before it; the token that ends a text is included."""

    auto_model: ClassVar[str] = "AutoModelForCausalLM"
    #: Every token has logits over the whole vocabulary: 16 rows of a pretrained model need 200 MB.
    rows_at_once: ClassVar[int] = 16
    metrics = ("perplexity",)

    def usable(self, encoded: EncodedText, rows: np.ndarray) -> np.ndarray:
        """Return the rows with at least two tokens."""
        return rows[encoded.lengths(rows) > 1]

    def batch(self, encoded: EncodedText, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        """Return rows with the tokens as ``labels``; as in transformers, these are not shifted."""
        batch = encoded.batch(rows)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return {**batch, "labels": labels}

    def at_prediction(self, labels: Tensor) -> Tensor:
        return pad(labels[:, 1:], (0, 1), value=IGNORED)


def _hidden(batch: Batch, chosen: Array, shown: Array) -> Batch:
    """Return a batch that shows other tokens, and has the chosen ones as labels."""
    labels = np.where(chosen, batch["input_ids"].numpy(), IGNORED)
    return {**batch, "input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}


@contextmanager
def _output_at(model: Any, chosen: Tensor) -> Iterator[None]:
    """Apply the output layer, most of a small model's work, only at the chosen ``[rows, tokens]``."""
    output = model.get_output_embeddings()
    handle = output.register_forward_pre_hook(lambda _, inputs: (inputs[0][chosen],))
    try:
        yield
    finally:
        handle.remove()
