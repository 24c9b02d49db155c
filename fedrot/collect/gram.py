"""Gram matrices of the inputs of linear layers: collection, and cheaper forms to send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn

from fedrot.collect.hooks import input_axis, watched, without_padding
from fedrot.collect.random_inputs import forward_inputs
from fedrot.collect.statistics import GRAMS, INPUT_AXIS, Statistics, collects
from fedrot.errors import FedrotError, UpdateError
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import Tensors, diagonal_blocks

GramForm = Literal["full", "heads", "diagonal"]
GRAM_FORMS = ("full", "heads", "diagonal")

#: Gains below this share of the largest are 0 as far as Gram matrices can tell.
_NEAR_ZERO = 1e-6
#: Rounding may change mean squares behind a norm, which are 1 in the mean over its units, by this much.
_LOST = 1e-3


def _readers(model: nn.Module) -> dict[str, int]:
    """Return the input axis of the weight of every linear module that shares its weight with no other.

    A weight that is also an embedding's, or that layers with different inputs share, is no linear
    regression on one input: it is averaged.
    """
    parameters = (p for module in model.modules() for p in module._parameters.values())
    uses = Counter(id(parameter) for parameter in parameters)
    axes = {name: input_axis(module) for name, module in model.named_modules()}
    return {
        name: axis
        for name, axis in axes.items()
        if axis is not None and uses[id(model.get_submodule(name).weight)] == 1
    }


# The matrices of Conv1D layers are collected together with the others.
@collects(GRAMS[1])
def collect_gram(
    model: nn.Module,
    batches: Iterable[Tensors],
    *,
    max_batches: int | None = 100,
    form: GramForm = "full",
    symmetry: Symmetry | None = None,
    names: Container[str] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Return the Gram matrix of the inputs of every linear layer (Jin et al. 2023, section 3.3).

    The result is ``{"gram": {weight: G}}``, with ``gram_conv1d`` for ``Conv1D``. ``G = X^T X / n`` over
    the ``n`` tokens that ``attention_mask`` shows, uncentred, float32 ``[in, in]``; sums over batches
    are float64. Layers that read the same input (query, key and value) share one matrix. Weights that
    are tied to another module (output embeddings) have none.

    Args:
        model: any ``torch`` model with ``Linear`` or ``Conv1D`` layers; it is run in evaluation mode and
            without gradients, and left in its own mode.
        batches: keyword arguments of the model's forward; ``labels`` are not passed on.
        max_batches: None for all; Jin et al., Table 6, find no gain beyond 100.
        form, symmetry: see ``compressed``.
        names: of the weights to collect for; None for all. There may be none among them.

    Raises:
        FedrotError: no batch, no such layer, or an unknown form.
    """
    _check_form(form, symmetry)
    axes = {
        name: axis
        for name, axis in _readers(model).items()
        if names is None or f"{name}.weight" in names
    }
    if names is not None and not axes:
        return {}
    count: dict[str, int] = {}
    sums: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    inputs: dict[str, Tensor] = {}
    mask: Tensor | None = None

    def seen(name: str, given: Tensor, output: Tensor) -> None:
        first = next((other for other, read in inputs.items() if read is given), name)
        # An input counts as shared only if it has been so in every batch.
        if same.setdefault(name, first) != first:
            other = same[name] if first == name else first
            raise FedrotError(
                f"The layers '{name}.weight' and '{other}.weight' read one input in some batches only; "
                "collect their statistics from batches that take the same path through the model."
            )
        inputs[name] = given
        if first != name:
            return
        rows = without_padding(given, mask).float()
        product = (rows.mT @ rows).double()
        sums[name] = sums[name].add_(product) if name in sums else product
        count[name] = count.get(name, 0) + len(rows)

    with watched(model, axes, seen):
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
        found.setdefault(GRAMS[axes[name]], {})[f"{name}.weight"] = grams[first]
    return compressed(found, form, symmetry)


