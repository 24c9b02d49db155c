"""``site_head``: a task head that answers with the shares of classes of one site.

A fitted head answers for a row that is drawn from all clients. A site's rows have other
shares of classes. If features given the class are the same everywhere, Bayes' rule
turns the one head into the other: only the bias changes. Source: Saerens, Latinne and
Decaestecker, "Adjusting the outputs of a classifier to new a priori probabilities"
(Neural Computation 2002), equation 2.4.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.task_head.labelled_rows import as_batch, labelled_rows, labels_in
from fedrot.task_head.outputs import (
    OUTPUT_KINDS,
    SINGLE,
    Layer,
    OutputKind,
    outputs_of,
    problem_type_of,
)
from fedrot.tensors import Tensors

#: So many rows with the shares of all clients are added to a site's rows.
STRENGTH = 1.0


def site_head(
    head: Layer,
    priors: Tensor,
    counts: Tensor,
    problem_type: str = SINGLE,
    strength: float = STRENGTH,
) -> Layer:
    """Return a task head with ``site_shift`` added to its bias.

    Args:
        head: weight ``[outputs, inputs]`` and bias ``[outputs]``; the weight that is
            returned is the same object, the bias keeps its dtype.
        priors: see ``site_shift``, like the other arguments.
        counts: of the site, from ``collect_counts``.
        problem_type: one of transformers' problem types.
        strength: rows with the shares of all clients.

    Example: ``weight, bias = site_head((weight, bias), priors, counts)``

    Raises:
        FedrotError: see ``site_shift``.
    """
    weight, bias = head
    shift = site_shift(priors, counts, problem_type, strength).to(bias.device)
    return weight, (bias.double() + shift).to(bias.dtype)


def site_shift(
    priors: Tensor,
    counts: Tensor,
    problem_type: str = SINGLE,
    strength: float = STRENGTH,
) -> Tensor:
    """Return what one site adds to the logits of a model of all clients.

    One class a row: ``log(q_c / p_c)``, where ``p_c`` are the ``priors``, ``q_c = (n_c
    + s p_c) / (n + s)`` the shares of the site, and ``s`` the strength. Several labels:
    for each label the difference of this for rows with and without the label.
    Regression: the mean residual of the site's rows, times ``n / (n + s)``; that is no
    Bayes' rule.

    This assumes that future rows of the site have the label shares of the counted ones,
    and that features given the class are alike at all clients. A temperature belongs
    into the head before.

    A site without rows adds 0: it has the model of all clients. A class that it has
    never seen gets ``log(s / (n + s))``. A prior of 0 counts as the smallest that is
    not 0. Counts are the site's own and stay there: rows of classes that it withholds
    from its sums count here.

    Args:
        priors: shares of rows by class, or with each label, in the bias of the model,
            ``[outputs]``. Not used by a regression.
        counts: of the site, from ``collect_counts``.
        problem_type: one of transformers' problem types.
        strength: a number of rows, above 0.

    Returns:
        float64 ``[outputs]``.

    Example: ``site_shift(torch.tensor([.5, .5]), torch.tensor([9., 0.]))`` is
    ``[log(1.9), log(.1)]``.

    Raises:
        FedrotError: the strength is not positive, or priors or counts have another
            shape, are not finite or not of this kind.
    """
    kind = OUTPUT_KINDS[problem_type_of({}, problem_type)]
    priors = torch.as_tensor(priors, dtype=torch.float64).cpu()
    counts = torch.as_tensor(counts, dtype=torch.float64).cpu()
    if not 0 < strength < float("inf"):
        raise FedrotError(f"strength is {strength}; give a number of rows above 0.")
    if not _possible(priors, counts, kind):
        raise FedrotError(
            f"The priors are {priors.tolist()!r:.80}, the counts "
            f"{counts.tolist()!r:.80}. Priors are shares of rows from 0 to 1, one for "
            "each class or label; counts are what collect_counts returns."
        )
    return kind.shift(priors, counts, strength)


def _possible(priors: Tensor, counts: Tensor, kind: OutputKind) -> bool:
    """Return whether priors and counts can be, and are of the same outputs."""
    if priors.ndim != 1 or counts.ndim != 1 or not len(counts):
        return False
    if not kind.has_classes:
        return bool(counts.isfinite().all() & (counts[0] >= 0))
    rows = counts[kind.centres].sum()
    # Comparisons with NaN are false.
    right = ((counts >= 0) & (counts <= rows)).all() & rows.isfinite()
    right &= ((priors >= 0) & (priors <= 1)).all()
    first = 0 if kind.by_class else 1
    return len(priors) + first == len(counts) and bool(right & (priors.any() | first))


def collect_counts(
    model: nn.Module, batches: Iterable[Tensors], problem_type: str | None = None
) -> Tensor:
    """Return what ``site_head`` needs of a site's rows; ``class_priors`` asks for it.

    Args:
        model: a ``transformers`` classifier; it is run for a regression only.
        batches: keyword arguments of the model's forward, with ``labels`` as for
            ``fedrot.task_head.collect_classes``. There may be none.
        problem_type: one of transformers' problem types; None for that of
            ``model.config``.

    Returns:
        float64: rows of each class ``[classes]``; of several labels the number of rows,
        then rows with each label ``[1 + outputs]``; of a regression the number of rows,
        then the sums of the residuals, labels minus logits ``[1 + outputs]``.

    Example: ``counts = collect_counts(model, training_batches)``

    Raises:
        FedrotError: a batch has no labels, or they are not those of the problem.
    """
    name = problem_type_of(model.config, problem_type)
    kind = OUTPUT_KINDS[name]
    outputs = outputs_of(model.config)
    total = torch.zeros(outputs if kind.by_class else 1 + outputs).double()
    for batch in map(as_batch, batches):
        labels = labels_in(batch)
        if kind.has_classes:
            # One class a row, or a row of labels.
            places = labels.shape if kind.by_class else labels.shape[:1]
            shape = (*places, outputs)
            labels = kind.check_labels(labels, torch.empty(()).expand(shape))
            targets = kind.targets(labels[kind.has_label(labels)], outputs)
        elif bool(kind.has_label(labels).any()):
            ((logits, labels, _),) = labelled_rows(model, [batch], name)
            targets = nn.functional.pad(labels - logits, (1, 0), value=1.0)
        else:
            continue
        total += targets.sum(0).cpu()
    return total
