"""Checks of experiments before anything is run, what is said about their data, and an
estimate.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np
import torch

from fedrot.errors import FedrotError
from fedrot.simulations.engine import Machine
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.cells import CellRun, strategy_of
from fedrot.simulations.models import build_model, model_config, tensors_of
from fedrot.simulations.run_folder import Cell
from fedrot.simulations.strategy import NAMED, Strategy
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task, task_of
from fedrot.strategies.fitting.exchange import FEW
from fedrot.symmetry import symmetry_of
from fedrot.task_head.names import task_head_of


@dataclass(frozen=True)
class Checked:
    """An experiment that can be run, and what is known before it is.

    Attributes:
        described: its fields; ``label_names``; by ``seeds``, the rows of each client
            and class; and ``strategies`` by name, with their ``code`` and a sentence,
            ``says``.
        said: sentences about the data.
        test_rows: number of test rows.
        seconds: processor time of a row of training.
        memory: bytes of the models of one job.
    """

    described: dict[str, Any]
    said: list[str]
    test_rows: int
    seconds: float
    memory: int


def checked(experiment: Experiment) -> Checked:
    """Load data, partitions and model of an experiment, try every strategy, and time a
    training step.

    Raises ``FedrotError`` for bad input.
    """
    task = task_of(experiment.to_json())
    training.check_labels(task)
    parts = {str(seed): task.partition(seed) for seed in experiment.seeds}
    names, first = next(iter(parts.values()))
    model = build_model(experiment, task.data, seed=0)
    training.check_model(task, model)
    if experiment.start == "scrambled":
        symmetry_of(model_config(experiment, task.data), model.state_dict())
    strategies = {}
    for strategy in experiment.strategies:
        try:
            _check_strategy(task, strategy, model)
        except (TypeError, ValueError) as error:
            raise FedrotError(f"strategy '{strategy.name}': {error}") from error
        told = {
            "code": strategy.code(experiment),
            "says": NAMED.get(strategy.name, {}).get("says", ""),
        }
        strategies[strategy.name] = {**strategy.model_dump(mode="json"), **told}
    seeds = {seed: counts for seed, (_, counts) in parts.items()}
    more = {"label_names": [*names], "seeds": seeds, "strategies": strategies}
    size = sum(tensor.nbytes for tensor in tensors_of(model).values())
    torch.set_num_threads(1)
    rows = task.objective.usable(task.train, np.arange(len(task.train)))[
        : experiment.batch_size
    ]
    for _ in range(2):  # the first step allocates memory
        start = process_time()
        training.train(model, task, rows, seed=0, epochs=1.0)
    return Checked(
        {**experiment.model_dump(mode="json"), **more},
        [task.data.said, *_remarks(task, names, [*map(sum, first)])],
        len(task.test),
        (process_time() - start) / len(rows),
        (experiment.clients + 3) * size,
    )


def _check_strategy(task: Task, strategy: Strategy, model: Any) -> None:
    experiment = task.experiment
    known = task.objective.diverged()
    if strategy.guard and strategy.guard not in known:
        raise FedrotError(
            f"unknown metric '{strategy.guard}'; one of {', '.join(known)}"
        )
    clients = strategy.clients or range(experiment.clients)
    for seed in experiment.seeds if strategy.chooses else ():
        if not any(len(task.client_rows(seed, client)[1]) for client in clients):
            raise FedrotError(
                f"it needs clients' held-out rows, but holdout {experiment.holdout:g} "
                f"gives none with seed {seed}; use a larger holdout, fewer clients or "
                "more rows"
            )
    if strategy.fits and not experiment.lora:
        task_head_of(model.config, model.state_dict())
    if strategy.kind == "fedrot":
        built = strategy_of(CellRun(experiment, 0, strategy), model)
        options = getattr(built, "alignment", None)  # adapters have none
        if options is not None:
            symmetry = symmetry_of(
                model_config(experiment, task.data), model.state_dict()
            )
            options.layer_indices(symmetry.layers)


def _remarks(task: Task, names: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    """Yield sentences about rows, clients (first seed), the largest class and few
    held-out rows.
    """
    experiment, labels, seed = (
        task.experiment,
        task.data.train.labels,
        task.experiment.seeds[0],
    )
    between = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
    yield (
        f"{len(labels)} training rows and {len(task.test)} test rows, {len(names)} "
        "classes."
    )
    kind, _, column = experiment.partition.partition(":")
    values = {*map(str, task.data.train.columns[column])} if kind == "column" else ()
    shared = (
        f", of {len(values)} values of '{column}'" if len(values) > len(sizes) else ""
    )
    yield f"{len(sizes)} clients have {between} rows each (seed {seed}){shared}."
    if experiment.task in ("classification", "image") and task.data.kind == "single":
        largest = int(np.bincount(labels).argmax())
        share = float(np.mean(task.data.test.labels == largest))
        yield (
            f"A model that always answers '{names[largest]}' would have accuracy "
            f"{share:.3f}."
        )
    if lost := len(labels) - sum(sizes):
        yield (
            f"Partition {experiment.partition} leaves out {lost} of {len(labels)} rows "
            f"(seed {seed})."
        )
    choosing = [strategy.name for strategy in experiment.strategies if strategy.chooses]
    rows = sum(
        len(task.client_rows(seed, client)[1]) for client in range(experiment.clients)
    )
    if choosing and rows < FEW:
        yield (
            f"Clients hold out {rows} rows in all (seed {seed}), by which "
            f"{', '.join(choosing)} choose: the choice may be noise. Give more rows, "
            f"or a holdout above {experiment.holdout:g}."
        )


def costs_of(
    cells: Sequence[Cell], experiments: Mapping[str, Checked]
) -> dict[str, float]:
    """Return the cost of each cell, by name, in rows of training.

    Of cells that share the first round's trainings only the first has their cost, and
    strategies that differ only at the end share all trainings.
    """
    found, trained = {}, set[object]()
    for cell in cells:
        experiment, strategy, known = (
            cell.experiment,
            cell.strategy,
            experiments[cell.experiment.name],
        )
        rows = sum(map(sum, known.described["seeds"][str(cell.seed)]))
        rounds = experiment.rounds if strategy.kind != "head_only" else 0
        key = cell.trains_first, strategy.learning_rate
        same = (
            key,
            strategy.model_copy(
                update={"name": "", "fit_at_end": False}
            ).model_dump_json(),
        )
        epochs = [experiment.epochs(number) for number in range(1, rounds + 1)]
        shared = rounds if same in trained else int(key in trained)
        share = strategy.fraction_train or experiment.fraction_train
        passes = (2 * rounds + 1 if strategy.fit_head else bool(strategy.fits)) * rows
        evaluated = (rounds + 1) * known.test_rows + experiment.holdout * rows + passes
        found[cell.name] = (
            rows * share * sum(epochs[shared:]) + training.EVALUATED * evaluated
        )
        trained |= {key, same}
    return found


def estimate(
    cells: Sequence[Cell],
    costs: Mapping[str, float],
    known: Mapping[str, Checked],
    machine: Machine,
) -> str:
    """Return a sentence about the time and memory of a run."""
    found = [known[cell.experiment.name] for cell in cells]
    seconds = sum(
        costs[cell.name] * own.seconds for cell, own in zip(cells, found, strict=True)
    )
    scale = 1 if sys.platform == "darwin" else 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale + max(
        own.memory for own in found
    )
    jobs = len({cell.trains_first for cell in cells})
    places = 1 if machine.ray else machine.places(jobs)
    turns = -(-jobs // places)  # a job is not divided
    where = (
        f"of one core, {jobs} jobs"
        if machine.ray
        else f"in {places} process{'es' * (places > 1)}"
    )
    time, memory = in_words(seconds / jobs * turns), f"{held / 1e9:.1f} GB each"
    return f"This takes about {time} {where} with {memory} (from one timed step)."


def in_words(seconds: float) -> str:
    """Return a duration as ``50 s``, ``3 min`` or ``1 h 20 min``."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
