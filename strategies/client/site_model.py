"""``site_model``: a copy of a model whose head answers with one site's own shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.lora.peft_model import adapter_tensors
from fedrot.strategies.wire.loaded_model import loaded
from fedrot.task_head.fit import with_task_head
from fedrot.task_head.names import (
    adapter_task_head_of,
    task_head_names,
    task_head_of,
)
from fedrot.task_head.outputs import OUTPUT_KINDS, OutputKind, problem_type_of
from fedrot.task_head.site_head import STRENGTH, collect_counts, site_head
from fedrot.tensors import Tensors

Model = TypeVar("Model", bound=nn.Module)

#: Expected shares count as those of so many rows.
_EXPECTED = 1000.0


def site_model(
    model: Model,
    rows: Iterable[Tensors],
    priors: Sequence[float] | None = None,
    *,
    expected: Sequence[float] | None = None,
) -> Model:
    """Return a copy of a model whose task head answers with the site's own shares.

    The head is ``fedrot.task_head.site_head``'s: only its bias changes. This assumes
    that the site's future rows have the label shares of ``rows``; where they do not,
    give the shares that the site expects.

    Args:
        model: a ``transformers`` classifier of all sites, or a PEFT model, of which the
            active adapter has the task head among its ``modules_to_save``.
        rows: the site's training batches, with ``labels``; they stay here.
        priors: shares of classes in the model's bias: ``fedrot-priors`` of a request's
            configuration, ``priors`` of the result of ``fit_task_head`` or of the
            strategy, or from ``class_priors``. None reads
            ``model.config.fedrot["priors"]``. Not needed for a regression.
        expected: shares of classes, or with each label, that the site expects of its
            future rows, ``[outputs]``, in place of those of ``rows``. They count as the
            shares of 1,000 rows: a class with a share of 0 stays possible.

    Returns:
        the copy; its ``config.fedrot["priors"]`` are the shares that are in its bias
        now, those of the site.

    Example: ``site_model(model, training()).save_pretrained("model-of-our-site")``

    Raises:
        FedrotError: the model has no task head, or one without a bias; the priors are
            not known; shares are expected of a regression; or labels are not those of
            the problem.
    """
    copy: Any = deepcopy(model)
    adapted = hasattr(copy, "peft_config")
    tensors = adapter_tensors(copy) if adapted else copy.state_dict()
    name = (
        adapter_task_head_of(tensors) if adapted else task_head_of(copy.config, tensors)
    )
    weight, bias = task_head_names(name)
    if bias not in tensors:
        raise FedrotError(
            f"The layer '{name}' has no bias, as in decoders: a site's shares cannot "
            "be saved in it, and save_pretrained would lose a bias that is added. Add "
            "fedrot.task_head.site_shift(priors, collect_counts(model, rows)) to the "
            "model's logits."
        )
    problem_type = problem_type_of(copy.config)
    kind = OUTPUT_KINDS[problem_type]
    saved = getattr(copy.config, "fedrot", None)
    saved = saved if isinstance(saved, dict) else {}
    if priors is None:
        priors = saved.get("priors") or ()
    try:
        shares = torch.as_tensor(priors, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise FedrotError(
            f"The priors are no list of shares: {priors!r:.80}"
        ) from error
    if not shares.numel() and kind.has_classes:
        raise FedrotError(
            "The shares of classes in the model's bias are not known: give priors=, "
            "from 'fedrot-priors' in the configuration of a request of "
            "FedRot(fit_head=True), from fit_task_head(...).priors, or from "
            "fedrot.strategies.class_priors at the server."
        )
    if expected is None:
        counts = collect_counts(copy, rows, problem_type)
    else:
        counts = _EXPECTED * _shares_of(expected, kind)
    layer = tensors[weight], tensors[bias]
    new = site_head(layer, shares, counts, problem_type)
    loaded(copy, with_task_head(tensors, name, *new))
    if kind.has_classes:
        by_class = counts[-len(shares) :] + STRENGTH * shares
        of_site = by_class / (counts[kind.centres].sum() + STRENGTH)
        copy.config.fedrot = {**saved, "priors": of_site.tolist()}
    return copy


def _shares_of(expected: Sequence[float], kind: OutputKind) -> Tensor:
    """Return the expected counts of one row."""
    shares = torch.as_tensor(expected).double()
    if kind.has_classes and not kind.by_class:
        return nn.functional.pad(shares, (1, 0), value=1.0)
    if not kind.has_classes or abs(float(shares.sum()) - 1) > 0.01:
        raise FedrotError(
            f"The expected shares {expected!r:.80} do not add up to 1, or the model is "
            "a regression, which has no classes: then leave out 'expected'."
        )
    return shares
