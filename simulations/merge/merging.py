"""Merge of saved models: alignment to the first, aggregation, and writing of the result."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedrot.aggregation import Statistics, aggregation_named
from fedrot.aggregation.registry import AggregationEntry
from fedrot.anchors import SAME_BASIS
from fedrot.collect.canonical_statistics import follows_canonical_form
from fedrot.collect.statistics import kind_named
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.simulations.merge.merge_inputs import (
    METHODS,
    Batches,
    Input,
    InputReport,
    aligned,
    batches_of,
    check_mergeable,
    titles,
)
from fedrot.simulations.merge.merge_scores import Scores, scores
from fedrot.simulations.merge.merge_settings import MergeSettings
from fedrot.simulations.models.model_files import about, refuse_filled, write_model
from fedrot.simulations.models.saved_model import SavedModel, open_saved_model
from fedrot.simulations.report.tables import Table
from fedrot.symmetry import WHOLE_MODEL, symmetry_of
from fedrot.tensors import Tensors

#: Maximum number of texts for matching, for methods without statistics.
_ROWS = 1024


@dataclass(frozen=True)
class MergeReport:
    """The inputs and the result of a merge.

    Attributes:
        inputs: reports of the models; the first is the anchor.
        notes: sentences for the user.
        scores: scores of the models, alone and merged; None without data that fit.
        out: the file or folder that was written; None after a dry run.
    """

    method: str
    inputs: tuple[InputReport, ...]
    notes: tuple[str, ...]
    scores: Scores | None
    out: Path | None


def options_of(parts: str) -> AlignmentOptions:
    """Read alignment options from text; raises ``FedrotError`` for unknown parts.

    Args:
        parts: parts of ``AlignmentOptions`` joined by ``+``, ``whole`` for ``WHOLE_MODEL``, or ``none``.
    """
    named: dict[str, tuple[str, ...]] = {"whole": WHOLE_MODEL, "none": ()}
    chosen = named[parts] if parts in named else tuple(parts.split("+"))
    try:
        return AlignmentOptions(chosen)
    except FedrotError as error:
        raise FedrotError(f"{error} Join parts by '+', or give {' or '.join(named)}.") from error


def merge(
    models: Sequence[Path | str],
    out: Path | None,
    settings: MergeSettings | None = None,
    *,
    dry_run: bool = False,
) -> MergeReport:
    """Align saved models to the first, merge them, and write the result.

    Files are memory-mapped, two models at a time, and tensors are read on demand. The mean needs memory
    for its result in float32, for any number of models. Methods with statistics need memory for float64
    sums and a model to run. All computations are in float32 or float64.

    Args:
        models: two or more folders written by ``save_pretrained`` or names on the hub; of one
            architecture and, if they have tokenizers, of one tokenizer. The first is the anchor.
        out: a new or empty folder, which also gets the anchor's configuration and tokenizer. If the
            merge fails, nothing is written.
        dry_run: merge, but write nothing; ``out`` may exist.

    Raises:
        FedrotError: bad input; the message names the setting or the model.
        FileExistsError: ``out`` is a file, or a folder that is not empty.
    """
    settings = settings or MergeSettings()
    weights = weights_of(settings.weights, len(models))
    options = options_of(settings.parts)
    method = _method(settings)
    if not all(map(follows_canonical_form, method.needs)):
        options = options.as_it_is()
    if not dry_run:
        if out is None:
            raise FedrotError("The result needs a path: give --out, or --dry-run.")
        refuse_filled(out)
    first, *others = saved = [open_saved_model(name) for name in models]
    for other in others:
        check_mergeable(first, other)
    rows = max((kind_named(kind).rows for kind in method.needs), default=_ROWS)
    batches, note = batches_of(first, settings, rows) if settings.data else ([], "")
    still: dict[str, str] = {}
    if settings.parts == "whole":
        symmetry = symmetry_of(first.config, first.shell().state_dict())
        asked, options = options.parts, options.movable(symmetry)
        still = {part: symmetry.refused[part] for part in asked if part not in options.parts}
    inputs, reports = zip(*aligned(saved, weights, options, batches), strict=True)
    merged, notes = _merged(inputs, method, batches)
    found, unscored = scores(inputs, merged, settings) if settings.data else (None, "")
    written = _written(merged, first)
    if out is not None and not dry_run:
        write_model(out, written, first.shell(), first.path)
    held = [f"Part '{part}' was not moved: {why}" for part, why in still.items()]
    said = (*filter(None, [note, unscored]), *held, *_remarks(saved, reports, options), *notes)
    return MergeReport(settings.method, reports, said, found, None if dry_run else out)


def weights_of(text: str | None, count: int) -> list[float]:
    """Read one weight per model; None: equal weights. Raises ``FedrotError``."""
    if count < 2:
        raise FedrotError(f"{count} model is given; at least two are needed for a merge.")
    try:
        weights = [float(number) for number in text.split(",")] if text else [1.0] * count
    except ValueError as error:
        raise FedrotError(f"The weights are '{text}'; give numbers separated by commas.") from error
    if len(weights) != count or not all(0 < weight < float("inf") for weight in weights):
        shown = ", ".join(f"{weight:g}" for weight in weights)
        raise FedrotError(
            f"The weights are {shown} for {count} models; each model needs one, positive and finite."
        )
    return weights


def _method(settings: MergeSettings) -> AggregationEntry:
    if settings.method not in METHODS:
        raise FedrotError(f"Unknown method '{settings.method}'; choose from {', '.join(METHODS)}.")
    method = METHODS[settings.method]
    if method.needs and not settings.data:
        raise FedrotError(
            f"Method '{settings.method}' collects statistics from data: give --data NAME, and its "
            "folder with --data-dir. Texts like those of the models' training are suitable."
        )
    return method


def _merged(
    inputs: Sequence[Input], method: AggregationEntry, batches: Batches
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the merged tensors, and notes; the merge is tensor by tensor if the method allows it."""
    first, symmetry = inputs[0].saved, inputs[0].alignment.symmetry
    model = first.build() if method.needs else None
    build = aggregation_named(method.name, symmetry=lambda: symmetry)
    every = first.outline.names
    aggregators = {names: build() for names in ([(n,) for n in every] if method.by_tensor else [every])}
    for one in inputs:
        tensors = one.saved.read()
        with about(one.saved.path):
            found = _statistics(one, tensors, method.needs, model, every, batches) if model else None
            for names, aggregator in aggregators.items():
                aggregator.add(one.moved(tensors, names), one.weight, found)
    merged: dict[str, Tensor] = {}
    notes: dict[str, list[str]] = {}
    for aggregator in aggregators.values():
        merged |= aggregator.result()
        for name, note in aggregator.notes.items():
            notes.setdefault(note, []).append(name)
    return merged, [f"{note}: {', '.join(names)}" for note, names in notes.items()]


