"""Saved models and their mean, evaluated on a user's data; task heads fitted to the
data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

from fedrot.errors import FedrotError
from fedrot.simulations.data.read import listed
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.models import PROBLEM_TYPES
from fedrot.simulations.pretrained import pad_id_of
from fedrot.simulations.saved.load import SavedModel
from fedrot.simulations.tasks.registry import TASKS
from fedrot.simulations.tasks.tagging import TokenClassification
from fedrot.simulations.tasks.training import Task, evaluate, step_batches, task_of
from fedrot.strategies.fitting.exchange import SHRINKAGES, temperature_in_words
from fedrot.task_head.fit import fitted_task_heads, with_task_head
from fedrot.task_head.losses import (
    ONE,
    TEMPERATURES,
    TaskHeads,
    compare_losses,
    smallest,
)
from fedrot.task_head.names import task_head_of
from fedrot.task_head.outputs import SINGLE
from fedrot.task_head.sums import collect_classes
from fedrot.tensors import Tensors

#: Maximum numbers of training rows, held-out rows and tokens of a text; rows per batch
#: of features.
_TRAIN, _TEST, _LENGTH, _BATCH = 8000, 2000, 256, 64


def prepared(saved: SavedModel, data: Mapping[str, Any]) -> tuple[Task, Any, list[int]]:
    """Read data for models like ``saved``; ``data`` has fields of an experiment.

    Returns the task; a model that receives the tensors of one model after the other;
    and its outputs in the order of the data's classes, the others behind, empty for
    language models.
    """
    model, outputs = saved.build(), saved.labels
    config = model.config
    autos = (
        (name, getattr(transformers, f"AutoModelFor{own.auto_model}"))
        for name, own in TASKS.items()
    )
    names = [
        name
        for name, auto in autos
        if auto._model_mapping.get(type(config), 0) is type(model)
    ]
    if not names:
        kind = type(model).__name__
        raise FedrotError(
            f"'{saved.name}' is a {kind}, which --data cannot evaluate. Leave it out."
        )
    kinds = (
        {problem: kind for kind, problem in PROBLEM_TYPES.items()}
        if TASKS[names[0]].classifies
        else {}
    )
    usual = "regression" if kinds and len(outputs) == 1 else ""
    positions = (
        getattr(config, "max_position_embeddings", 0) or _LENGTH
    )  # RoBERTa leaves two out.
    limits = {
        "train_limit": _TRAIN,
        "test_limit": _TEST,
        "max_length": min(_LENGTH, positions - 2),
    }
    given = {**data, "task": names[0], "model": saved.name, **limits}
    given["label_kind"] = kinds.get(config.problem_type, usual)
    task = task_of(Experiment.model_validate(given).to_json())
    config.pad_token_id = pad_id_of(config)
    if not TASKS[names[0]].uses_labels:
        return task, model, []
    order = _order(task, saved)
    if tags := task.data.tags:
        named = replace(
            task.data, tags=(*tags, *(outputs[place] for place in order[len(tags) :]))
        )
        task = replace(task, objective=TokenClassification(task.experiment, named))

    def reorder(_: object, __: object, out: Any) -> Any:
        out.logits = out.logits[..., order]
        return out

    model.register_forward_hook(reorder)
    return task, model, order


def verdict(
    judge: tuple[Task, Any, list[int]],
    models: Sequence[SavedModel],
    merged: Tensors,
    fit_head: bool,
) -> tuple[Tensors, list[str]]:
    """Return the merged model, with the best task head if asked for, and sentences.

    The first compares it with the best of the models and says what to do; ``judge`` is
    ``prepared``'s.
    """
    task, model, order = judge

    def scored(tensors: Tensors) -> Mapping[str, float]:
        model.load_state_dict(
            tensors, strict=False
        )  # A mean has no names of tied tensors.
        return evaluate(model, task, task.test, np.arange(len(task.test)))

    scores = {f"'{saved.name}'": scored(saved.tensors) for saved in models}
    merged, said = _fitted(task, model, order, merged) if fit_head else (merged, [])
    scores["merged"] = found = scored(merged)
    metric = next(iter(found))
    sign = -1 if "perplexity" in metric else 1
    seen = {name: np.round(sign * own[metric], 3) for name, own in scores.items()}
    worth = {name: np.nan_to_num(value, nan=-np.inf) for name, value in seen.items()}
    ours = worth.pop("merged")
    best = max(worth, key=lambda name: worth[name])
    how = (
        "better than"
        if ours > worth[best]
        else "worse than"
        if ours < worth[best]
        else "as good as"
    )
    advice = "" if ours > worth[best] else f" Keep {best}, or try other --parts."
    advice += (
        " --fit-head fits the task head to the training rows."
        if order and not fit_head
        else ""
    )
    first = (
        f"The merged model is {how} the best single one: {metric} {found[metric]:.3f} "
        f"against {scores[best][metric]:.3f} ({best}) on {len(task.test)} held-out "
        f"rows.{advice}"
    )
    for name, own in scores.items():
        said.append(
            f"{name}: "
            f"{', '.join(f'{metric} {value:.3f}' for metric, value in own.items())}."
        )
    return merged, [first, *said]


def _fitted(
    task: Task, model: Any, order: list[int], tensors: Tensors
) -> tuple[Tensors, list[str]]:
    """Return a model with the best of its own and of fitted task heads, and a sentence
    about it.

    TaskHeads are fitted to four fifths of the training rows. On the others, head and
    temperature have the smallest loss.
    """
    if not order:
        raise FedrotError(
            "--fit-head is for classifiers and regressions. Leave it out."
        )
    model.load_state_dict(tensors, strict=False)
    head, rows = task_head_of(model.config, tensors), len(task.train)
    problem = SINGLE if task.data.tags else PROBLEM_TYPES[task.data.kind]
    split = np.split(np.random.default_rng(0).permutation(rows), [max(1, rows // 5)])
    held, kept = ([*step_batches(task, model, part, rows, _BATCH, 0)] for part in split)
    sums = collect_classes(model, kept, head, problem)
    fits = fitted_task_heads(sums, SHRINKAGES, f"{head}.bias" in tensors)
    own = (
        tensors[f"{head}.weight"],
        tensors.get(f"{head}.bias", torch.zeros(len(order))),
    )
    parts = [
        torch.cat([old[None, order].double(), new])
        for old, new in zip(own, fits, strict=True)
    ]
    heads = TaskHeads(parts[0], parts[1], torch.full((1 + len(SHRINKAGES),), -1))
    compared = compare_losses([model], held, head, [heads], problem)
    losses = compared.losses / compared.rows
    best = int(losses.amin(1).argmin())
    place, back = smallest(losses[best]), np.argsort(order)
    found = with_task_head(
        tensors, head, *(part[best][back] / TEMPERATURES[place] for part in parts)
    )
    which = f"a fitted one (shrinkage {SHRINKAGES[best - 1]:g})" if best else "its own"
    loss = (
        f"loss {losses[best, place]:.3f} on {len(split[0])} other rows, "
        f"{losses[0, ONE]:.3f} before"
    )
    return found, [
        f"The task head is {which} at {temperature_in_words(TEMPERATURES[place])}: "
        f"{loss}."
    ]


def _order(task: Task, saved: SavedModel) -> list[int]:
    """Return a model's outputs, those of the data's classes first and in their order.

    Outputs are found by name, and unnamed ones (``LABEL_0``) by number. Raises
    ``FedrotError``.
    """
    data, outputs = task.data, [name.strip().casefold() for name in saved.labels]
    wanted = [str(name).strip().casefold() for name in data.tags or data.label_names]
    count = len(outputs)
    unnamed = outputs == [f"label_{n}" for n in range(count)] and not {*wanted} <= {
        *outputs
    }
    if unnamed or data.kind == "regression":
        outputs = wanted if len(wanted) == count else [str(n) for n in range(count)]
    absent = any(outputs.count(name) != 1 or wanted.count(name) != 1 for name in wanted)
    if absent or (data.kind == "multi" and not data.tags and len(wanted) != count):
        raise FedrotError(
            f"The data has the classes {listed(wanted)}; the outputs of '{saved.name}' "
            f"are {listed(saved.labels)}. Give data with these classes, or correct the "
            "models' id2label."
        )
    first = [outputs.index(name) for name in wanted]
    return first + [n for n in range(count) if n not in first]
