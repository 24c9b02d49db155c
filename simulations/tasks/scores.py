"""Scores and losses of predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy import ndarray
from scipy.special import log_softmax, softmax

from fedrot.simulations.scenario import Kind
from fedrot.simulations.tasks.objective import Scores
from fedrot.task_head.losses import TEMPERATURES


def evaluate_predictions(
    kind: Kind,
    metrics: Sequence[str],
    outputs: ndarray,
    labels: ndarray,
) -> Scores:
    """Score model outputs; the result has ``metrics`` and ``loss``.

    Args:
        kind: decides the loss, in float64: mean cross-entropy (``single``), mean binary
            cross-entropy over rows and classes (``multi``), or mean squared error
            (``regression``).
        metrics: ``accuracy`` (of whole rows if multi-label), ``macro_f1`` over the
            classes that occur in labels or predictions, ``micro_f1``; ``pearson``,
            ``spearman`` for regression. For ``single`` also ``ece``, the expected
            calibration error with 15 bins of equal width (Guo et al. 2017, equation 3),
            and ``calibrated_loss``, the loss at that of ``TEMPERATURES`` that is best
            on these same rows.
        outputs: logits ``[n, classes]`` (a multi-label class is predicted if its logit
            is above 0), or predictions ``[n]`` or ``[n, 1]`` for regression.
        labels: int64 ``[n]``, 0/1 ``[n, classes]`` or scores ``[n]``.

    A correlation that is not defined (constant predictions) is 0. All scores are NaN if
    an output is not finite, because the model has diverged. Raises ``ValueError`` if
    shapes do not fit.
    """
    from pandas import DataFrame
    from sklearn.metrics import accuracy_score, f1_score

    outputs = np.asarray(outputs, dtype=np.float64)
    if kind == "regression":
        outputs = outputs.reshape(labels.shape)
    if not np.isfinite(outputs).all():
        return dict.fromkeys((*metrics, "loss"), math.nan)
    if kind == "single":
        predicted = outputs.argmax(axis=1)
    else:
        predicted = np.where(outputs > 0, 1, 0)

    def f1(average: str) -> float:
        return f1_score(labels, predicted, average=average, zero_division=0)

    def correlation(method: Literal["pearson", "spearman"]) -> float:
        pairs = DataFrame({"labels": labels, "outputs": outputs})
        return np.nan_to_num(pairs.corr(method).loc["labels", "outputs"])

    functions = {
        "accuracy": lambda: accuracy_score(labels, predicted),
        "macro_f1": lambda: f1("macro"),
        "micro_f1": lambda: f1("micro"),
        "pearson": lambda: correlation("pearson"),
        "spearman": lambda: correlation("spearman"),
        "ece": lambda: _calibration_error(labels, outputs),
        "calibrated_loss": lambda: min(
            _loss(kind, labels, outputs / value) for value in TEMPERATURES
        ),
        "loss": lambda: _loss(kind, labels, outputs),
    }
    return {name: float(functions[name]()) for name in (*metrics, "loss")}


def entity_scores(
    truth: Sequence[ndarray],
    predicted: Sequence[ndarray],
    tags: Sequence[str],
) -> Scores:
    """Score whole entities: micro-averaged ``f1``, ``precision`` and ``recall``.

    An entity is correct if its type, its first and its last word are correct. As in
    CoNLL's evaluation, an ``I-`` that does not continue an entity of its type starts
    one. Scores without entities are 0.

    ``truth`` and ``predicted`` have int64 ``[words]`` per row: indices of ``tags``,
    which are BIO, such as ``O``, ``B-PER``, ``I-PER``.
    """
    from nervaluate import Evaluator

    evaluator = Evaluator(
        [[tags[tag] for tag in row] for row in truth],
        [[tags[tag] for tag in row] for row in predicted],
        sorted({tag[2:] for tag in tags if tag != "O"}),
        loader="list",
    )
    strict = evaluator.evaluate()["overall"]["strict"]
    names = ("f1", "precision", "recall")
    return {name: float(getattr(strict, name)) for name in names}


def _loss(
    kind: Kind,
    labels: ndarray,
    outputs: ndarray,
) -> float:
    if kind == "regression":
        losses = (outputs - labels) ** 2
    elif kind == "multi":
        losses = np.logaddexp(0.0, outputs) - labels * outputs
    else:
        rows = np.arange(len(labels))
        losses = -log_softmax(outputs, axis=1)[rows, labels]
    return losses.mean()


def _calibration_error(labels: ndarray, logits: ndarray) -> float:
    probabilities = softmax(logits, axis=1)
    confidence = probabilities.max(axis=1)
    hits = probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = np.bincount(bins, weights=hits - confidence)
    return np.abs(gaps).sum() / len(labels)
