"""What a client can say about its weights beside the weights: Gram matrices and Fisher information.

Statistics are dictionaries by kind, then by tensor name (``Statistics``). They move with the weights
(``Alignment.transport``) and weigh them when they are merged (``fedrot.aggregation``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedrot.aggregation.statistics import FISHER, GRAMS, INPUT_AXIS, TRAINED, Statistics, along_rows
from fedrot.errors import FedrotError, UpdateError
from fedrot.matching.activations import evaluating, without_padding
from fedrot.matching.blocks import compute_dtype
from fedrot.symmetry.description import Symmetry
from fedrot.symmetry.kinds import HeadRotation
from fedrot.validation import check_update

Batch = Mapping[str, Tensor]

GramForm = Literal["full", "heads", "diagonal"]
GRAM_FORMS = ("full", "heads", "diagonal")

#: With more labels than this, the expectation over a model's own labels is sampled.
EXACT_LABELS = 8


def _input_axis(module: nn.Module) -> int | None:
    """Return the axis of a module's weight that its input is contracted with, None if there is none."""
    if isinstance(module, nn.Linear):
        return 1
    # transformers' Conv1D, which this package does not import.
    return 0 if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def _readers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Return the linear modules by the name of their weight, those with a weight of their own only.

    A weight that is also an embedding's, or shared by layers with different inputs, is no linear
    regression on one input: it is averaged.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found = {}
    for name, module in model.named_modules():
        axis = _input_axis(module)
        weight: Any = module.weight if axis is not None else None
        if axis is not None and uses[id(weight)] == 1:
            found[f"{name}.weight"] = (module, axis)
    return found


