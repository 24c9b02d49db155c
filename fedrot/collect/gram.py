"""What a client can say about its weights beside the weights: Gram matrices, and what it trained.

Statistics are dictionaries by kind, then by tensor name (``Statistics``). They move with the weights
(``Alignment.transport``) and weigh them when they are merged (``fedrot.aggregation``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedrot.collect.activations import evaluating, input_axis, without_padding
from fedrot.collect.random_inputs import forward_inputs
from fedrot.errors import FedrotError, UpdateError
from fedrot.statistic_kinds import GRAMS, INPUT_AXIS, TRAINED, Statistics, along_rows
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import check_update

Batch = Mapping[str, Tensor]

GramForm = Literal["full", "heads", "diagonal"]
GRAM_FORMS = ("full", "heads", "diagonal")


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
        axis = input_axis(module)
        weight: Any = module.weight if axis is not None else None
        if axis is not None and uses[id(weight)] == 1:
            found[f"{name}.weight"] = (module, axis)
    return found


def collect_gram(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    max_batches: int | None = 100,
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
        max_batches: batches read at most, None for all; Jin et al., Table 6, find no gain beyond 100.
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
            model(**forward_inputs(model, batch))
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
