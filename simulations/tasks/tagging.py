"""Task ``ner``: named entities, the tags of words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedrot.simulations.data import IGNORED
from fedrot.simulations.scenario import Scenario
from fedrot.simulations.tasks.objective import (
    EncodedData,
    OfTokens,
    Scores,
    rows_with,
)

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor


class TokenClassification(OfTokens):
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
    together = 64

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

    def scores(self, loss: Tensor, truth: Any, guesses: Any) -> Scores:
        from fedrot.simulations.tasks.scores import entity_scores

        return entity_scores(truth, guesses, self.data.tags)
