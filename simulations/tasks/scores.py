"""Scores and losses of predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax, softmax

from fedrot.simulations.data.labels import Kind
from fedrot.temperature import TEMPERATURES

Array: TypeAlias = npt.NDArray[Any]
Score: TypeAlias = Callable[[Array, Array], float]

#: Bins of equal width of the expected calibration error.
_BINS = 15


def evaluate_predictions(
    kind: Kind, metrics: Sequence[str], outputs: Array, labels: Array
) -> dict[str, float]:
    """Score model outputs; the result has ``metrics`` and ``loss``.

    Args:
        kind: decides the loss, in float64: mean cross-entropy (``single``), mean binary cross-entropy
            over rows and classes (``multi``), or mean squared error (``regression``).
        metrics: ``accuracy`` (of whole rows if multi-label), ``macro_f1``, ``micro_f1``, ``f1``
            (of class 1), ``matthews``; ``pearson``, ``spearman`` for regression. Macro F1 averages
            over the classes that occur in labels or predictions. For ``single`` also ``CALIBRATION``:
            ``ece``, the expected calibration error with 15 bins of equal width (Guo et al. 2017,
            equation 3), and ``calibrated_loss``, the loss at the temperature of
            ``fedrot.temperature.TEMPERATURES`` that is best on these same rows.
        outputs: logits ``[n, classes]`` (a multi-label class is predicted if its logit is above 0), or
            predictions ``[n]`` or ``[n, 1]`` for regression.
        labels: int64 ``[n]``, 0/1 ``[n, classes]`` or scores ``[n]``.

    A correlation that is not defined (constant predictions) is 0. All scores are NaN if an output is not
    finite, because the model has diverged.

    Raises ``KeyError`` if a metric is not one of ``kind``.
    """
    outputs = np.asarray(outputs, dtype=np.float64)
    if kind == "regression" and outputs.shape[1:] == (1,):
        outputs = outputs[:, 0]
    functions = {metric: _SCORES[kind][metric] for metric in metrics}
    if not np.isfinite(outputs).all():
        return dict.fromkeys((*metrics, "loss"), math.nan)
    predicted = outputs
    if kind != "regression":
        predicted = np.argmax(outputs, axis=1) if kind == "single" else np.where(outputs > 0, 1, 0)
    scores = {
        metric: score(labels, outputs if metric in CALIBRATION else predicted)
        for metric, score in functions.items()
    }
    return {**scores, "loss": _LOSSES[kind](labels, outputs)}


def entity_scores(
    truth: Sequence[Array], predicted: Sequence[Array], tags: Sequence[str]
) -> dict[str, float]:
    """Score whole entities: micro-averaged ``f1``, ``precision`` and ``recall``.

    An entity is correct if its type, its first and its last word are correct. As in CoNLL's evaluation,
    an ``I-`` that does not continue an entity of its type starts one. Scores without entities are 0.

    ``truth`` and ``predicted`` have int64 ``[words]`` per row: indices of ``tags``, which are BIO, such
    as ``O``, ``B-PER``, ``I-PER``.

    Raises:
        ValueError: two rows differ in length.
    """
    from nervaluate import Evaluator

    named = [[[tags[tag] for tag in row] for row in rows] for rows in (truth, predicted)]
    types = sorted({tag[2:] for tag in tags if tag != "O"})
    strict = Evaluator(*named, types, loader="list").evaluate()["overall"]["strict"]
    return {metric: float(getattr(strict, metric)) for metric in ("f1", "precision", "recall")}


def _cross_entropy(labels: Array, logits: Array) -> float:
    return float(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())


def _sklearn(name: str, **options: Any) -> Score:
    def score(labels: Array, predicted: Array) -> float:
        from sklearn import metrics

        return float(getattr(metrics, name)(labels, predicted, **options))

    return score


def _correlation(name: str) -> Score:
    def score(labels: Array, predictions: Array) -> float:
        from scipy import stats

        if np.ptp(labels) == 0 or np.ptp(predictions) == 0:
            return 0.0
        value = float(getattr(stats, name)(predictions, labels).statistic)
        return value if np.isfinite(value) else 0.0

    return score


def _calibration_error(labels: Array, logits: Array) -> float:
    probabilities = softmax(logits, axis=1)
    confidence, hits = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, weights=hits - confidence, minlength=_BINS)
    return float(np.abs(gaps).sum() / len(labels))


def _calibrated_loss(labels: Array, logits: Array) -> float:
    return min(_cross_entropy(labels, logits / temperature) for temperature in TEMPERATURES)


_OF_CLASSES: Mapping[str, Score] = {
    "accuracy": _sklearn("accuracy_score"),
    "macro_f1": _sklearn("f1_score", average="macro", zero_division=0),
    "micro_f1": _sklearn("f1_score", average="micro", zero_division=0),
    "f1": _sklearn("f1_score", average="binary", zero_division=0),
    "matthews": _sklearn("matthews_corrcoef"),
}
_OF_LOGITS: Mapping[str, Score] = {"ece": _calibration_error, "calibrated_loss": _calibrated_loss}
#: Names of scores that need logits, for single labels.
CALIBRATION = tuple(_OF_LOGITS)
_SCORES: Mapping[Kind, Mapping[str, Score]] = {
    "single": {**_OF_CLASSES, **_OF_LOGITS},
    "multi": _OF_CLASSES,
    "regression": {"pearson": _correlation("pearsonr"), "spearman": _correlation("spearmanr")},
}
_LOSSES: Mapping[Kind, Score] = {
    "single": _cross_entropy,
    "multi": lambda labels, logits: float((np.logaddexp(0.0, logits) - labels * logits).mean()),
    "regression": lambda labels, predictions: float(((predictions - labels) ** 2).mean()),
}
