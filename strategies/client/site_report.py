"""Figures of a site: the head of all, its own, and one that it fits alone.

The head alone is fitted to the site's own sums with the first model's body. What is
kept of its answers is small: the report after the last round does not need that body.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedrot.errors import UpdateError
from fedrot.task_head.choice import (
    SHRINKAGES,
    Candidate,
    reference_among,
    with_fitted_task_heads,
)
from fedrot.task_head.labelled_rows import labelled_rows
from fedrot.task_head.losses import TEMPERATURES, TaskHeads, compare_losses, smallest
from fedrot.task_head.outputs import OUTPUT_KINDS, REGRESSION, SEVERAL, SINGLE
from fedrot.task_head.site_head import collect_counts, site_head
from fedrot.task_head.sums import ClassSums, collect_classes
from fedrot.tensors import TensorDict, Tensors

#: How often a site's rows are drawn again.
RESAMPLES = 1000

#: The name of a task head, and a problem type.
HeadKind = tuple[str, str]


def measured(
    model: nn.Module, batches: Iterable[Tensors], heads: TaskHeads, of: HeadKind
) -> TensorDict:
    """Return what task heads answer about rows in place of a model's own.

    Returns:
        ``heads``: of each the mean loss, and unless it is a regression the accuracy and
        the macro F1 over the classes in the rows, ``[heads, 3 or 1]``. ``scores``: of
        each row, 1 if it is right, else 0; of a regression the negative loss ``[heads,
        rows]``. ``labels``: of the rows. ``rows``: their number, and that of each class
        or with each label, ``[1 + classes]``; of a regression ``[1]``.
    """
    task_head, problem_type = of
    kind = OUTPUT_KINDS[problem_type]
    parts = list[tuple[Tensor, Tensor, Tensor]]()
    hits = torch.zeros(())
    for rows, labels, outputs in labelled_rows(model, batches, problem_type, task_head):
        logits = heads.logits(rows, outputs)
        losses = kind.loss(logits, labels, 1.0).nan_to_num(kind.largest_loss)
        losses = losses.clamp(0, kind.largest_loss)
        parts.append((losses.mT, kind.right(logits, labels).mT, labels))
        chosen = kind.predicted(logits)
        # The first target of several labels is 1 for every row.
        first = 0 if kind.by_class else 1
        actual = kind.targets(labels, outputs)[:, first : first + chosen.shape[2]] > 0
        both = torch.stack([chosen & actual, chosen, actual.expand_as(chosen)])
        hits = hits + both.sum(2).cpu()
    losses, right, labels = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    scores = right.double()
    right_of, chosen_of, rows_of = hits.double()
    present = rows_of[0] > 0
    f1 = (2 * right_of / (chosen_of + rows_of))[:, present].mean(1).nan_to_num(0)
    figures = torch.stack([losses.mean(0), scores.mean(0), f1], 1)
    if problem_type == REGRESSION:
        figures, scores = figures[:, :1], -losses
    rows = torch.cat([torch.tensor([len(labels)]), rows_of[0]])
    return {"heads": figures, "scores": scores.mT, "labels": labels, "rows": rows}


def _stacked(heads: Sequence[Candidate[str]]) -> TaskHeads:
    return TaskHeads(
        torch.stack([head.weight for head in heads]),
        torch.stack([head.bias for head in heads]),
        torch.full((len(heads),), -1),
    )


def record_alone(
    model: nn.Module,
    training: Iterable[Tensors],
    held_out: Sequence[Tensors],
    test: Iterable[Tensors],
    of: HeadKind,
) -> TensorDict:
    """Return what the head answers that a site fits alone: see ``measured``.

    ``counts`` are those of the site's sums.

    Args:
        model: the first one.
        held_out: choose shrinkage and temperature; without any it is the shrinkage
            ``REFERENCE``, and no temperature.
        test: rows of the report.

    Raises:
        FedrotError: there are no training rows, or no rows of the report, with labels.
    """
    sums = collect_classes(model, training, *of)
    head = _alone(model, sums, held_out, of)
    answers = measured(model, test, _stacked([head]), of)
    return {name: value.contiguous() for name, value in answers.items()} | {
        "counts": sums.counts
    }


def _alone(
    model: nn.Module, sums: ClassSums, held_out: Sequence[Tensors], of: HeadKind
) -> Candidate[str]:
    """Return the head that is fitted to the sums of one site.

    It has a bias, also where the layer has none. Rows of one class, or features that do
    not vary, give a constant: the shares of classes, or the mean.
    """
    priors = sums.kind.priors(sums.counts)
    outputs = len(sums.absent)
    bias = {
        SINGLE: priors.log(),
        SEVERAL: priors.logit(),
        REGRESSION: sums.counts[1 : 1 + outputs] / sums.rows,
    }[sums.problem_type]
    constant = Candidate("", sums.sums.new_zeros(outputs, sums.sums.shape[1]), bias)
    try:
        heads = with_fitted_task_heads(constant, sums, SHRINKAGES, bias=True)
    except UpdateError:
        return constant
    if not held_out:
        return reference_among(heads)
    task_head, problem_type = of
    losses = compare_losses(
        [model], held_out, task_head, [_stacked(heads)], problem_type
    ).losses
    best = int(losses.amin(1).argmin())
    divisor = TEMPERATURES[smallest(losses[best])]
    return Candidate("", heads[best].weight / divisor, heads[best].bias / divisor)


def site_report(
    model: nn.Module,
    head: Tensors,
    training: Iterable[Tensors],
    test: Iterable[Tensors],
    alone: Tensors,
    of: HeadKind,
) -> TensorDict | None:
    """Return the figures of a site; None if ``alone`` is of other rows.

    Args:
        model: of the last round, with its head.
        head: ``weight`` and ``bias`` of this head, and ``priors``.
        alone: from ``record_alone``.

    Returns:
        ``heads``: those of ``measured``, of the heads alone, of all and own, ``[3, 3 or
        1]``. ``noise``: the 95 % bootstrap interval of the gain of the own head against
        the one alone. ``rows``: training rows, and rows of the report, ``[2, 1 +
        classes]``.
    """
    _, problem_type = of
    kind = OUTPUT_KINDS[problem_type]
    counts = alone["counts"]
    size = counts[kind.centres].sum().reshape(1)
    if problem_type == REGRESSION:
        counts = collect_counts(model, training, problem_type)
    weight, bias = head["weight"], head["bias"]
    _, shifted = site_head((weight, bias), head["priors"], counts, problem_type)
    heads = [Candidate("", weight, bias), Candidate("", weight, shifted)]
    answers = measured(model, test, _stacked(heads), of)
    if not torch.equal(answers["labels"], alone["labels"]):
        return None
    classes = len(answers["rows"]) - 1
    trained = torch.cat([size, counts[len(counts) - classes :]])
    return {
        "heads": torch.cat([alone["heads"], answers["heads"]]),
        "noise": interval(answers["scores"][1] - alone["scores"][0]),
        "rows": torch.stack([trained, answers["rows"]]),
    }


def interval(differences: Tensor) -> Tensor:
    """Return the 95 % bootstrap interval of the mean of rows' differences.

    It has the quantiles of means of rows that are drawn with replacement.
    """
    values, counts = differences.unique(return_counts=True)
    rows = len(differences)
    # How often each value is drawn.
    shares = counts.double().numpy() / rows
    random = np.random.default_rng(0)
    drawn = [
        random.multinomial(rows, shares) @ values.numpy() for _ in range(RESAMPLES)
    ]
    return torch.tensor(np.quantile(drawn, [0.025, 0.975]) / rows)
