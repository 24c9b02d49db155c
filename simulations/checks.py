"""Checks of experiments before anything is run, what is said about their data, and an estimate."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from time import process_time
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedrot.errors import FedrotError
from fedrot.head import head_of
from fedrot.simulations.engine import Machine
from fedrot.simulations.federation.cells import Cell, CellRun, strategy_of
from fedrot.simulations.models import (
    build_model,
    model_config,
    pretrained_settings,
    tensors_of,
)
from fedrot.simulations.settings import Experiment
from fedrot.simulations.strategy import Strategy
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.simulations.tasks.training import check_held_out, check_labels, check_model
from fedrot.strategies.sums.choice import FEW
from fedrot.symmetry import check_family, symmetry_of

#: Largest number of a client's classes that are listed.
MOST_CLASSES = 8


def check(experiments: Sequence[Experiment]) -> None:
    """Load data, partitions and model of every experiment, and try the model on the data.

    Raises ``FedrotError`` for bad input, before anything is run.
    """
    for experiment in experiments:
        if experiment.moves and experiment.model is not None:
            # An unsupported family is refused before its tokenizer and weights are loaded.
            check_family(pretrained_settings(experiment.model))
        task = task_of(experiment.to_json())
        check_labels(task)
        for seed in experiment.seeds:
            task.clients(seed)
        model = build_model(experiment, task.data, seed=0)
        check_model(task, model)
        for strategy in experiment.strategies:
            try:
                _check_strategy(task, strategy, model)
            except (TypeError, ValueError) as error:
                raise FedrotError(f"strategy '{strategy.name}': {error}") from error


def _check_strategy(task: Task, strategy: Strategy, model: Any) -> None:
    experiment = task.experiment
    known = task.objective.diverged()
    if strategy.guard and strategy.guard not in known:
        raise FedrotError(f"unknown metric '{strategy.guard}'; one of {', '.join(known)}")
    if strategy.chooses:
        check_held_out(task, strategy.clients)
    if strategy.fits and not experiment.lora:
        head_of(model.config, model.state_dict())
    if strategy.kind == "fedrot":
        built = strategy_of(CellRun(experiment, 0, strategy), model)
        options = getattr(built, "alignment", None)  # adapters have none
        if options is not None:
            symmetry = symmetry_of(model_config(experiment, task.data), model.state_dict())
            options.layer_indices(symmetry.layers)


def print_data(experiments: Sequence[Experiment], console: Console, *, brief: bool) -> None:
    """Print each experiment's rows, classes and clients with the first seed; in brief, no table."""
    sentences: list[str] = []
    for experiment in experiments:
        task, seed = task_of(experiment.to_json()), experiment.seeds[0]
        names, sizes, counts = task.partition(seed)
        sentences += [task.data.said, *_remarks(task, seed, names, sum(sizes))]
        if brief and len(experiments) > 1:
            rows = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
            sentences += [f"{len(sizes)} clients have {rows} rows each (seed {seed}; --dry-run: more)."]
            continue
        for client, own in enumerate(counts):
            most = sorted(zip(own, names, strict=False), reverse=True)
            shown = [f"{name} {number}" for number, name in most[:MOST_CLASSES] if number]
            rest = [number for number, _ in most[MOST_CLASSES:] if number]
            shown += [f"{len(rest)} others {sum(rest)}"] if rest else []
            sentences += [f"Client {client}: {sum(own)} rows, {', '.join(shown)}."]
    for sentence in filter(None, dict.fromkeys(sentences)):
        console.print(sentence, highlight=False)


