"""Tasks ``mlm`` and ``clm``: language modelling, masked and causal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedrot.errors import FedrotError
from fedrot.simulations.data import IGNORED
from fedrot.simulations.scenario import Scenario
from fedrot.simulations.tasks.objective import (
    Batch,
    EncodedData,
    OfTokens,
    Scores,
    rows_with,
)

if TYPE_CHECKING:
    from numpy import ndarray
    from numpy.random import Generator
    from torch import Tensor
    from torch.nn import Module

#: Share of a row's ordinary tokens that is predicted; at least one token is.
SHARE = 0.15
#: In training, the share of predicted tokens that are replaced by the mask.
MASKED = 0.8
#: In training, the share of predicted tokens that are replaced by a random token.
RANDOM = 0.1
_EVALUATION_SEED = 15


class LanguageModelling(OfTokens):
    """Prediction of tokens; labels of the data set are not used.

    The headline metric is the perplexity: ``exp`` of the loss, which is the mean
    negative log likelihood of all predicted tokens of all rows.
    """

    uses_labels = False
    # As a pretrained decoder's logits, 16 rows need 200 MB.
    together = 16

    @staticmethod
    def read(scenario: Scenario) -> EncodedData:
        from fedrot.simulations.data.encode import encoded_texts
        from fedrot.simulations.data.texts import load_texts

        return encoded_texts(scenario, load_texts(scenario))

    def loss(self, model: Module, batch: Batch) -> Tensor:
        from torch.nn.functional import cross_entropy

        logits, labels, _ = self.predictions(model, batch)
        return cross_entropy(logits, labels)

    def scores(self, loss: Tensor, truth: Any, guesses: Any) -> Scores:
        import numpy as np

        hits = np.concatenate(truth) == np.concatenate(guesses)
        values = (float(loss.exp()), float(hits.mean()))
        # A causal model has no accuracy among its metrics.
        return dict(zip(self.metrics, values, strict=False))

    def logits_at(self, labelled: Tensor, model: Any, inputs: Batch) -> Tensor:
        # The output layer, most of a small model's work, is applied only there.
        output = model.get_output_embeddings()
        with output.register_forward_pre_hook(lambda _, states: (states[0][labelled],)):
            return model(**inputs).logits


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

    name = "mlm"
    architectures = ("bert", "distilbert")
    auto_model = "MaskedLM"
    metrics = ("pseudo_perplexity", "accuracy")

    def __init__(self, scenario: Scenario, data: Any) -> None:
        import numpy as np

        from fedrot.simulations.data.read import DataError
        from fedrot.simulations.data.tokenizers import tokenizer_for
        from fedrot.simulations.models import settings_of

        super().__init__(scenario, data)
        tokenizer = tokenizer_for(scenario)
        vocabulary = tokenizer.get_vocab()
        mask = vocabulary.get("[MASK]", vocabulary.get("<mask>"))
        if mask is None:
            raise DataError(
                "the model's tokenizer has no mask token ([MASK] or <mask>), which "
                "task 'mlm' needs; choose another model, or task 'classification'"
            )
        self.mask = mask
        added = tokenizer.get_added_tokens_decoder().items()
        special = [number for number, token in added if token.special]
        self.special = np.unique([mask, *special])
        ordinary = np.setdiff1d([*vocabulary.values()], self.special)
        # A tokenizer may have tokens without an embedding.
        embedded = ordinary < settings_of(scenario, data).vocab_size
        self.ordinary = ordinary[embedded]

    def usable(self, encoded: Any, rows: ndarray) -> ndarray:
        """Return the rows with an ordinary token.

        Empty texts and unknown characters have none.
        """
        special = {*self.special}
        return rows_with(rows, lambda row: not special.issuperset(encoded.ids[row]))

    def batch(
        self,
        encoded: Any,
        rows: ndarray,
        rng: Generator | None = None,
    ) -> Batch:
        """Return rows with a ``SHARE`` of ordinary tokens hidden, at least one."""
        import numpy as np
        import torch

        batch = encoded.batch(rows)
        ids = batch["input_ids"].numpy()
        if rng is None:
            # A row's own generator: what is hidden does not depend on the batch.
            generators = [
                np.random.default_rng([_EVALUATION_SEED, row]) for row in rows
            ]
            scores = np.stack([each.random(ids.shape[1]) for each in generators])
            shown = np.full_like(ids, self.mask)
        else:
            scores = rng.random(ids.shape)
            fate = rng.random(ids.shape)
            words = rng.choice(self.ordinary, ids.shape)
            fates = [fate < MASKED, fate < MASKED + RANDOM]
            shown = np.select(fates, [self.mask, words], ids)
        padding = batch["attention_mask"].numpy() != 1
        fixed = np.isin(ids, self.special) | padding
        counts = (~fixed).sum(axis=1)
        # At least one, if there is one.
        wanted = np.clip(np.rint(SHARE * counts), 1, counts)
        order = np.where(fixed, np.inf, scores).argsort(axis=1, kind="stable")
        ranks = order.argsort(axis=1)
        hidden = ranks < wanted[:, None]
        inputs = np.where(hidden, shown, ids)
        labels = np.where(hidden, ids, IGNORED)
        return {
            **batch,
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
        }


class CausalLanguageModelling(LanguageModelling):
    """Prediction of each token of a row from those before it.

    The token that ends a text is predicted, too.
    """

    name = "clm"
    architectures = ("gpt2", "llama")
    auto_model = "CausalLM"
    peft = "CAUSAL_LM"
    metrics = ("perplexity",)
    shifted = True

    def usable(self, encoded: Any, rows: ndarray) -> ndarray:
        """Return the rows with at least two tokens."""
        return rows[encoded.lengths(rows) > 1]

    def batch(
        self,
        encoded: Any,
        rows: ndarray,
        rng: Generator | None = None,
    ) -> Batch:
        """Return rows with the tokens as ``labels``.

        As in transformers, these are not shifted.
        """
        batch = encoded.batch(rows)
        padding = batch["attention_mask"] == 0
        return {**batch, "labels": batch["input_ids"].masked_fill(padding, IGNORED)}

    def check(self, model: Module, name: str, batch: Batch) -> None:
        """Raise ``FedrotError`` if the first token's outputs depend on later tokens."""
        import torch

        ids = batch["input_ids"]
        with torch.no_grad():
            whole, alone = (
                model(input_ids=ids[:, :tokens]).logits[0, 0] for tokens in (4, 1)
            )
        difference = (whole - alone).abs().max()
        if difference > 1e-5 * alone.abs().max():
            raise FedrotError(
                f"model '{name}' is an encoder: its outputs depend on the tokens that "
                "task 'clm' predicts; choose a decoder, or task 'mlm'"
            )
