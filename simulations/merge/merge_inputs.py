"""Inputs of a merge: saved models aligned to the anchor, and batches of texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedrot.aggregation import aggregations
from fedrot.alignment import Alignment
from fedrot.anchors import Evidence, base_cosine, finder
from fedrot.collect.activations import probing
from fedrot.errors import FedrotError
from fedrot.matching.problem import Anchor, squared_distance
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.simulations.merge.merge_settings import MergeSettings
from fedrot.simulations.models.alike import (
    check_fields,
    check_labels,
    check_ties,
    check_vocabularies,
)
from fedrot.simulations.models.model_files import about
from fedrot.simulations.models.saved_model import (
    SavedModel,
    check_bundled,
    longest_text,
)
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.symmetry.canonical import canonical
from fedrot.symmetry.moves import apply_moves
from fedrot.tensors import Tensors, check_finite, widened

if TYPE_CHECKING:
    from fedrot.simulations.tasks.task import Task

Batches = Sequence[Mapping[str, Tensor]]

#: Texts per batch. A language model's outputs have the width of its vocabulary, which limits this.
BATCH = 64
#: Maximum number of tokens per text; fewer if the model has fewer positions.
LONGEST = 64


#: The aggregations whose inputs a merge has.
METHODS = {entry.name: entry for entry in aggregations({"symmetry"})}


@dataclass(frozen=True)
class InputReport:
    """The alignment of one model; the anchor's own distances are 0.

    Attributes:
        name: the model's path, or its name on the hub.
        cosine: cosine of its embeddings with the anchor's; see ``fedrot.anchors.base_cosine``.
        before, after: squared distance to the anchor over all tensors, before and after alignment.
    """

    name: str
    weight: float
    cosine: float
    before: float
    after: float
    alignment: AlignmentReport


@dataclass(frozen=True)
class Input:
    """A saved model, its weight, and its alignment to the anchor."""

    saved: SavedModel
    weight: float
    alignment: Alignment

    def own(self, tensors: Tensors, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return some of the model's tensors, in float32 or wider; canonical if the alignment is."""
        chosen = list(tensors if names is None else names)
        if not self.alignment.canonical:
            return widened({name: tensors[name] for name in chosen})
        part = self.alignment.symmetry.around(chosen)
        found = canonical(widened({name: tensors[name] for name in part.shapes}), part)
        return {name: found[name] for name in chosen}

    def moved(self, tensors: Tensors, names: Sequence[str]) -> dict[str, Tensor]:
        """Return some of the model's tensors after alignment, as ``own`` does."""
        chosen = frozenset(names)
        limited = []
        for move in self.alignment.moves:
            slots = tuple(slot for slot in move.group.slots if slot.tensor in chosen)
            limited += [replace(move, group=replace(move.group, slots=slots))] if slots else []
        return apply_moves(self.own(tensors, names), limited)


def titles(names: Sequence[str]) -> list[str]:
    """Return a title per model: the name of its folder, or its whole path if several share the name."""
    short = [Path(name).resolve().name for name in names]
    return [own if short.count(own) == 1 else name for own, name in zip(short, names, strict=True)]


def check_mergeable(one: SavedModel, other: SavedModel) -> None:
    """Raise ``FedrotError`` if two models differ in more than the values of tensors."""
    ours, theirs = one.outline.shapes, other.outline.shapes
    check_fields(one, other, ("architectures",))
    check_vocabularies(one, other)
    for name in (*ours, *(name for name in theirs if name not in ours)):
        if theirs.get(name) != ours.get(name):
            raise FedrotError(
                f"Different shapes: the tensor '{name}' is {ours.get(name)} in '{one.path}' and "
                f"{theirs.get(name)} in '{other.path}'. Only models of one architecture can be merged."
            )
    check_labels(one, other)
    check_ties(one, one.outline.first, other, other.outline.first)


def check_values(model: SavedModel, tensors: Tensors) -> None:
    """Raise ``UpdateError`` if a tensor holds NaN or Inf."""
    with about(model.path):
        check_finite(tensors)


