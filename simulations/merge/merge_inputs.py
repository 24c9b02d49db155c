"""The inputs of a merge: brought to the anchor's coordinates, and the texts to look at them with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedrot.alignment import Alignment, align
from fedrot.anchors import base_cosine
from fedrot.collect.activations import Activations, collect_activations
from fedrot.collect.random_inputs import random_inputs
from fedrot.errors import FedrotError
from fedrot.matching.pairs import squared_distance
from fedrot.matching.problem import Anchor
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.simulations.merge.merge_report import InputReport
from fedrot.simulations.merge.merge_settings import MergeSettings
from fedrot.simulations.models.model_files import about
from fedrot.simulations.models.saved_model import Checkpoint
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.tensors import Tensors, check_finite, compute_dtype
from fedrot.transport import Move, apply_moves

Batches = Sequence[Mapping[str, Tensor]]

#: Texts at a time: the outputs of a language model are as wide as its vocabulary.
BATCH = 64


@dataclass(frozen=True)
class Input:
    """A model on disk, its weight, and how it comes to the anchor's coordinates.

    Attributes:
        cosine: of its embeddings with the anchor's, see ``fedrot.anchors.base_cosine``.
        seconds: wall time of the matching, activations included.
    """

    checkpoint: Checkpoint
    weight: float
    alignment: Alignment
    cosine: float = 1.0
    seconds: float = 0.0

    def own(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return tensors as they are, at least in float32."""
        return {
            name: tensor.to(compute_dtype(tensor)) if tensor.is_floating_point() else tensor
            for name, tensor in self.checkpoint.read(names).items()
        }

    def moved(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the named tensors in the anchor's coordinates; no other is read."""
        return apply_moves(self.own(names), _among(names, self.alignment.moves))


def _among(names: Sequence[str], moves: Iterable[Move]) -> Iterator[Move]:
    """Yield what the moves do to the named tensors."""
    chosen = frozenset(names)
    for move in moves:
        slots = tuple(slot for slot in move.group.slots if slot.tensor in chosen)
        if slots:
            yield replace(move, group=replace(move.group, slots=slots))


def aligned(
    checkpoints: Sequence[Checkpoint],
    weights: Sequence[float],
    options: AlignmentOptions,
    batches: Batches,
) -> list[Input]:
    """Align everybody to the first, one at a time: two models are mapped at once.

    Raises:
        FedrotError: a model is not finite, or cannot be aligned; the message says which.
    """
    first, *others = checkpoints
    for checkpoint in checkpoints:
        _check_finite(checkpoint)
    ours = first.read()
    symmetry = symmetry_of(first.config, ours)
    anchor, evidence = Anchor(ours), _evidence(first, symmetry, options, batches)

    def matched(other: Checkpoint, weight: float) -> Input:
        cosine = base_cosine(other.read(), first.read(), symmetry)
        start = time.perf_counter()
        theirs = other.read()
        with about(other.path):
            found = align(theirs, anchor, symmetry, options, evidence(ours, theirs))
        return Input(other, weight, found, cosine, time.perf_counter() - start)

    still = Alignment(symmetry, (), AlignmentReport((), 0.0, 0.0, 0.0))
    rest = zip(others, weights[1:], strict=True)
    return [Input(first, weights[0], still), *(matched(*one) for one in rest)]


def reported(one: Input, anchor: Input) -> InputReport:
    """Return what happened to an input, with its distances to the anchor over all tensors."""
    before = after = 0.0
    for name in anchor.checkpoint.names if one is not anchor else ():
        ours = anchor.own([name])[name]
        if ours.is_floating_point():
            before += squared_distance([(ours, one.own([name])[name])])
            after += squared_distance([(ours, one.moved([name])[name])])
    return InputReport(
        one.checkpoint.name, one.weight, one.cosine, before, after, one.seconds, one.alignment.report
    )


# What a mapped file was read for stays in memory until the file is let go: whoever looks at all
# tensors reads them one by one.


def _check_finite(checkpoint: Checkpoint) -> None:
    with about(checkpoint.path):
        for name in checkpoint.names:
            check_finite(checkpoint.read([name]))


def _evidence(
    checkpoint: Checkpoint, symmetry: Symmetry, options: AlignmentOptions, batches: Batches
) -> Callable[[Tensors, Tensors], Activations | None]:
    """Return the function from two models' tensors to what is known of them beside the weights."""
    if "residual" not in options.parts:
        return lambda ours, theirs: None
    pair = checkpoint.build(), checkpoint.build()

    def evidence(ours: Tensors, theirs: Tensors) -> Activations:
        for model, tensors in zip(pair, (ours, theirs), strict=True):
            model.load_state_dict(dict(tensors))
        seen = batches or random_inputs(checkpoint.config.to_dict(), batch_size=BATCH)
        return collect_activations(*pair, seen, symmetry)

    return evidence


def batches_of(
    checkpoint: Checkpoint, settings: MergeSettings, rows: int
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
    from fedrot.simulations.models.barrier_models import check_bundled
    from fedrot.simulations.tasks.task import task_of
    from fedrot.simulations.tasks.training import step_batches

    if checkpoint.tokenizer is None:
        check_bundled(checkpoint.path, checkpoint.config)
    rows = settings.rows or rows
    task = task_of(
        SimulationConfig(
            task="mlm" if checkpoint.model_class.__name__.endswith("ForMaskedLM") else "classification",
            data=settings.data or "",
            data_dir=settings.data_dir,
            text_column=settings.text_column,
            label_column=settings.label_column,
            # RoBERTa's positions start after the padding index.
            max_length=min(settings.max_length, checkpoint.config.max_position_embeddings - 2),
            model=str(checkpoint.tokenizer) if checkpoint.tokenizer else None,
            train_limit=rows,
            test_limit=1,
        ).to_json()
    )
    with torch.device("meta"):
        shell = checkpoint.build()
    batches = list(step_batches(task, shell, np.arange(len(task.train)), rows, BATCH, seed=0))
    size = checkpoint.config.vocab_size
    if any(int(batch["input_ids"].max()) >= size for batch in batches):
        raise FedrotError(
            f"The tokenizer of '{checkpoint.path}' has tokens beyond the model's {size}. Save the "
            "model's own tokenizer beside it."
        )
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in batches], task.data.note