def collect_gram(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    max_batches: int = 100,
    form: GramForm = "full",
    symmetry: Symmetry | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Return the Gram matrix of the inputs of every linear layer (Jin et al. 2023, section 3.3).

    ``{"gram": {weight: G}}``, or ``gram_conv1d`` for ``Conv1D``. ``G = X^T X / n`` over the ``n`` tokens
    that ``attention_mask`` shows, uncentred, float32 ``[in, in]`` (sums over batches are float64).
    Layers that read one and the same input (query, key and value) hold one and the same matrix. Weights
    that share their values with another module (output embeddings) have none.

    Args:
        model: any ``torch`` model of ``Linear`` or ``Conv1D`` layers; it is run in evaluation mode and
            without gradients, and left as it was.
        batches: keyword arguments of the model's forward; ``labels`` are not passed on.
        max_batches: batches read at most; Jin et al., Table 6, find no gain beyond 100.
        form: what is kept, see ``compressed``.
        symmetry: needed for the form ``heads``.

    Raises:
        FedrotError: no batch, no such layer, or an unknown form.
    """
    _check_form(form, symmetry)
    readers = _readers(model)
    count: dict[str, int] = {}
    sums: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    inputs: dict[str, Tensor] = {}
    mask: Tensor | None = None

    def seen(name: str, tensor: Tensor) -> None:
        first = next((other for other, read in inputs.items() if read is tensor), name)
        # An input counts as shared only if it has been so in every batch.
        if same.setdefault(name, first) != first:
            other = same[name] if first == name else first
            raise FedrotError(
                f"The layers '{name}' and '{other}' read one input in some batches only; collect their "
                "statistics from batches that take the same path through the model."
            )
        inputs[name] = tensor
        if first != name:
            return
        rows = without_padding(tensor, mask).float()
        product = (rows.mT @ rows).double()
        sums[name] = sums[name].add_(product) if name in sums else product
        count[name] = count.get(name, 0) + len(rows)

    with ExitStack() as stack, torch.no_grad(), evaluating(model):
        for name, (module, _) in readers.items():
            handle = module.register_forward_pre_hook(
                lambda _module, args, kwargs, name=name: seen(name, *args, *kwargs.values()),
                with_kwargs=True,
            )
            stack.callback(handle.remove)
        for batch in islice(batches, max_batches):
            mask = batch.get("attention_mask")
            inputs.clear()
            model(**{k: v for k, v in batch.items() if k != "labels"})
    if not sums:
        raise FedrotError(
            "No inputs of linear layers were seen: pass at least one batch and a model with Linear or "
            "Conv1D layers."
        )
    grams = {name: (total / max(count[name], 1)).float() for name, total in sums.items()}
    found: dict[str, dict[str, Tensor]] = {}
    for name, first in same.items():
        found.setdefault(GRAMS[readers[name][1]], {})[name] = grams[first]
    return compressed(found, form, symmetry)


def compressed(
    statistics: Statistics, form: GramForm, symmetry: Symmetry | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return cheaper forms of Gram matrices; other kinds of statistics stay as they are.

    Args:
        statistics: with full Gram matrices ``[n, n]``.
        form: ``full`` keeps them. ``heads`` keeps the blocks ``[heads, d, d]`` of each head where the
            input is the heads' outputs, and diagonals ``[n]`` elsewhere: it can follow every
            rotation and permutation. ``diagonal`` keeps diagonals ``[n]``, which cannot follow a
            rotation.
        symmetry: says where heads' outputs are read; needed for ``heads``.

    Raises:
        FedrotError: the form is unknown, ``heads`` is asked for without a symmetry, or a matrix is not
            full.
    """
    _check_form(form, symmetry)
    heads = {
        (slot.tensor, slot.axis): group.kind
        for group in (symmetry.groups if symmetry and form == "heads" else ())
        for slot in group.slots
        if isinstance(group.kind, HeadRotation)
    }
    found: dict[str, dict[str, Tensor]] = {}
    for kind, by_name in statistics.items():
        axis = INPUT_AXIS.get(kind)
        if axis is None or form == "full":
            found[kind] = dict(by_name)
            continue
        memo: dict[tuple[int, object], Tensor] = {}
        for name, gram in by_name.items():
            if gram.ndim != 2:
                raise FedrotError(f"The Gram matrix of '{name}' is compressed already.")
            rotation = heads.get((name, axis))
            key = (id(gram), rotation)
            if key not in memo:
                memo[key] = _blocks(gram, rotation) if rotation else gram.diagonal().clone()
            found.setdefault(kind, {})[name] = memo[key]
    return found


def _check_form(form: str, symmetry: Symmetry | None) -> None:
    if form not in GRAM_FORMS:
        raise FedrotError(f"form is '{form}'; choose from {', '.join(GRAM_FORMS)}.")
    if form == "heads" and symmetry is None:
        raise FedrotError("The form 'heads' needs the model's symmetry.")


def _blocks(gram: Tensor, kind: HeadRotation) -> Tensor:
    return torch.stack([gram[i : i + kind.dim, i : i + kind.dim] for i in range(0, len(gram), kind.dim)])


def collect_fisher(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    labels: Literal["model", "data"] = "model",
    max_rows: int = 256,
    seed: int = 0,
) -> dict[str, dict[str, Tensor]]:
    """Return the diagonal Fisher information of every parameter, ``{"fisher": {name: F}}``.

    ``F = E_x E_{y ~ p(y|x)} (grad log p(y|x))^2``, the mean over rows, each parameter's shape, float64
    for float64 models, else float32 (Jin et al. 2023, section 3.1; Matena & Raffel 2021). Tied
    parameters hold one and the same tensor under each of their names.

    What ``y`` is follows from the configuration's ``problem_type`` and ``num_labels``: one label,
    several labels, or a score with unit variance. The expectation over it is exact for up to
    ``EXACT_LABELS`` labels, and over one sample per row otherwise. Where logits are ``[rows, tokens,
    classes]``, a class is sampled for every token that ``attention_mask`` shows; ELECTRA's
    discriminator has one of several labels per token.

    Args:
        model: a ``transformers`` model whose output has ``logits``; run in evaluation mode, left as it
            was.
        batches: keyword arguments of forward, ``labels`` included if they are the data's.
        labels: ``model``: expectation over the model's own labels; ``data``: the empirical Fisher.
        max_rows: rows used at most; each costs a backward pass per label.
        seed: of the sampled labels.

    Raises:
        FedrotError: no batch, no labels where they are needed, an unknown choice of labels, or the
            model's output has no logits.
    """
    if labels not in ("model", "data"):
        raise FedrotError(f"labels is '{labels}'; choose from model, data.")
    generator = torch.Generator().manual_seed(seed)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    sums = {p: torch.zeros_like(p, dtype=compute_dtype(p)) for p in names}
    rows = 0
    with torch.enable_grad(), evaluating(model):
        for row in islice(_rows(batches), max_rows):
            rows += 1
            if labels == "data" and "labels" not in row:
                raise FedrotError("The empirical Fisher needs 'labels' in the batches.")
            output = model(**{k: v for k, v in row.items() if k != "labels"})
            logits = getattr(output, "logits", None)
            if logits is None:
                raise FedrotError(
                    f"The output of {type(model).__name__} has no logits, so that it is unknown what it "
                    "predicts. Compute the Fisher information of a model with one task head."
                )
            for share, likelihood in _log_likelihoods(model, logits, row, labels, generator):
                gradients = torch.autograd.grad(
                    likelihood, list(sums), retain_graph=True, allow_unused=True
                )
                for total, gradient in zip(sums.values(), gradients, strict=True):
                    if gradient is not None:
                        gradient = gradient.to(total)
                        total.addcmul_(gradient, gradient, value=share)
    if not rows:
        raise FedrotError("No rows were given; pass at least one batch.")
    found = {name: total / rows for p, total in sums.items() for name in names[p][:1]}
    first = {name: shared[0] for shared in names.values() for name in shared}
    return {FISHER: {name: found[first[name]] for name in first}}


def _rows(batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        for i in range(len(next(iter(batch.values())))):
            yield {name: value[i : i + 1] for name, value in batch.items()}


def _log_likelihoods(
    model: nn.Module, logits: Tensor, row: Batch, labels: str, generator: torch.Generator
) -> list[tuple[float, Tensor]]:
    """Return ``(probability, log likelihood)`` of the labels that one row's expectation runs over.

    For several labels at once, and for a score, the terms are functions whose squared gradients add
    up to the expectation.
    """
    z = logits[0].to(compute_dtype(logits))
    label = row["labels"][0] if labels == "data" else None
    if z.ndim == 2:
        if label is not None and _predicts_next(model):
            z, label = z[:-1], label[1:]
        return [(1.0, _of_tokens(z, label, row.get("attention_mask"), generator))]
    problem = _problem(model, z, label)
    if _discriminates(model):
        problem, counted = "multi_label_classification", torch.ones_like(z, dtype=torch.bool)
        counted = row["attention_mask"][0].bool() if "attention_mask" in row else counted
        z, label = z[counted], None if label is None else label[counted]
    if label is not None:
        return [(1.0, _of_data(problem, z, label))]
    if problem == "regression":
        # d log N(y; z, 1) = (y - z) dz, and (y - z)^2 is 1 in expectation.
        return [(1.0, value) for value in z]
    if problem == "multi_label_classification":
        p = z.detach().sigmoid()
        if len(p) > EXACT_LABELS:
            drawn = torch.bernoulli(p.cpu(), generator=generator).to(z)
            return [(1.0, _of_data(problem, z, drawn))]
        return [(float(share), value) for share, value in zip(p * (1 - p), z, strict=True)]
    likelihoods = z.log_softmax(0)
    p = likelihoods.detach().exp()
    if len(p) <= EXACT_LABELS:
        return [(float(share), value) for share, value in zip(p, likelihoods, strict=True)]
    return [(1.0, likelihoods[int(torch.multinomial(p.cpu(), 1, generator=generator))])]


def _predicts_next(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))


def _discriminates(model: nn.Module) -> bool:
    return type(model).__name__ == "ElectraForPreTraining"


def _problem(model: nn.Module, z: Tensor, label: Tensor | None) -> str:
    """Return the kind of label as transformers names it, guessed as transformers guesses it."""
    config: Any = model.config
    if len(z) == 1:
        guess = "regression"
    elif label is not None and label.is_floating_point():
        guess = "multi_label_classification"
    else:
        guess = "single_label_classification"
    return getattr(config, "problem_type", None) or guess


def _of_data(problem: str, z: Tensor, label: Tensor) -> Tensor:
    """Return the log likelihood of the data's label, up to a constant."""
    if problem == "regression":
        return -((label.reshape(-1).to(z) - z) ** 2).sum() / 2
    if problem == "multi_label_classification":
        return (label.to(z) * z - nn.functional.softplus(z)).sum()
    return z.log_softmax(0)[int(label)]


def _of_tokens(
    z: Tensor, label: Tensor | None, mask: Tensor | None, generator: torch.Generator
) -> Tensor:
    """Return the log likelihood of a class per token, given logits ``[tokens, classes]``.

    The classes are the data's, where they are not negative, or a sample of the model's.
    """
    likelihoods = z.log_softmax(-1)
    if label is None:
        chosen = torch.multinomial(likelihoods.detach().exp().cpu(), 1, generator=generator)[:, 0]
        chosen = chosen.to(z.device)
        counted = torch.ones_like(chosen, dtype=torch.bool) if mask is None else mask[0].bool()
    else:
        chosen = label.long()
        counted = chosen >= 0
    picked = likelihoods.gather(1, chosen.clamp_min(0)[:, None])[:, 0]
    return picked[counted].sum()


def completed(
    update: Mapping[str, Tensor],
    received: Mapping[str, Tensor],
    rows: Mapping[str, Iterable[int]] | None = None,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Fill in what a client has not trained, and mark it, so that it does not enter the average.

    Args:
        update: the client's tensors; a task head that the client does not have may be absent.
        received: the model that the client received, with every tensor.
        rows: by tensor, the rows that the client trained: the labels it has seen, for the weight and
            bias of a classifier. The other rows become the received ones.

    Returns:
        The complete update, and its statistics ``{"trained": masks}`` for
        ``fedrot.aggregation``.

    Raises:
        UpdateError: the update has a tensor that was not received, or of another shape, or ``rows``
            names a tensor or row that it does not have.
    """
    for name in (*update, *(rows or {})):
        if name not in received:
            raise UpdateError(f"The tensor '{name}' is not part of the received model.")
    shapes = {name: tuple(tensor.shape) for name, tensor in received.items()}
    check_update({**received, **update}, shapes)
    full = {name: update.get(name, tensor) for name, tensor in received.items()}
    masks = {name: torch.tensor(False) for name in received if name not in update}
    for name, chosen in (rows or {}).items():
        mask = torch.zeros(len(received[name]), dtype=torch.bool)
        places = list(chosen)
        if places and name not in update:
            raise UpdateError(f"Rows of the tensor '{name}' are named, but the update does not have it.")
        if any(not 0 <= place < len(mask) for place in places):
            raise UpdateError(f"The tensor '{name}' has {len(mask)} rows, but rows {places} are named.")
        mask[places] = True
        masks[name] = mask
        full[name] = torch.where(along_rows(mask, full[name]), full[name], received[name])
    return full, {TRAINED: masks} if masks else {}
