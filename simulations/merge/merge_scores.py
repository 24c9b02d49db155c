"""Scores on held-out rows: of each saved model, of their plain average, and of the merged model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.simulations.merge.merge_inputs import Input, task_for, titles
from fedrot.simulations.merge.merge_settings import MergeSettings
from fedrot.simulations.models.alike import label_elsewhere
from fedrot.simulations.models.saved_model import SavedModel
from fedrot.simulations.report.summaries import LOWER_IS_BETTER, Paired, described, paired_difference
from fedrot.simulations.report.tables import Table, format_difference, number_style
from fedrot.tensors import widened

if TYPE_CHECKING:
    from fedrot.simulations.tasks.task import Task

#: Titles of the averaged models.
PLAIN, MERGED = "plain average", "merged"
#: Maximum number of held-out rows for scores.
_ROWS = 500
#: Number of disjoint blocks of rows for intervals.
_BLOCKS = 10


@dataclass(frozen=True)
class Scores:
    """Metrics on ``rows`` held-out rows of a data set, by the title of the model.

    ``blocks`` has the metrics on disjoint blocks of these rows. The first metric is the headline.
    """

    data: str
    rows: int
    models: Mapping[str, Mapping[str, float]]
    blocks: Mapping[str, Sequence[Mapping[str, float]]]

    @property
    def headline(self) -> str:
        """The metric by which models are compared."""
        return next(iter(self.models[MERGED]))


def scores(
    inputs: Sequence[Input], merged: Mapping[str, Tensor], settings: MergeSettings
) -> tuple[Scores | None, str]:
    """Return the scores of the inputs, of their plain average and of the merged model, and a note.

    The task is that of the model's class. If the class has no task, or the data do not fit, the scores
    are None, and the note gives the reason. Else the note is about outputs without names, or empty.
    """
    from fedrot.simulations.tasks import training
    from fedrot.simulations.tasks.objectives import task_name

    first = inputs[0].saved
    name = task_name(first)
    if name is None:
        return None, f"The models are not scored: no task has class {first.model_class.__name__}."
    try:
        task = task_for(first, settings, name, train_limit=1, test_limit=_ROWS)
    except FedrotError as error:
        return None, f"The models are not scored: {error}"
    wanted = copy.deepcopy(first.config)
    task.objective.configure(wanted, task.data)
    if wanted.num_labels != first.config.num_labels:
        return None, (
            f"The models are not scored: they have {first.config.num_labels} outputs, and "
            f"{task.data.name} has {wanted.num_labels} classes."
        )
    if moved := label_elsewhere(first.config, task.data):
        return None, f"The models are not scored: {moved}."
    model, rows = first.build(), np.arange(len(task.test))
    parts = np.array_split(np.random.default_rng(0).permutation(rows), min(_BLOCKS, len(rows)))
    found, blocks = {}, {}
    for title, tensors in _states(inputs, merged):
        model.load_state_dict(tensors, strict=False)  # Only the first of tied tensors is stored.
        found[title] = training.evaluate(model, task, task.test, rows)
        blocks[title] = [training.evaluate(model, task, task.test, part) for part in parts]
    return Scores(task.data.name, len(rows), found, blocks), _nameless(first, task)


def _nameless(saved: SavedModel, task: Task) -> str:
    """Return a note if the outputs of a classifier have transformers' default names."""
    names = [f"LABEL_{output}" for output in range(saved.config.num_labels)]
    if task.config.task != "classification" or [*saved.config.id2label.values()] != names:
        return ""
    return (
        "The models' outputs have no names. They are taken to be the data's labels in this order: "
        f"{', '.join(task.data.label_names)}."
    )


def _states(
    inputs: Sequence[Input], merged: Mapping[str, Tensor]
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield the title and the tensors of every model, one model at a time."""
    total, plain = sum(one.weight for one in inputs), dict[str, Tensor]()
    for one, title in zip(inputs, titles([one.saved.name for one in inputs]), strict=True):
        tensors = widened(one.saved.read())
        yield title, tensors
        for name in merged:
            if tensors[name].is_floating_point():
                share = tensors[name] * (one.weight / total)
                plain[name] = plain[name] + share if name in plain else share
    yield PLAIN, {**merged, **plain}
    yield MERGED, merged


def verdict(found: Scores) -> str:
    """Return a sentence that compares the merged model with the plain average and the best input.

    The best input is chosen by the same rows, so that the comparison with it is a strict one.
    """
    metric = found.headline
    sign = -1 if metric in LOWER_IS_BETTER else 1
    alone = [name for name in found.models if name not in (PLAIN, MERGED)]
    best = max(alone, key=lambda name: sign * found.models[name][metric])
    shown = {name: found.models[name][metric] for name in (MERGED, PLAIN, best)}
    style = number_style(*shown.values())
    against = {PLAIN: "the plain average", best: f"the best model alone, {best}"}
    compared = (
        f"{what} ({shown[name]:{style}}): {format_difference(_over_blocks(found, name, metric))}"
        for name, what in against.items()
    )
    merged = f"the merged model ({shown[MERGED]:{style}})"
    return (
        f"By {metric}, {merged} against {'; against '.join(compared)}. "
        f"{found.rows} rows; 95 % t intervals over {len(found.blocks[MERGED])} blocks of them."
    )


def _over_blocks(found: Scores, name: str, metric: str) -> Paired:
    """Return the difference of the merged model from another one, over blocks of rows."""
    pairs = zip(found.blocks[MERGED], found.blocks[name], strict=True)
    differences = [ours[metric] - theirs[metric] for ours, theirs in pairs]
    return paired_difference(differences, lower_is_better=metric in LOWER_IS_BETTER)


def tables(found: Scores) -> list[Table]:
    """Return a table of scores, and one of the merged model's differences from each other one.

    Scores are the headline metric, the loss, and at most two others.
    """
    known = [metric for metric in found.models[MERGED] if metric != "calibrated_loss"]
    metrics = list(dict.fromkeys([*known[:3], *known[-1:]]))
    lines = [
        (name, *(f"{values[metric]:{number_style(values[metric])}}" for metric in metrics))
        for name, values in found.models.items()
    ]
    compared = list(dict.fromkeys([found.headline, metrics[-1]]))
    differences = [
        (name, *(format_difference(_over_blocks(found, name, metric)) for metric in compared))
        for name in found.models
        if name != MERGED
    ]
    texts = ("model", "the merged model minus")
    title = f"On {found.rows} rows of {found.data}, which this command did not use otherwise"
    described_all = "; ".join(map(described, metrics)) + "."
    intervals = f"95 % t intervals over {len(found.blocks[MERGED])} blocks of these rows."
    return [
        Table(title, ("model", *metrics), lines, texts, described_all),
        Table("Differences", ("the merged model minus", *compared), differences, texts, intervals),
    ]
