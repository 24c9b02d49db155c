"""Inputs of a merge: saved models aligned to the anchor, and batches of texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedrot.alignment import Alignment, align
from fedrot.anchors import base_cosine
from fedrot.collect.activations import Activations, probing
from fedrot.errors import FedrotError
from fedrot.matching.pairs import squared_distance
from fedrot.matching.problem import Anchor
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.simulations.merge.merge_report import InputReport
from fedrot.simulations.merge.merge_settings import MergeSettings
from fedrot.simulations.models.model_files import about
from fedrot.simulations.models.saved_model import ARCHITECTURE, SavedModel, check_alike, check_bundled
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.tensors import Tensors, check_finite, compute_dtype
from fedrot.transport import Move, apply_moves

Batches = Sequence[Mapping[str, Tensor]]

#: Texts per batch. The outputs of a language model are as wide as its vocabulary.
BATCH = 64


@dataclass(frozen=True)
class Input:
    """A saved model, its weight, and its alignment to the anchor."""

    saved: SavedModel
    weight: float
    alignment: Alignment

    def own(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return tensors before alignment, at least in float32."""
        return {
            name: tensor.to(compute_dtype(tensor)) if tensor.is_floating_point() else tensor
            for name, tensor in self.saved.tensors.read(names).items()
        }

    def moved(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the named tensors after alignment; no other tensor is read."""
        return apply_moves(self.own(names), _among(names, self.alignment.moves))


def _among(names: Sequence[str], moves: Iterable[Move]) -> Iterator[Move]:
    """Yield the moves, limited to the named tensors."""
    chosen = frozenset(names)
    for move in moves:
        slots = tuple(slot for slot in move.group.slots if slot.tensor in chosen)
        if slots:
            yield replace(move, group=replace(move.group, slots=slots))


def check_mergeable(one: SavedModel, other: SavedModel) -> None:
    """Check that two models differ only in the values of their tensors.

    Raises:
        FedrotError: they differ in class, architecture, vocabulary or a shape; the message says where.
    """
    ours, theirs = one.tensors.shapes, other.tensors.shapes
    check_alike(one, other, ("architectures", *ARCHITECTURE))
    for name, shape in ours.items():
        if theirs.get(name) != shape:
            raise FedrotError(
                f"Different shapes: the tensor '{name}' is {shape} in '{one.path}' and "
                f"{theirs.get(name)} in '{other.path}'. Only models of one architecture can be merged."
            )


def aligned(
    models: Sequence[SavedModel],
    weights: Sequence[float],
    options: AlignmentOptions,
    batches: Batches,
) -> list[tuple[Input, InputReport]]:
    """Align all models to the first, one at a time; two models are mapped at once.

    Raises:
        FedrotError: a model is not finite, or cannot be aligned; the message says which.
    """
    first, *others = models
    for model in models:
        with about(model.path):
            # Tensor by tensor: read pages stay in memory as long as one tensor of a file is kept.
            for name in model.tensors.names:
                check_finite(model.tensors.read([name]))
    ours = first.tensors.read()
    symmetry = symmetry_of(first.config, ours)
    anchor, evidence = Anchor(ours), _evidence(first, symmetry, options, batches)

    def matched(other: SavedModel) -> Alignment:
        theirs = other.tensors.read()
        with about(other.path):
            return align(theirs, anchor, symmetry, options, evidence(ours, theirs))

    def with_report(other: SavedModel, weight: float) -> tuple[Input, InputReport]:
        cosine = base_cosine(other.tensors.read(), first.tensors.read(), symmetry)
        start = time.perf_counter()
        one = Input(other, weight, matched(other))
        seconds, distances = time.perf_counter() - start, _distances(one, still)
        return one, InputReport(other.name, weight, cosine, *distances, seconds, one.alignment.report)

    still = Input(first, weights[0], Alignment(symmetry, (), AlignmentReport((), 0.0, 0.0, 0.0)))
    report = InputReport(first.name, weights[0], 1.0, 0.0, 0.0, 0.0, still.alignment.report)
    rest = zip(others, weights[1:], strict=True)
    return [(still, report), *(with_report(*one) for one in rest)]


def _distances(one: Input, anchor: Input) -> tuple[float, float]:
    """Return the squared distances to the anchor over all tensors, before and after alignment."""
    before = after = 0.0
    for name in anchor.saved.tensors.names:
        ours = anchor.own([name])[name]
        if ours.is_floating_point():
            before += squared_distance([(ours, one.own([name])[name])])
            after += squared_distance([(ours, one.moved([name])[name])])
    return before, after


def _evidence(
    saved: SavedModel, symmetry: Symmetry, options: AlignmentOptions, batches: Batches
) -> Callable[[Tensors, Tensors], Activations | None]:
    """Return the function from two models' tensors to their activations, or to None if none count."""
    if "residual" not in options.parts:
        return lambda ours, theirs: None
    config = saved.config.to_dict()
    return probing(saved.build, config, symmetry, batches=batches, batch_size=BATCH)


def batches_of(
    saved: SavedModel, settings: MergeSettings, rows: int
) -> tuple[list[dict[str, Tensor]], str]:
    """Return training texts as batches of a model's inputs, and a note on the data set's splits.

    Texts are tokenised with the model's tokenizer, or the bundled one if it has none. Tokens are
    hidden for a masked language model, as in training. Labels are left out.

    Args:
        settings: the data set, its columns, the number of texts and of tokens.
        rows: texts at most, if the settings do not say.

    Raises:
        FedrotError: the data cannot be used, or the tokenizer is not the model's.
    """
    from fedrot.simulations.config import SimulationConfig
    from fedrot.simulations.tasks.task import task_of
    from fedrot.simulations.tasks.training import step_batches

    check_bundled(saved)
    rows = settings.rows or rows
    described = {
        "task": "mlm" if saved.model_class.__name__.endswith("ForMaskedLM") else "classification",
        **settings.model_dump(include={"data", "data_dir", "text_column", "label_column"}),
        # RoBERTa's positions start after the padding index.
        "max_length": min(settings.max_length, saved.config.max_position_embeddings - 2),
        "model": str(saved.tokenizer) if saved.tokenizer else None,
        "train_limit": rows,
        "test_limit": 1,
    }
    task = task_of(SimulationConfig(**described).to_json())
    with torch.device("meta"):
        shell = saved.build()
    batches = list(step_batches(task, shell, np.arange(len(task.train)), rows, BATCH, seed=0))
    size = saved.config.vocab_size
    if any(int(batch["input_ids"].max()) >= size for batch in batches):
        raise FedrotError(
            f"The tokenizer of '{saved.path}' has tokens beyond the model's {size}. Save the "
            "model's own tokenizer beside it."
        )
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in batches], task.data.note