def aligned(
    models: Sequence[SavedModel],
    weights: Sequence[float],
    options: AlignmentOptions,
    batches: Batches,
) -> Iterator[tuple[Input, InputReport]]:
    """Align all models to the first, one at a time; at most two models are mapped at once."""
    first, *others = models
    for model in models:
        check_values(model, model.read())
    ours = first.read()
    symmetry = symmetry_of(first.config, ours)
    options = options.for_model(symmetry)
    if options.rotates:
        symmetry = symmetry.rotated
    anchor = Anchor(ours)
    evidence = _evidence(first, symmetry, batches)
    find = finder(ours, symmetry, options, evidence=evidence)
    nothing = AlignmentReport((), 0.0, 0.0, 0.0)
    still = Input(first, weights[0], Alignment(symmetry, (), nothing, bool(options.canonical)))
    yield still, InputReport(first.name, weights[0], 1.0, 0.0, 0.0, nothing)
    for other, weight in zip(others, weights[1:], strict=True):
        theirs = other.read()
        cosine = base_cosine(theirs, ours, symmetry)
        with about(other.path):
            alignment = find(theirs, anchor)
        one = Input(other, weight, alignment)
        before = after = 0.0
        for name in first.outline.names:
            wanted = still.own(ours, [name])[name]
            if wanted.is_floating_point():
                before += squared_distance([(wanted, one.own(theirs, [name])[name])])
                after += squared_distance([(wanted, one.moved(theirs, [name])[name])])
        yield one, InputReport(other.name, weight, cosine, before, after, alignment.report)


def _evidence(saved: SavedModel, symmetry: Symmetry, batches: Batches) -> Evidence | None:
    """Return activations on the batches; without batches, on random tokens, or None if rotated."""
    if symmetry.rotates and not batches:
        return None
    config = saved.config.to_dict()
    return probing(saved.build, config, symmetry, batches=batches, batch_size=BATCH)


def batches_of(
    saved: SavedModel, settings: MergeSettings, rows: int
) -> tuple[list[dict[str, Tensor]], str]:
    """Return training texts as batches of a model's inputs, and a note on the data set's splits.

    Texts are tokenised with the model's tokenizer, or the bundled one if it has none. For a masked
    language model, tokens are masked as in training. Labels are left out. There are at most ``rows``
    texts. Raises ``FedrotError`` if the tokenizer does not fit.
    """
    from fedrot.simulations.tasks.objectives import task_name
    from fedrot.simulations.tasks.task import check_usable
    from fedrot.simulations.tasks.training import step_batches

    size = getattr(saved.config, "vocab_size", None)
    if size is None:
        raise FedrotError(
            f"'{saved.path}' is a {saved.model_class.__name__}, which takes images; --data gives only "
            "texts. Merge it without --data, by a method that needs no data."
        )
    task = task_for(
        saved, settings, task_name(saved) or "classification", train_limit=rows, test_limit=1
    )
    with torch.device("meta"):
        shell = saved.build()
    check_usable(task, saved.path)
    batches = list(step_batches(task, shell, np.arange(len(task.train)), rows, BATCH, seed=0))
    if any(int(batch["input_ids"].max()) >= size for batch in batches):
        raise FedrotError(
            f"The tokenizer of '{saved.path}' has tokens beyond the model's {size}. Save the "
            "model's own tokenizer into its folder."
        )
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in batches], task.data.note


def task_for(
    saved: SavedModel, settings: MergeSettings, name: str, *, train_limit: int, test_limit: int
) -> Task:
    """Return a task on the settings' data, with the model's tokenizer or, without one, the bundled one.

    Raises ``FedrotError`` if the data cannot be used, or the tokenizer does not fit.
    """
    from fedrot.simulations.config import SimulationConfig
    from fedrot.simulations.tasks.task import task_of

    check_bundled(saved)
    described = {
        "task": name,
        **settings.model_dump(include={"data", "data_dir", "text_column", "label_column"}),
        # RoBERTa's positions start after the padding index. BLOOM and T5 have no largest position.
        "max_length": min(LONGEST, longest_text(saved.config, LONGEST + 2) - 2),
        "model": str(saved.tokenizer) if saved.tokenizer else None,
        "train_limit": train_limit,
        "test_limit": test_limit,
    }
    return task_of(SimulationConfig(**described).to_json())
