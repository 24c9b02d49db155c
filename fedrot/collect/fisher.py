"""Collection of the diagonal Fisher information of a model on a client's data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Module

from fedrot.collect.hooks import evaluating
from fedrot.collect.random_inputs import forward_inputs
from fedrot.collect.statistics import FISHER, Collected, collects
from fedrot.errors import FedrotError
from fedrot.tensors import Tensors, compute_dtype

#: With more labels than this, the expectation over the labels is sampled.
EXACT_LABELS = 8


@collects(FISHER)
def collect_fisher(
    model: Module,
    batches: Iterable[Tensors],
    *,
    labels: Literal["model", "data"] = "model",
    max_rows: int | None = 256,
    seed: int = 0,
) -> Collected:
    """Return the diagonal Fisher information of every parameter.

    The result is ``{"fisher": {name: F}}``. ``F = E_x E_{y ~ p(y|x)} (grad log
    p(y|x))^2``, the mean over rows (Jin et al. 2023, section 3.1; Matena & Raffel
    2021), in the parameter's shape, float64 for float64 models, else float32. Tied
    parameters share one tensor.

    ``y`` is one label, several labels, or a score with unit variance, after the
    configuration's ``problem_type`` and ``num_labels``. The expectation over ``y`` is
    exact for up to ``EXACT_LABELS`` labels; with more, one label is sampled per row.
    For logits ``[rows, tokens, classes]``, a class is sampled for every token in
    ``attention_mask`` (encoder-decoders: ``decoder_attention_mask``).

    Args:
        model: a ``transformers`` model whose output has ``logits``; it is run in
            evaluation mode, and its mode is restored.
        batches: keyword arguments of forward; with ``labels`` if ``labels="data"``.
        labels: ``model`` for the expectation over the model's own labels, ``data`` for
            the empirical Fisher.
        max_rows: maximum number of rows, None for all; each row costs a backward pass
            per label.
        seed: of the sampled labels.

    Raises:
        FedrotError: no batch, an unknown choice of ``labels``, no ``labels`` in the
            batches although ``labels="data"``, or no logits in the model's output.
    """
    if labels not in ("model", "data"):
        raise FedrotError(f"labels is '{labels}'; choose from model, data.")
    generator = torch.Generator().manual_seed(seed)
    named = model.named_parameters(remove_duplicate=False)
    trained = {name: parameter for name, parameter in named if parameter.requires_grad}
    if not trained:
        raise FedrotError(
            "No parameter of the model is trained: requires_grad is false for all."
        )
    # Tied parameters share one sum.
    sums = {p: torch.zeros_like(p, dtype=compute_dtype(p)) for p in trained.values()}
    rows = 0
    with torch.enable_grad(), evaluating(model):
        for row in islice(_rows(batches), max_rows):
            rows += 1
            if labels == "data" and "labels" not in row:
                raise FedrotError("The empirical Fisher needs 'labels' in the batches.")
            inputs = forward_inputs(model, row)
            logits = getattr(model(**inputs), "logits", None)
            if logits is None:
                raise FedrotError(
                    f"The output of {type(model).__name__} has no logits. Compute the "
                    "Fisher information of a model with one task head."
                )
            likelihoods = _log_likelihoods(
                model,
                logits,
                {**row, **inputs},
                labels,
                generator,
            )
            for share, likelihood in likelihoods:
                gradients = torch.autograd.grad(
                    likelihood,
                    list(sums),
                    retain_graph=True,
                    allow_unused=True,
                )
                for total, gradient in zip(sums.values(), gradients, strict=True):
                    if gradient is not None:
                        gradient = gradient.to(total)
                        total.addcmul_(gradient, gradient, value=share)
    if not rows:
        raise FedrotError(
            "No rows were given; pass at least one batch. An iterator that was read "
            "before has none."
        )
    for total in sums.values():
        total.div_(rows)
    return {FISHER: {name: sums[parameter] for name, parameter in trained.items()}}


def _rows(batches: Iterable[Tensors]) -> Iterator[Tensors]:
    for batch in batches:
        for i in range(len(next(iter(batch.values())))):
            yield {name: value[i : i + 1] for name, value in batch.items()}


def _log_likelihoods(
    model: Module,
    logits: Tensor,
    row: Tensors,
    labels: str,
    generator: torch.Generator,
) -> list[tuple[float, Tensor]]:
    """Return pairs ``(p, f)`` with ``sum p (grad f)^2`` equal to one row's expectation.

    For one label per row, they are the probability and the log likelihood of each
    label.
    """
    config: Any = model.config
    architecture = type(model).__name__
    z = logits[0].to(compute_dtype(logits))
    label = row["labels"][0] if labels == "data" else None
    if z.ndim == 2:
        # Decoders predict the next token.
        if label is not None and architecture.endswith(("LMHeadModel", "ForCausalLM")):
            z = z[:-1]
            label = label[1:]
        mask = "attention_mask"
        if getattr(config, "is_encoder_decoder", False):
            mask = "decoder_attention_mask"
        return [(1.0, _of_tokens(z, label, row.get(mask), generator))]
    problem_type = getattr(config, "problem_type", None) or _guessed_type(z, label)
    # This model labels every token, with one logit for each.
    if architecture == "ElectraForPreTraining":
        problem_type = "multi_label_classification"
        if "attention_mask" in row:
            counted = row["attention_mask"][0].bool()
            z = z[counted]
            if label is not None:
                label = label[counted]
    if label is not None:
        return [(1.0, _of_data(problem_type, z, label))]
    if problem_type == "regression":
        # d log N(y; z, 1) = (y - z) dz, and (y - z)^2 is 1 in expectation.
        return [(1.0, value) for value in z]
    if problem_type == "multi_label_classification":
        p = z.detach().sigmoid()
        if len(p) > EXACT_LABELS:
            drawn = torch.bernoulli(p.cpu(), generator=generator).to(z)
            return [(1.0, _of_data(problem_type, z, drawn))]
        return list(zip((p * (1 - p)).tolist(), z, strict=True))
    likelihoods = z.log_softmax(0)
    p = likelihoods.detach().exp()
    if len(p) <= EXACT_LABELS:
        return list(zip(p.tolist(), likelihoods, strict=True))
    drawn = torch.multinomial(p.cpu(), 1, generator=generator)
    return [(1.0, likelihoods[int(drawn)])]


def _guessed_type(
    z: Tensor,
    label: Tensor | None,
) -> str:
    """Return the ``problem_type`` that transformers would choose."""
    if len(z) == 1:
        return "regression"
    if label is not None and label.is_floating_point():
        return "multi_label_classification"
    return "single_label_classification"


def _of_data(
    problem_type: str,
    z: Tensor,
    label: Tensor,
) -> Tensor:
    """Return the log likelihood of a label, up to a constant."""
    if problem_type == "regression":
        return -((label.reshape(-1).to(z) - z) ** 2).sum() / 2
    if problem_type == "multi_label_classification":
        return (label.to(z) * z - nn.functional.softplus(z)).sum()
    return z.log_softmax(0)[int(label)]


def _of_tokens(
    z: Tensor,
    label: Tensor | None,
    mask: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """Return the log likelihood of a class per token.

    ``z`` are logits ``[tokens, classes]``. The classes are sampled if ``label`` is
    None; otherwise tokens with a negative label are left out.
    """
    likelihoods = z.log_softmax(-1)
    if label is None:
        p = likelihoods.detach().exp().cpu()
        chosen = torch.multinomial(p, 1, generator=generator)[:, 0].to(z.device)
    else:
        chosen = label.long()
    picked = likelihoods.gather(1, chosen.clamp_min(0)[:, None])[:, 0]
    if label is None and mask is not None:
        return picked[mask[0].bool()].sum()
    # Tokens without a label (-100) are left out; a sample has none.
    return picked[chosen >= 0].sum()
