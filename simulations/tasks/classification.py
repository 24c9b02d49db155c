"""Task ``classification``: the label, labels or score of a text or a pair of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedrot.simulations.data import Names
from fedrot.simulations.scenario import Scenario
from fedrot.simulations.tasks.objective import (
    Batch,
    EncodedData,
    Objective,
    Scores,
    model_inputs,
    shortest_first,
)

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor
    from torch.nn import Module

#: Rows that are evaluated together.
_ROWS = 128


class Classification(Objective):
    """Prediction of a row's label, labels or score.

    If texts are of several domains, each domain has its own labels, and labels that a
    domain lacks (NaN) are left out of loss and scores. The headline metric is then the
    mean macro F1 of the domains, and the loss their mean loss. Domains without an
    evaluated row have no score.
    """

    name = "classification"
    architectures: Names = ("bert", "distilbert", "gpt2", "llama")
    auto_model = "SequenceClassification"
    peft = "SEQ_CLS"
    classifies = True
    reads_pooling = True

    @staticmethod
    def read(scenario: Scenario) -> EncodedData:
        from fedrot.simulations.data.encode import encoded_texts
        from fedrot.simulations.data.texts import load_domains

        return encoded_texts(scenario, load_domains(scenario))

    def loss(self, model: Module, batch: Batch) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        if not self.data.domains:
            return super().loss(model, batch)
        inputs = model_inputs(model, batch)
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        known = ~labels.isnan()
        return binary_cross_entropy_with_logits(logits[known], labels[known])

    def evaluate(
        self,
        model: Module,
        encoded: Any,
        rows: ndarray,
    ) -> Scores:
        import numpy as np

        from fedrot.simulations.tasks.scores import evaluate_predictions

        order = []
        outputs = []
        for places in shortest_first(encoded, rows, _ROWS):
            batch = model_inputs(model, encoded.batch(rows[places]))
            outputs.append(model(**batch).logits.float().numpy())
            order.append(places)
        logits = np.concatenate(outputs)[np.argsort(np.concatenate(order))]
        labels = encoded.labels[rows]
        if self.data.domains:
            return self._by_domain(np.array(encoded.domains)[rows], logits, labels)
        return evaluate_predictions(self.data.kind, self.metrics, logits, labels)

    def _by_domain(
        self,
        domains: ndarray,
        logits: ndarray,
        labels: ndarray,
    ) -> Scores:
        """Return the scores of each domain, and their means.

        ``domains`` has the domain of each row.
        """
        import numpy as np

        from fedrot.simulations.data.texts import MEAN_F1, metric_of
        from fedrot.simulations.tasks.scores import evaluate_predictions

        if not np.isfinite(logits).all():
            return self.diverged()
        scores = {}
        losses = []
        for domain in dict.fromkeys(domains):
            inside = domains == domain
            known = ~np.isnan(labels[inside][0])
            result = evaluate_predictions(
                self.data.kind,
                ("macro_f1",),
                logits[inside][:, known],
                labels[inside][:, known],
            )
            scores[metric_of(domain)] = result["macro_f1"]
            losses.append(result["loss"])
        mean = float(np.mean([*scores.values()]))
        return {MEAN_F1: mean, **scores, "loss": float(np.mean(losses))}