def _statistics(
    one: Input,
    tensors: Tensors,
    kinds: Sequence[str],
    model: nn.Module,
    names: Collection[str],
    batches: Batches,
) -> Statistics:
    """Collect statistics of the named tensors in the anchor's coordinates; ``model`` is overwritten.

    Kinds of statistics that can be rotated are collected before alignment and moved, others after it.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for kind in kinds:
        follows = kind_named(kind).follows_rotations
        own = one.own(tensors)
        model.load_state_dict(own if follows else one.alignment.apply(own))
        collected = kind_named(kind).collected(model, batches, limited=False)
        moved_there = one.alignment.transport(collected, own) if follows else collected
        for moved, by_name in moved_there.items():
            # Tied tensors are merged once, under their first name.
            found[moved] = {name: value for name, value in by_name.items() if name in names}
    return found


def _written(merged: Mapping[str, Tensor], anchor: SavedModel) -> dict[str, Tensor]:
    """Return the tensors in the dtypes of the anchor's tensors."""
    found = {}
    stored = anchor.read()
    for name, tensor in merged.items():
        own = stored[name].dtype
        found[name] = tensor.to(own)
        if own.is_floating_point and not bool(torch.isfinite(torch.stack(found[name].aminmax())).all()):
            raise FedrotError(
                f"The merged tensor '{name}' has values beyond {own}, the dtype of '{anchor.path}'. "
                "Save that model in float32, or give a model with wider numbers first."
            )
    return found


