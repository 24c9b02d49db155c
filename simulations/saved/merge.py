"""``merge_models``: saved models diagnosed, aligned to the first, and averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedrot.aggregation import Mean
from fedrot.anchors import finder
from fedrot.collect.activations import probing
from fedrot.diagnosis import ALIGNED, PLAIN, WHOLE, diagnose
from fedrot.errors import FedrotError
from fedrot.matching.problem import Anchor
from fedrot.options import AlignmentOptions
from fedrot.simulations.saved.alike import refuse_unlike
from fedrot.simulations.saved.load import SavedModel, about, load, refuse_filled, writing
from fedrot.symmetry import WHOLE_MODEL, Symmetry, symmetry_of
from fedrot.symmetry.canonical import canonical
from fedrot.tensors import Tensors, check_finite, widened

#: The value of ``--parts`` for each choice of a diagnosis.
_PARTS = {PLAIN: "none", ALIGNED: "attention+ffn", WHOLE: "whole"}

#: Values of ``--parts`` beside names of parts.
_NAMED = {"whole": WHOLE_MODEL, "none": ()}

#: Texts per batch of activations. A language model's outputs have the width of its vocabulary.
_BATCH = 64


def merge_models(
    names: Sequence[str],
    out: Path | None,
    *,
    parts: str | None = None,
    weights: str | None = None,
    allowed: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
    fit_head: bool = False,
) -> list[str]:
    """Diagnose saved models, align them to the first, and write their mean; return sentences about it.

    All models are held in memory. The mean is computed in float32 or float64 and has the dtypes,
    configuration and tokenizer of the first model. With data, the first sentence says whether it is
    better than the best of the models.

    Args:
        names: of two or more models that differ only in the values of tensors, see ``load``.
        out: a new or empty folder; None: nothing is written.
        parts: see ``options_of``; None: what the diagnosis recommends.
        weights: see ``weights_of``.
        allowed: fields of configurations that may differ.
        data: fields of an experiment that name the data.
        fit_head: whether the task head of the mean is fitted to the data's training rows.
    """
    shares = weights_of(weights, len(names))
    given = None if parts is None else options_of(parts)
    refuse_filled(out)
    first, *others = models = [load(name, whole=True) for name in names]
    for saved in models:
        refuse_unlike(first, saved, allowed)
        with about(saved.name):
            check_finite(saved.tensors)
    judge = None
    if data:  # Its modules need seconds for their imports.
        from fedrot.simulations.saved.judge import Judge

        judge = Judge.of(first, data)
    symmetry = symmetry_of(first.config, first.tensors)
    found = diagnose(first.tensors, [other.tensors for other in others], symmetry)
    options = given or options_of(_PARTS[found.choice])
    if set(options.parts) == set(WHOLE_MODEL):
        options = options.movable(symmetry)
    options = options.for_model(symmetry)
    merged, reports = _average(models, shares, symmetry, options)
    said = [f"Diagnosis: {found}", f"Aligned parts: {', '.join(options.parts) or 'none'}.", *reports]
    if judge:
        plain = _average(models, shares, symmetry, options_of("none"))[0] if options.parts else None
        merged, verdict = judge.verdict(models, merged, plain, fit_head)
        said = [*verdict, *said]
    if out is not None:
        first.model.load_state_dict(merged, strict=False)  # without the names of tied tensors
        with writing(out) as folder:
            first.model.save_pretrained(folder)
            if first.tokenizer is not None:
                first.tokenizer.save_pretrained(folder)
    return said


def _average(
    models: Sequence[SavedModel],
    shares: Sequence[float],
    symmetry: Symmetry,
    options: AlignmentOptions,
) -> tuple[Tensors, list[str]]:
    """Return the weighted mean of models that are aligned to the first, and a report of each."""
    first, ours, reports = models[0], models[0].tensors, []
    twins = {name for tied in symmetry.tied for name in tied[1:]}
    if options.rotates:
        symmetry, evidence = symmetry.rotated, None
    else:
        evidence = probing(first.build, first.config.to_dict(), symmetry, batch_size=_BATCH)
    find, anchor, mean = finder(ours, symmetry, options, evidence=evidence), Anchor(ours), Mean()
    for saved, weight in zip(models, shares, strict=True):
        moved = widened(saved.tensors)
        with about(saved.name):
            if saved is not first:
                alignment = find(saved.tensors, anchor)
                moved = alignment.apply(moved)
                if options.parts:
                    reports.append(f"'{saved.name}': {alignment.report}")
            elif options.canonical:
                moved = canonical(moved, symmetry)
            mean.add({n: tensor for n, tensor in moved.items() if n not in twins}, weight)
    return _rounded(mean.result(), first), reports


def options_of(parts: str) -> AlignmentOptions:
    """Return options for parts joined by ``+``, ``whole`` or ``none``; raises ``FedrotError``."""
    try:
        return AlignmentOptions(_NAMED.get(parts, parts.split("+")))
    except FedrotError as error:
        raise FedrotError(f"{error} Join parts by '+', or give {' or '.join(_NAMED)}.") from error


def weights_of(text: str | None, count: int) -> list[float]:
    """Read one weight per model; None: equal weights. Raises ``FedrotError``."""
    if count < 2:
        raise FedrotError(f"{count} model is given; at least two are needed for a merge.")
    try:
        weights = [float(number) for number in text.split(",")] if text else [1.0] * count
    except ValueError as error:
        raise FedrotError(f"The weights are '{text}'; give numbers separated by commas.") from error
    if len(weights) != count or not all(0 < weight < float("inf") for weight in weights):
        raise FedrotError(
            f"The weights are {text} for {count} models; each model needs one, positive and finite."
        )
    return weights


def _rounded(merged: Tensors, first: SavedModel) -> Tensors:
    """Return a mean in the dtypes of the first model; raises ``FedrotError`` for values beyond them."""
    found = {name: tensor.to(first.tensors[name].dtype) for name, tensor in merged.items()}
    for name, tensor in found.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FedrotError(
                f"The merged tensor '{name}' has values beyond {tensor.dtype}, the dtype of "
                f"'{first.name}'. Save that model in float32, or give a model with wider numbers first."
            )
    return found
