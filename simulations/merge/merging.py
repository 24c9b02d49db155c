"""Saved models brought to the coordinates of one of them, merged, and written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrot.aggregation import Aggregator, Fisher, Mean, RegMean, Statistics
from fedrot.alignment import Alignment
from fedrot.anchors import SAME_BASIS
from fedrot.collect.fisher import collect_fisher
from fedrot.collect.gram import collect_gram
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.research import OptimalTransport
from fedrot.simulations.merge.merge_inputs import Batches, Input, Tensors, aligned, batches_of, reported
from fedrot.simulations.merge.merge_report import InputReport, MergeReport
from fedrot.simulations.models.loading import find_model
from fedrot.simulations.models.model_files import about, refuse_filled, write_model
from fedrot.simulations.models.saved_model import Checkpoint, check_alike, open_checkpoint
from fedrot.symmetry import WHOLE_MODEL, Symmetry

#: (a model to load tensors into, a model's own tensors, its alignment, batches) to its statistics.
Collect = Callable[[nn.Module, Tensors, Alignment, Batches], Statistics]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _grams(model: nn.Module, tensors: Tensors, alignment: Alignment, batches: Batches) -> Statistics:
    """Gram matrices of the model as it is, moved with it."""
    model.load_state_dict(dict(tensors))
    return alignment.transport(collect_gram(model, batches, max_batches=len(batches)))


def _fisher(model: nn.Module, tensors: Tensors, alignment: Alignment, batches: Batches) -> Statistics:
    """Fisher information of the aligned model: the diagonal could not follow a rotation."""
    model.load_state_dict(alignment.apply(tensors))
    return collect_fisher(model, batches, max_rows=sum(len(next(iter(b.values()))) for b in batches))


@dataclass(frozen=True)
class Method:
    """How aligned models become one.

    Attributes:
        aggregator: from RegMean's ``alpha`` and the models' symmetry to a new aggregator.
        collect: statistics that every model brings, if any.
        together: whether tensors are merged all together, and not one by one.
        rows: rows of data that the statistics are collected from, unless the caller says otherwise.
    """

    aggregator: Callable[[float, Symmetry], Aggregator]
    collect: Collect | None = None
    together: bool = True
    rows: int = 1024


METHODS: dict[str, Method] = {
    "mean": Method(lambda alpha, symmetry: Mean(), together=False),
    "fisher": Method(lambda alpha, symmetry: Fisher(), _fisher, rows=256),
    "regmean": Method(lambda alpha, symmetry: RegMean(alpha), _grams),
    "ot": Method(lambda alpha, symmetry: OptimalTransport(symmetry)),
}


def options_of(parts: str, layers: str = "all") -> AlignmentOptions:
    """Read what to align from text.

    Args:
        parts: of ``AlignmentOptions`` joined by ``+``, ``whole`` for ``WHOLE_MODEL`` or ``none``.
        layers: ``all``, ``first:N``, ``last:N``, or indices separated by commas.

    Raises:
        FedrotError: a part is unknown.
    """
    named: dict[str, tuple[str, ...]] = {"whole": WHOLE_MODEL, "none": ()}
    chosen = named[parts] if parts in named else tuple(parts.split("+"))
    indices = layers.split(",")
    listed = all(index.strip().isdecimal() for index in indices)
    try:
        return AlignmentOptions(chosen, tuple(map(int, indices)) if listed else layers)
    except FedrotError as error:
        raise FedrotError(f"{error} Join parts by '+', or give {' or '.join(named)}.") from error


def weights_of(text: str) -> list[float]:
    """Read numbers separated by commas; raises ``FedrotError`` if one is none."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise FedrotError(f"The weights are '{text}'; give numbers separated by commas.") from error