def _remarks(
    models: Sequence[SavedModel], reports: Sequence[InputReport], options: AlignmentOptions
) -> Iterator[str]:
    """Yield sentences about the inputs for the user."""
    labels = getattr(models[0].config, "id2label", None)
    tokenizer = next((model.tokenizer for model in models if model.tokenizer), None)
    if tokenizer and not models[0].tokenizer:
        yield (
            "The first model has no tokenizer, and therefore the result has none. Copy the tokenizer of "
            f"'{tokenizer}', or give that model first."
        )
    for model, report in zip(models, reports, strict=True):
        if report.cosine < SAME_BASIS:
            matched = "residual" in options.parts
            yield (
                f"'{report.name}' is in another basis than the anchor (cosine of their embeddings: "
                f"{report.cosine:.2f}). "
                + ("Its residual stream was matched." if matched else "Merge with --parts whole.")
            )
        if getattr(model.config, "id2label", None) != labels:
            yield f"'{report.name}' has other label names than the anchor."
        if model.outline.unknown:
            yield (
                f"'{report.name}' also has tensors that a {model.model_class.__name__} does not "
                f"have; they are left out: {', '.join(model.outline.unknown)}"
            )


def movements_table(report: MergeReport) -> Table:
    """Return a table with a line per model and part, and one for all tensors of each model."""
    columns = ("model (weight)", "part", "before", "after", "heads or neurons moved")
    total = sum(given.weight for given in report.inputs)
    lines = []
    for title, given in _titled(report):
        own = _lines(given) if given is not report.inputs[0] else [("the first model", "", "", "")]
        lines.append((f"{title} ({given.weight / total:.3g})", *own[0]))
        lines += [("", *line) for line in own[1:]]
    title = f"Squared distance to the first model; merged by {report.method}"
    return Table(title, columns, lines, columns[:2])


def movements(report: MergeReport) -> list[str]:
    """Return a sentence per model: whether it was moved, how much, and what that means."""
    return [_movement(title, given) for title, given in _titled(report)[1:]]


def _titled(report: MergeReport) -> list[tuple[str, InputReport]]:
    names = [given.name for given in report.inputs]
    return list(zip(titles(names), report.inputs, strict=True))


def _movement(title: str, given: InputReport) -> str:
    groups = given.alignment.groups
    moved, of = sum(group.moved for group in groups), sum(group.of for group in groups)
    if not of:
        return f"'{title}' was averaged as it is: no part was asked for (--parts)."
    if not moved:
        return (
            f"'{title}' was averaged as it is: none of {of} heads, neurons and directions differs by "
            "more than chance from the first model's. Models that were trained from one start are in "
            "the same coordinates."
        )
    removed = (given.before - given.after) / given.before
    return (
        f"'{title}' was in other coordinates: {moved} of {of} heads, neurons and directions were moved, "
        f"which removed {removed:.1%} of the squared distance to the first model."
    )


def _lines(given: InputReport) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for part in dict.fromkeys(group.part for group in given.alignment.groups):
        groups = [group for group in given.alignment.groups if group.part == part]
        before, after = sum(g.before for g in groups), sum(g.after for g in groups)
        moved = f"{sum(g.moved for g in groups)} of {sum(g.of for g in groups)}"
        lines.append((part, f"{before:.4g}", f"{after:.4g}", moved))
    return [*lines, ("all tensors", f"{given.before:.4g}", f"{given.after:.4g}", "")]
