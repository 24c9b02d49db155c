"""Saved models and their mean, evaluated on a user's data, with fitted task heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from fedrot.errors import FedrotError
from fedrot.simulations.data.labels import PROBLEM_TYPES
from fedrot.simulations.data.read import listed
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.model_labels import places_of
from fedrot.simulations.models import by_position
from fedrot.simulations.pretrained import pad_id_of
from fedrot.simulations.report.tables import Table
from fedrot.simulations.saved.load import SavedModel
from fedrot.simulations.saved.mean_change import SCALES, MeanChange
from fedrot.simulations.scenario import Settings
from fedrot.simulations.tasks.objective import Scores
from fedrot.simulations.tasks.tagging import TokenClassification
from fedrot.simulations.tasks.task_registry import TASKS
from fedrot.simulations.tasks.training import Task, evaluate, step_batches, task_of
from fedrot.task_head.choice import (
    SHRINKAGES,
    Candidate,
    choose,
    votes_on,
    with_fitted_task_heads,
)
from fedrot.task_head.fit import with_task_head
from fedrot.task_head.losses import ONE, temperature_in_words
from fedrot.task_head.names import task_head_of
from fedrot.task_head.outputs import SINGLE
from fedrot.task_head.sums import collect_classes
from fedrot.tensors import Tensors

#: Maximum numbers of training rows, and of held-out rows.
_TRAIN = 8000
_TEST = 2000

#: Maximum number of tokens of a text.
_LENGTH = 256

#: Rows per batch of features.
_BATCH = 64


class Judge(NamedTuple):
    """What evaluates models of one class on a user's data.

    Attributes:
        task: of the data.
        model: receives the tensors of one model after the other.
        order: its outputs in the order of the data's classes, the others behind; empty
            for language models.
        remark: a sentence if this order is that of numbers.
    """

    task: Task
    model: Any
    order: list[int]
    remark: str


def prepared(saved: SavedModel, data: Settings) -> Judge:
    """Read data for models like ``saved``; ``data`` has fields of an experiment."""
    model = saved.build()
    config = model.config
    name = _task_name(saved.name, model)
    label_kind = ""
    if TASKS[name].classifies:
        kinds = {problem_type: kind for kind, problem_type in PROBLEM_TYPES.items()}
        label_kind = kinds.get(
            config.problem_type, "regression" if len(saved.labels) == 1 else ""
        )
    positions = (
        getattr(config.get_text_config(), "max_position_embeddings", 0) or _LENGTH
    )
    fields = {
        **data,
        "task": name,
        "model": saved.name,
        "label_kind": label_kind,
        "train_limit": _TRAIN,
        "test_limit": _TEST,
        # RoBERTa leaves two positions out.
        "max_length": min(_LENGTH, positions - 2),
    }
    task = task_of(Experiment.model_validate(fields).to_json())
    config.pad_token_id = pad_id_of(config)
    if not TASKS[name].uses_labels:
        return Judge(task, model, [], "")
    order, remark = _order(task, saved)
    if tags := task.data.tags:
        behind = (saved.labels[place] for place in order[len(tags) :])
        named = replace(task.data, tags=(*tags, *behind))
        task = replace(task, objective=TokenClassification(task.experiment, named))

    def reorder(_: object, __: object, out: Any) -> Any:
        out.logits = out.logits[..., order]
        return out

    model.register_forward_hook(reorder)
    return Judge(task, model, order, remark)


def _task_name(saved: str, model: Any) -> str:
    """Return the name of the task whose models have this class."""
    for name, traits in TASKS.items():
        auto = getattr(transformers, f"AutoModelFor{traits.auto_model}")
        if auto._model_mapping.get(type(model.config), 0) is type(model):
            return name
    raise FedrotError(
        f"'{saved}' is a {type(model).__name__}, which --data cannot evaluate. Leave "
        "it out."
    )


def verdict(
    judge: Judge,
    models: Sequence[SavedModel],
    change: MeanChange,
    fit_head: bool,
) -> tuple[Tensors, list[Any]]:
    """Return the merged model, with the best task head if asked for, and sentences.

    Of several scales that with the lowest loss is taken, at a tie the smallest. The
    first sentence compares it with the best of the models and says what to do; behind
    the sentences is a table of all. ``judge`` is ``prepared``'s.
    """
    single = {f"'{saved.name}'": _scores(judge, saved.tensors) for saved in models}
    scales = SCALES if change.base else {"merged": 1.0}
    scaled: dict[str, Scores] = {}
    for name, scale in scales.items():
        tensors, fit = change.at(scale), ""
        if fit_head:
            tensors, fit = _fitted(judge, tensors)
        scaled[name] = _scores(judge, tensors)
        if _best(scaled, "loss") == name:
            taken, merged, sentence = name, tensors, fit
    choice = (
        f"Of the scales of the mean change, {taken} has the lowest loss on these rows: "
        "it is the merged model."
    )
    comparison = _comparison(judge, single, scaled[taken], fit_head)
    sentences = [comparison, judge.remark, choice if change.base else "", sentence]
    lines = [
        [name, *(f"{value:z.3f}" for value in values.values())]
        for name, values in {**single, **scaled}.items()
    ]
    return merged, [
        *filter(None, sentences),
        Table("", ["model", *scaled[taken]], lines, ["model"]),
    ]


def _scores(judge: Judge, tensors: Tensors) -> Scores:
    """Return a model's metrics on the test rows."""
    task, model, *_ = judge
    # A mean has no names of tied tensors.
    model.load_state_dict(tensors, strict=False)
    return evaluate(model, task, task.test, np.arange(len(task.test)))


