"""Scores on held-out rows: of each saved model, of their plain average, and of the merged model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.simulations.merge.merge_inputs import Input, task_for, titles
from fedrot.simulations.merge.merge_settings import MergeSettings
from fedrot.simulations.models.alike import label_elsewhere
from fedrot.simulations.report.summaries import LOWER_IS_BETTER, Paired, described, paired_difference
from fedrot.simulations.report.tables import Table, format_difference, number_style
from fedrot.tensors import widened

#: Titles of the averaged models.
PLAIN, MERGED = "plain average", "merged"
#: Maximum number of held-out rows for scores.
_ROWS = 500
#: Number of disjoint blocks of rows for intervals.
_BLOCKS = 10


@dataclass(frozen=True)
class Scores:
    """Metrics on ``rows`` held-out rows of a data set, by the title of the model.

    ``blocks`` has the headline metric, the first one, on disjoint blocks of these rows.
    """

    data: str
    rows: int
    models: Mapping[str, Mapping[str, float]]
    blocks: Mapping[str, Sequence[float]]

    @property
    def headline(self) -> str:
        """The metric by which models are compared."""
        return next(iter(self.models[MERGED]))


def scores(
    inputs: Sequence[Input], merged: Mapping[str, Tensor], settings: MergeSettings
) -> tuple[Scores | None, str]:
    """Return the scores of the inputs, of their plain average and of the merged model, and a note.

    The task is that of the model's class. If the class has no task, or the data do not fit, the scores
    are None, and the note gives the reason.
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
        headline = next(iter(found[title]))
        blocks[title] = [training.evaluate(model, task, task.test, part)[headline] for part in parts]
    return Scores(task.data.name, len(rows), found, blocks), ""


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
        f"{what} ({shown[name]:{style}}): {format_difference(_over_blocks(found, name))}"
        for name, what in against.items()
    )
    merged = f"the merged model ({shown[MERGED]:{style}})"
    return (
        f"By {metric}, {merged} against {'; against '.join(compared)}. "
        f"{found.rows} rows; 95 % t intervals over {len(found.blocks[MERGED])} blocks of them."
    )


def _over_blocks(found: Scores, name: str) -> Paired:
    """Return the difference of the merged model from another one, over blocks of rows."""
    pairs = zip(found.blocks[MERGED], found.blocks[name], strict=True)
    lower = found.headline in LOWER_IS_BETTER
    return paired_difference([ours - theirs for ours, theirs in pairs], lower_is_better=lower)


def table(found: Scores) -> Table:
    """Return a table with a line per model: the headline metric, the loss, and at most two others."""
    known = [metric for metric in found.models[MERGED] if metric != "calibrated_loss"]
    metrics = list(dict.fromkeys([*known[:3], *known[-1:]]))
    lines = [
        (name, *(f"{values[metric]:{number_style(values[metric])}}" for metric in metrics))
        for name, values in found.models.items()
    ]
    return Table(
        f"On {found.rows} held-out rows of {found.data}",
        ("model", *metrics),
        lines,
        texts=("model",),
        caption="; ".join(map(described, metrics)) + ".",
    )
