"""``site_figures``: what a site's rows say of the model of all, and of a head alone.

Three heads are measured on the same rows: one that the site fits alone, to its own sums
with the first model's body; that of the last model; and the site's own, which is the
same with the site's shares of classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedrot.errors import UpdateError
from fedrot.task_head.choice import (
    SHRINKAGES,
    Candidate,
    reference_among,
    votes_on,
    with_fitted_task_heads,
)
from fedrot.task_head.labelled_rows import labelled_rows
from fedrot.task_head.losses import TEMPERATURES
from fedrot.task_head.outputs import OUTPUT_KINDS, Layer
from fedrot.task_head.site_head import collect_counts, site_shift
from fedrot.task_head.sums import ClassSums, collect_classes
from fedrot.tensors import TensorDict, Tensors

#: How often a site's rows are drawn again.
RESAMPLES = 1000


def site_figures(
    models: Iterator[nn.Module],
    priors: Tensor,
    training: Callable[[], Iterable[Tensors]],
    held_out: Sequence[Tensors],
    test: Sequence[Tensors],
    task_head: str,
    problem_type: str,
) -> TensorDict:
    """Return the figures of a site.

    Args:
        models: yields the first model, then the last one with its head; it may be one
            model with other weights.
        priors: in the head of the last model, see ``site_shift``.
        training: returns the site's training batches.
        held_out: choose shrinkage and temperature of the head alone. Without any it has
            the shrinkage ``REFERENCE``, and no temperature.
        test: rows that are measured.
        task_head: the name of the last linear layer.
        problem_type: one of transformers' problem types.

    Returns:
        ``heads``: of the heads alone, of all, and own, the mean loss, the accuracy and
        the macro F1 over the classes in the rows, ``[3, 3]``; in a regression the last
        two are 0. ``gain``: of a row, own head against alone, the mean and its 95 %
        bootstrap interval: of accuracy, of a regression of the negative loss, ``[3]``.
        ``rows``: numbers of training rows, then of measured rows: all, and those of
        each class or with each label, ``[2, 1 + classes]``; of a regression ``[2, 1]``.

    Example: ``site_figures(iter([first, last]), priors, lambda: batches, [], test,
    "classifier", "single_label_classification")["heads"]``

    Raises:
        FedrotError: there are no training rows, or no measured rows, with labels.
    """
    kind = OUTPUT_KINDS[problem_type]
    first = next(models)
    sums = collect_classes(first, training(), task_head, problem_type)
    layer = _fitted_alone(first, sums, held_out, task_head)
    rows = labelled_rows(first, test, problem_type, task_head)
    pairs = [(linear(inputs.cpu(), *layer), labels.cpu()) for inputs, labels, _ in rows]
    alone, labels = map(torch.cat, zip(*pairs, strict=True))
    last = next(models)
    counts = collect_counts(last, training(), problem_type)
    answers = [answer.cpu() for answer, *_ in labelled_rows(last, test, problem_type)]
    of_all = torch.cat(answers)
    shift = site_shift(priors, counts, problem_type)
    logits = torch.stack([alone, of_all, of_all + shift])
    losses = kind.loss(logits, labels, 1.0).nan_to_num(kind.largest_loss)
    losses = losses.clamp(0, kind.largest_loss)
    predicted = kind.predicted(logits)
    actual = kind.actual(labels, logits.shape[2])
    by_class = actual.sum(0)
    hits = (predicted & actual).sum(1)
    f1 = (2 * hits / (predicted.sum(1) + by_class))[:, by_class > 0]
    scores = kind.right(logits, labels).double()
    figures = [losses.mean(1), scores.mean(1), f1.mean(1).nan_to_num(0)]
    if not kind.has_classes:
        scores = -losses
    trained = counts[len(counts) - len(by_class) :]
    numbers = [[sums.rows, *trained], [len(labels), *by_class]]
    return {
        "heads": torch.stack(figures, 1),
        "gain": mean_and_interval(scores[2] - scores[0]),
        "rows": torch.tensor(numbers),
    }


def _fitted_alone(
    model: nn.Module, sums: ClassSums, held_out: Sequence[Tensors], task_head: str
) -> Layer:
    """Return the head that is fitted to the sums of one site.

    It has a bias, also where the layer has none. Rows of one class, or features that do
    not vary, give a constant: the shares of classes, or the mean.
    """
    bias = sums.kind.constant(sums.counts)
    constant = Candidate("", sums.sums.new_zeros(len(bias), sums.sums.shape[1]), bias)
    candidates = [constant]
    with suppress(UpdateError):
        candidates = with_fitted_task_heads(constant, sums, SHRINKAGES, bias=True)
    taken = reference_among(candidates)
    temperature = 1.0
    if held_out:
        votes = votes_on(candidates, model, held_out, task_head, sums)
        taken = min(candidates, key=votes.at_best)
        temperature = TEMPERATURES[votes.temperature(taken)]
    return taken.weight / temperature, taken.bias / temperature


def mean_and_interval(differences: Tensor) -> Tensor:
    """Return the mean of rows' differences, and its 95 % bootstrap interval.

    The interval has the quantiles of means of rows that are drawn with replacement.
    """
    rows = len(differences)
    values, counts = np.unique(differences.numpy(), return_counts=True)
    random = np.random.default_rng(0)
    # How often each value is drawn.
    drawn = [random.multinomial(rows, counts / rows) @ values for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975]) / rows
    return torch.tensor([differences.mean(), low, high]).double()