def compressed(
    statistics: Statistics, form: GramForm, symmetry: Symmetry | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return cheaper forms of Gram matrices; other kinds of statistics stay as they are.

    Args:
        statistics: with full Gram matrices ``[n, n]``.
        form: ``full`` keeps the matrices. ``heads`` keeps one block per head, ``[heads, d, d]``, where
            the input is the heads' outputs, and diagonals ``[n]`` elsewhere; it can follow every
            rotation and permutation. ``diagonal`` keeps diagonals, which cannot follow rotations.
        symmetry: needed for ``heads``.

    Raises:
        FedrotError: the form is unknown or needs a symmetry, or a matrix is not full.
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
                memo[key] = diagonal_blocks(gram, rotation.dim) if rotation else gram.diagonal().clone()
            found.setdefault(kind, {})[name] = memo[key]
    return found


def canonical_gram(gram: Tensor, mean: Tensor, gain: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the Gram matrix of what a layer reads once its norm's gain and bias are folded.

    Inputs ``x = gain * z + bias`` become ``z`` in ``fedrot.canonical``: with ``D = diag(gain)``,
    ``G_z = D^-1 (G_x - bias mean^T - mean bias^T + bias bias^T) D^-1``, computed in float64.

    Args:
        gram: ``G_x = X^T X / n``, uncentred, floating-point ``[in, in]``, from ``collect_gram``.
        mean: of the same inputs, ``[in]``; both are sums over tokens, divided by their number.
        gain: of the norm, ``[in]``.
        bias: of the norm, ``[in]``. None for a norm without one, and where canonical tensors keep it in
            the norm (``Fold.holds_bias`` is false): the layer then reads ``x / gain``.

    Returns ``G_z`` in the dtype of ``gram``.

    Example: ``canonical_gram(gram, mean, state["h.0.ln_1.weight"], state["h.0.ln_1.bias"])``

    Raises:
        UpdateError: shapes differ; a value is not finite; a gain is so near 0 that ``z`` is lost in the
            rounding of ``gram``; or no inputs have this mean and this Gram matrix.
    """
    size = len(gram) if gram.ndim else 0
    given = {"gram": gram, "mean": mean, "gain": gain, "bias": mean if bias is None else bias}
    for name, value in given.items():
        shape = [size, size] if name == "gram" else [size]
        if list(value.shape) != shape or not bool(torch.isfinite(value).all()):
            raise UpdateError(
                f"The {name} of shape {list(value.shape)} has to be finite, of shape {shape}: the Gram "
                "matrix, the mean and the norm are those of one layer's inputs."
            )
    wide, center, scale = gram.detach().double(), mean.detach().double(), gain.detach().double()
    lost = scale.abs() <= _NEAR_ZERO * scale.abs().max()
    if bias is not None:
        beta = bias.detach().double()
        lost |= torch.finfo(gram.dtype).eps * wide.diagonal() > _LOST * scale.square()
        crossed = torch.outer(beta, center)
        wide = wide - crossed - crossed.mT + torch.outer(beta, beta)
    if bool(lost.any()):
        unit = int(lost.nonzero()[0])
        raise UpdateError(
            f"The norm's gain of unit {unit} is {float(scale[unit]):g}, too near 0 for a Gram matrix in "
            f"{gram.dtype}: what the norm computes there is lost in it. Collect the matrix from the "
            "canonical model."
        )
    found = wide / torch.outer(scale, scale)
    if bool((found.diagonal() < -_LOST).any()):
        raise UpdateError(
            "No inputs have this mean and this Gram matrix: collect both from the same rows, with the "
            "norm's gain and bias at that time."
        )
    return found.to(gram.dtype)


def _check_form(form: str, symmetry: Symmetry | None) -> None:
    if form not in GRAM_FORMS:
        raise FedrotError(f"form is '{form}'; choose from {', '.join(GRAM_FORMS)}.")
    if form == "heads" and symmetry is None:
        raise FedrotError("The form 'heads' needs the model's symmetry.")