def merge(
    models: Sequence[Path | str],
    out: Path | None,
    *,
    anchor: Path | str | None = None,
    method: str = "mean",
    options: AlignmentOptions | None = None,
    weights: Sequence[float] | None = None,
    alpha: float = 0.9,
    dtype: str | None = None,
    config: Path | None = None,
    data: str | None = None,
    rows: int | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> MergeReport:
    """Align saved models to one of them, merge them, and write the result.

    Every tensor is read when it is needed: files are mapped, two models at a time. The mean holds one
    more model in memory, its result; methods with statistics hold their sums in float64 and a model
    to run.

    Args:
        models: two or more, each a folder written by ``save_pretrained``, a bare ``.safetensors``
            file or a name on the hub, of one architecture and, where they have one, one tokenizer.
        out: a name that ends in ``.safetensors`` becomes a bare file, any other a folder with the
            anchor's configuration, tokenizer and generation configuration beside the weights; there
            must not be anything yet. It appears whole or not at all.
        anchor: one of ``models``, the first if None: the others move to its coordinates.
        method: a name in ``METHODS``.
        options: what is aligned; see ``AlignmentOptions`` and ``options_of``. Where the residual
            stream is among it, activations count beside weights: on the data, or on random tokens if
            there is none.
        weights: of ``models``, in their order; equal if None.
        alpha: see ``RegMean``.
        dtype: of the result, a name in ``DTYPES``; that of the anchor's tensors if None. Everything
            is computed in float32 or better.
        config: of bare files; see ``open_checkpoint``.
        data: name of a data set whose training texts statistics are collected from. Labels are not
            looked at, but a column of them must exist.
        rows: so many texts at most; the method's own number if None.
        dry_run: do everything but write, whatever there is at ``out``.
        settings: of ``SimulationConfig``: ``data_dir``, ``text_column``, ``label_column``,
            ``max_length``.

    Raises:
        FedrotError: bad input; the message says which.
        FileExistsError: there is something at ``out``.
    """
    start = time.perf_counter()
    chosen, options = _method(method, alpha, data, rows), options or AlignmentOptions()
    if not dry_run:
        if out is None:
            raise FedrotError("There is nowhere to write to: give --out, or --dry-run.")
        refuse_filled(out)
    if dtype is not None and dtype not in DTYPES:
        raise FedrotError(f"Unknown dtype '{dtype}'; choose from {', '.join(DTYPES)}.")
    names, shares = _anchor_first(list(map(str, models)), weights, anchor)
    first, *others = checkpoints = [open_checkpoint(find_model(n), config, n) for n in names]
    for other in others:
        check_alike(first, other)
    batches, note = batches_of(first, data, rows or chosen.rows, settings) if data else ([], "")
    inputs = aligned(checkpoints, shares, options, batches)
    reports = tuple(reported(one, inputs[0]) for one in inputs)
    merged, notes = _merged(inputs, chosen, alpha, batches)
    kind = DTYPES.get(dtype or "")
    written = _written(merged, first, kind)
    if out is not None and not dry_run:
        write_model(out, written, first.config_file, first.beside, kind)
    said = (*filter(None, [note]), *_remarks(checkpoints, reports, options), *notes)
    seconds = time.perf_counter() - start
    return MergeReport(method, reports, said, None if dry_run else out, seconds)


def _method(name: str, alpha: float, data: str | None, rows: int | None) -> Method:
    if name not in METHODS:
        raise FedrotError(f"Unknown method '{name}'; choose from {', '.join(METHODS)}.")
    method = METHODS[name]
    RegMean(alpha)  # refuses an impossible alpha before anything is read
    if method.collect and not data:
        raise FedrotError(
            f"Method '{name}' collects statistics from data: give --data NAME, and where it is with "
            "--data-dir. Any texts of the kind that the models are for will do."
        )
    if rows is not None and rows < 1:
        raise FedrotError(f"rows is {rows}; at least one is needed.")
    return method


def _anchor_first(
    models: Sequence[str], weights: Sequence[float] | None, anchor: Path | str | None
) -> tuple[list[str], list[float]]:
    """Return the models and their weights with the anchor's in front."""
    if len(models) < 2:
        raise FedrotError(f"{len(models)} model is given; two are the least that can be merged.")
    shares = [1.0] * len(models) if weights is None else weights
    if len(shares) != len(models) or not all(0 < share < float("inf") for share in shares):
        raise FedrotError(
            f"The weights are {', '.join(f'{share:g}' for share in shares)} for {len(models)} models; "
            "each model needs one, positive and finite."
        )
    resolved = [Path(name).resolve() for name in models]
    wanted = resolved[0] if anchor is None else Path(anchor).resolve()
    if wanted not in resolved:
        raise FedrotError(
            f"The anchor '{anchor}' is none of the models; choose from {', '.join(models)}."
        )
    place = resolved.index(wanted)
    order = [place, *(i for i in range(len(models)) if i != place)]
    return [models[i] for i in order], [shares[i] for i in order]


def _merged(
    inputs: Sequence[Input], method: Method, alpha: float, batches: Batches
) -> tuple[dict[str, Tensor], list[str]]:
    """Fold the inputs, tensor by tensor where the method allows it; return what it notes, too."""
    first = inputs[0].checkpoint
    collect, model = method.collect, first.build() if method.collect else None
    pieces = [first.names] if method.together else [(name,) for name in first.names]
    merged: dict[str, Tensor] = {}
    notes: dict[str, list[str]] = {}
    for names in pieces:
        aggregator = method.aggregator(alpha, inputs[0].alignment.symmetry)
        for one in inputs:
            statistics = None
            with about(one.checkpoint.path):
                if collect and model:
                    found = collect(model, one.own(), one.alignment, batches)
                    # Tied tensors are merged once, under their first name.
                    statistics = {
                        kind: {name: value for name, value in by_name.items() if name in names}
                        for kind, by_name in found.items()
                    }
                aggregator.add(one.moved(names), one.weight, statistics)
        merged |= aggregator.result()
        for name, note in aggregator.notes.items():
            notes.setdefault(note, []).append(name)
    return merged, [f"{note}: {', '.join(names)}" for note, names in notes.items()]


def _written(
    merged: Mapping[str, Tensor], anchor: Checkpoint, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return the tensors in the dtype that is asked for, or in the anchor's."""
    found = {}
    for name, like in anchor.read(merged).items():
        floating = like.is_floating_point()
        found[name] = merged[name].to((dtype or like.dtype) if floating else like.dtype)
        if floating and not bool(torch.isfinite(torch.stack(found[name].aminmax())).all()):
            raise FedrotError(
                f"The merged tensor '{name}' has values beyond {found[name].dtype}. Choose another "
                "--dtype, such as float32."
            )
    return found


def _remarks(
    checkpoints: Sequence[Checkpoint], reports: Sequence[InputReport], options: AlignmentOptions
) -> Iterator[str]:
    """Yield what the user should know about the inputs."""
    labels = getattr(checkpoints[0].config, "id2label", None)
    for checkpoint, report in zip(checkpoints, reports, strict=True):
        if report.cosine < SAME_BASIS:
            matched = "residual" in options.parts
            yield (
                f"'{report.name}' comes from another basis than the anchor (cosine of their embeddings: "
                f"{report.cosine:.2f}). "
                + ("Its residual stream was matched." if matched else "Merge with --parts whole.")
            )
        if getattr(checkpoint.config, "id2label", None) != labels:
            yield f"'{report.name}' names its labels differently than the anchor."
        if checkpoint.unknown:
            yield (
                f"'{report.name}' also stores what a {checkpoint.model_class.__name__} does not have, "
                f"which is left out: {', '.join(checkpoint.unknown)}"
            )
