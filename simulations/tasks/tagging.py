"""Task ``ner``: named entities, the tags of words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedrot.simulations.data import IGNORED
from fedrot.simulations.scenario import Scenario
from fedrot.simulations.tasks.objective import (
    EncodedData,
    Objective,
    Scores,
    model_inputs,
    rows_with,
    shortest_first,
)
from fedrot.simulations.tasks.task_registry import register

if TYPE_CHECKING:
    from numpy import ndarray
    from torch.nn import Module

#: Rows that are evaluated together.
_ROWS = 64


@register
class TokenClassification(Objective):
    """Prediction of the tag of every word at its first token.

    The headline metric is the F1 of ``entity_scores``. Words beyond the maximum length
    are left out.
    """

    name = "ner"
    architectures = ("bert", "distilbert")
    auto_model = "TokenClassification"
    # The package has no tagged words.
    usual_data = ""
    peft = "TOKEN_CLS"

    @staticmethod
    def read(scenario: Scenario) -> EncodedData:
        from fedrot.simulations.data.encode import encoded_texts
        from fedrot.simulations.data.texts import load_tags

        return encoded_texts(scenario, load_tags(scenario))

    def usable(self, encoded: Any, rows: ndarray) -> ndarray:
        """Return the rows with a tag to predict.

        Empty rows and unknown characters have none.
        """
        return rows_with(rows, lambda row: (encoded.tags[row] != IGNORED).any())

    def evaluate(
        self,
        model: Module,
        encoded: Any,
        rows: ndarray,
    ) -> Scores:
        import torch
        from torch.nn.functional import cross_entropy

        from fedrot.simulations.tasks.scores import entity_scores

        surprise = torch.zeros((), dtype=torch.float64)
        truth = []
        guesses = []
        for places in shortest_first(encoded, rows, _ROWS):
            inputs = model_inputs(model, encoded.batch(rows[places]))
            targets = encoded.targets(rows[places])
            logits = model(**inputs).logits.double()
            tagged = targets != IGNORED
            surprise += cross_entropy(logits[tagged], targets[tagged], reduction="sum")
            best = logits.argmax(dim=-1)
            for row, words in enumerate(tagged):
                truth.append(targets[row][words].numpy())
                guesses.append(best[row][words].numpy())
        loss = surprise / sum(map(len, truth))
        if not torch.isfinite(loss):
            return self.diverged()
        scores = entity_scores(truth, guesses, self.data.tags)
        return {**scores, "loss": float(loss)}
