"""Scores on held-out rows: of each saved model, of their plain average, and of the merged model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.simulations.merge.merge_inputs import Input, task_for
from fedrot.simulations.merge.merge_settings import MergeSettings
from fedrot.simulations.models.alike import label_elsewhere
from fedrot.simulations.report.summaries import LOWER_IS_BETTER
from fedrot.simulations.report.tables import number_style, terminal_table
from fedrot.tensors import widened

#: Titles of the averaged models.
PLAIN, MERGED = "plain average", "merged"
#: Maximum number of held-out rows for scores.
_ROWS = 500


@dataclass(frozen=True)
class Scores:
    """Metrics on ``rows`` held-out rows of a data set, by the title of the model."""

    data: str
    rows: int
    models: Mapping[str, Mapping[str, float]]


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
    found = {}
    for title, tensors in _states(inputs, merged):
        model.load_state_dict(tensors, strict=False)  # Only the first of tied tensors is stored.
        found[title] = training.evaluate(model, task, task.test, rows)
    return Scores(task.data.name, len(rows), found), ""


def _states(
    inputs: Sequence[Input], merged: Mapping[str, Tensor]
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield the title and the tensors of every model, one model at a time."""
    titles = [Path(one.saved.name).resolve().name for one in inputs]
    total, plain = sum(one.weight for one in inputs), dict[str, Tensor]()
    for one, title in zip(inputs, titles, strict=True):
        tensors = widened(one.saved.read())
        yield (title if titles.count(title) == 1 else one.saved.name), tensors
        for name in merged:
            if tensors[name].is_floating_point():
                share = tensors[name] * (one.weight / total)
                plain[name] = plain[name] + share if name in plain else share
    yield PLAIN, {**merged, **plain}
    yield MERGED, merged


def verdict(found: Scores) -> str:
    """Return a sentence that compares the merged model with the plain average and the best input."""
    metric = next(iter(next(iter(found.models.values()))))
    sign = -1 if metric in LOWER_IS_BETTER else 1
    values = {name: own[metric] for name, own in found.models.items()}
    merged, plain = values.pop(MERGED), values.pop(PLAIN)
    best = max(values, key=lambda name: sign * values[name])

    def compared(other: float) -> str:
        if merged == other:
            return "the same as"
        return "better than" if sign * merged > sign * other else "not better than"

    style = number_style(merged, plain, values[best])
    return (
        f"By {metric}, the merged model ({merged:{style}}) is {compared(plain)} the plain average "
        f"({plain:{style}}) and {compared(values[best])} the best model alone ({best}, "
        f"{values[best]:{style}}), on {found.rows} rows."
    )


def table(found: Scores) -> Table:
    """Return a table with a line per model."""
    metrics = list(next(iter(found.models.values())))
    title = f"On {found.rows} held-out rows of {found.data}"
    made = terminal_table(title, ("model", *metrics), ("model",), fold=True)
    for name, values in found.models.items():
        shown = (f"{value:{number_style(value)}}" for value in values.values())
        made.add_row(Text(name), *shown)
    return made