def _remarks(task: Task, seed: int, names: Sequence[str], divided: int) -> Iterator[str]:
    """Yield sentences about rows, the largest class, rows that no client has, few held-out rows."""
    experiment, labels = task.experiment, task.data.train.labels
    yield (
        f"{len(labels)} training rows and {len(task.data.test.labels)} test rows, {len(names)} classes, "
        f"{experiment.clients} clients."
    )
    if experiment.task in ("classification", "image") and task.data.kind == "single":
        largest = int(np.bincount(labels).argmax())
        share = float(np.mean(task.data.test.labels == largest))
        yield f"Always '{names[largest]}' would have accuracy {share:.3f}."
    if divided < len(labels):
        lost = len(labels) - divided
        yield f"Partition {experiment.partition} leaves out {lost} of {len(labels)} rows (seed {seed})."
    choosing = [strategy.name for strategy in experiment.strategies if strategy.chooses]
    rows = sum(len(task.client_rows(seed, client)[1]) for client in range(experiment.clients))
    if choosing and rows < FEW:
        yield (
            f"Clients hold out {rows} rows in all (seed {seed}), by which {', '.join(choosing)} choose: "
            "the choice may be noise. --set holdout=0.3 gives more."
        )


def costs_of(cells: Sequence[Cell], partitions: Mapping[str, Any]) -> dict[str, float]:
    """Return the cost of each cell, by name, in rows of training.

    Of cells that share the first round's trainings only the first has their cost, and strategies that
    differ only at the end share all trainings.
    """
    found, trained = {}, set[object]()
    for cell in cells:
        experiment, strategy = cell.experiment, cell.strategy
        rows = sum(partitions[experiment.name]["seeds"][str(cell.seed)]["sizes"])
        rounds = experiment.rounds if strategy.kind != "head_only" else 0
        key = cell.trains_first, strategy.learning_rate
        same = key, strategy.model_copy(update={"name": "", "fit_at_end": False}).model_dump_json()
        first = 0.0 if not rounds or key in trained else experiment.epochs(1)
        later = 0.0 if same in trained else sum(map(experiment.epochs, range(2, rounds + 1)))
        share = strategy.fraction_train or experiment.fraction_train
        test = len(task_of(experiment.to_json()).test)
        passes = (2 * rounds + 1 if strategy.fit_head else bool(strategy.fits)) * rows
        evaluated = (rounds + 1) * test + experiment.holdout * rows + passes
        found[cell.name] = rows * share * (first + later) + training.EVALUATED * evaluated
        trained |= {key, same}
    return found


def estimate(cells: Sequence[Cell], costs: Mapping[str, float], machine: Machine) -> str:
    """Return a sentence about the time and memory of a run, from one timed step of each experiment."""
    seconds, largest, threads = 0.0, 0, torch.get_num_threads()
    torch.set_num_threads(1)
    for json in dict.fromkeys(cell.experiment.to_json() for cell in cells):
        task = task_of(json)
        model = build_model(task.experiment, task.data, seed=0)
        usable = task.objective.usable(task.train, np.arange(len(task.train)))
        rows = usable[: task.experiment.batch_size]
        for _ in range(2):  # the first one allocates memory
            start = process_time()
            training.train(model, task, rows, seed=0, epochs=1.0)
            took = process_time() - start
        own = (cell for cell in cells if cell.experiment.to_json() == json)
        seconds += took / max(len(rows), 1) * sum(costs[cell.name] for cell in own)
        copies = task.experiment.clients + 3
        largest = max(largest, copies * sum(own.nbytes for own in tensors_of(model).values()))
    torch.set_num_threads(threads)
    scale = 1 if sys.platform == "darwin" else 1024
    held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale + largest) / 1e9
    jobs = len({cell.trains_first for cell in cells})
    if machine.ray or machine.gpus:
        return f"About {in_words(seconds)} of one core's time in {jobs} jobs with {held:.1f} GB each."
    places = machine.places(jobs)
    # A job is not divided.
    turns = -(-jobs // places)
    return (
        f"This takes about {in_words(seconds / jobs * turns)} in {places} process"
        f"{'es' if places > 1 else ''} with {held:.1f} GB each (from one timed step)."
    )


def in_words(seconds: float) -> str:
    """Return a duration as ``50 s``, ``3 min`` or ``1 h 20 min``."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