def _best(named: Mapping[str, Scores], metric: str) -> str:
    """Return the first of the best models by a metric."""
    return max(named, key=lambda name: _worth(named[name], metric))


def _worth(scores: Scores, metric: str) -> float:
    """Return what decides: equal if equal in print, NaN below all numbers."""
    sign = -1 if metric == "loss" or "perplexity" in metric else 1
    rounded = np.round(sign * scores[metric], 3)
    return float(np.nan_to_num(rounded, nan=-np.inf))


def _comparison(
    judge: Judge, single: Mapping[str, Scores], merged: Scores, fit_head: bool
) -> str:
    """Return whether a merged model is better than the best single one, and advice."""
    metric, *_ = merged
    best = _best(single, metric)
    gain = _worth(merged, metric) - _worth(single[best], metric)
    comparison = "worse than" if gain < 0 else "as good as"
    advice = f" Keep {best}, or try other --parts."
    if gain > 0:
        comparison = "better than"
        advice = ""
    if judge.order and not fit_head:
        advice += " --fit-head fits the task head to the training rows."
    return (
        f"The merged model is {comparison} the best single one: {metric} "
        f"{merged[metric]:z.3f} against {single[best][metric]:z.3f} ({best}) on "
        f"{len(judge.task.test)} held-out rows.{advice}"
    )


def _fitted(judge: Judge, tensors: Tensors) -> tuple[Tensors, str]:
    """Return a model with the best of its own and of fitted heads, and a sentence.

    Heads are fitted to four fifths of the training rows. On the others, head and
    temperature have the smallest loss.
    """
    task, model, order, _ = judge
    if not order:
        raise FedrotError(
            "--fit-head is for classifiers and regressions. Leave it out."
        )
    model.load_state_dict(tensors, strict=False)
    name = task_head_of(model.config, tensors)
    problem_type = SINGLE if task.data.tags else PROBLEM_TYPES[task.data.kind]
    rows = len(task.train)
    shuffled = np.random.default_rng(0).permutation(rows)
    held_out, training = np.split(shuffled, [max(1, rows // 5)])
    sums = collect_classes(model, _batches(task, model, training), name, problem_type)
    # Heads are fitted and compared in the order of the data's classes.
    weight = tensors[f"{name}.weight"][order].double()
    bias = tensors.get(f"{name}.bias", torch.zeros(len(order)))[order].double()
    old = Candidate("merged", weight, bias)
    fitted = with_fitted_task_heads(old, sums, SHRINKAGES, f"{name}.bias" in tensors)
    others = _batches(task, model, held_out)
    votes = votes_on([old, *fitted], model, others, name, sums)
    choice = choose(votes, old, fitted)
    taken = choice.taken
    back = np.argsort(order)
    changed = with_task_head(
        tensors,
        name,
        taken.weight[back] / choice.temperature,
        taken.bias[back] / choice.temperature,
    )
    which = "its own"
    if taken.fitted:
        which = f"a fitted one (shrinkage {taken.shrinkage:g})"
    divisor = choice.temperature * taken.divisor
    loss = float(votes.at_best(taken))
    before = float(votes.means(old)[:, ONE])
    return changed, (
        f"The task head is {which} at {temperature_in_words(divisor)}: "
        f"loss {loss:z.3f} on {len(held_out)} other rows, {before:z.3f} before the fit."
    )


def _batches(task: Task, model: Any, rows: Any) -> list[Tensors]:
    return [*step_batches(task, model, rows, len(task.train), _BATCH, 0)]


def _order(task: Task, saved: SavedModel) -> tuple[list[int], str]:
    """Return a model's outputs, those of the data's classes first and in their order.

    The second value is a sentence if numbers decide, see ``places_of``. Raises
    ``FedrotError``.
    """
    data = task.data
    classes = data.tags or data.label_names
    labels = saved.labels
    first, unnamed = places_of(labels, classes)
    several = data.kind == "multi" and not data.tags
    if -1 in first or (several and len(classes) != len(labels)):
        raise FedrotError(
            f"The data has the classes {listed(classes)}; the outputs of "
            f"'{saved.name}' are {listed(labels)}. Give data with these classes, or "
            "correct the models' id2label."
        )
    behind = [place for place in range(len(labels)) if place not in first]
    return first + behind, by_position(saved.name, classes) if unnamed else ""
