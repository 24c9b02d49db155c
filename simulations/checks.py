"""Checks of experiments before anything is run, and an estimate of their costs."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from time import process_time
from typing import Any

import numpy as np
import torch

from fedrot.errors import FedrotError
from fedrot.simulations.comparison.summary import notes_of, span
from fedrot.simulations.data.class_remarks import UNTESTED, class_remarks, look_alike
from fedrot.simulations.data.read import listed
from fedrot.simulations.engine import Machine
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.cell_run import CellRun
from fedrot.simulations.federation.cells import strategy_of
from fedrot.simulations.models import build_model
from fedrot.simulations.run_folder import Cell, Row
from fedrot.simulations.strategy import NAMED, Strategy
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task, task_of
from fedrot.strategies.fitting.result import FEW
from fedrot.strategies.wire.loaded_model import tensors_of
from fedrot.symmetry import symmetry_of
from fedrot.task_head.names import adapter_task_head_of, task_head_of

#: Steps of training that are timed.
TIMED = 4
#: A run takes between these multiples of the time that is expected.
RANGE = (0.8, 1.4)


@dataclass(frozen=True)
class Checked:
    """An experiment that can be run, and what is known before it is.

    Attributes:
        described: its fields; ``label_names``; ``scored``, a sentence if classes have
            no test row; ``sites``, names or numbers of clients; by ``seeds``, the rows
            of each client and class; and ``strategies`` by name, with their ``code``
            and a sentence, ``says``.
        sentences: about the data.
        test_rows: number of test rows.
        seconds: processor time of a row of training.
        memory: bytes of the models of one job.
    """

    described: Row
    sentences: list[str]
    test_rows: int
    seconds: float
    memory: int


def with_clients(experiment: Experiment) -> Experiment:
    """Return an experiment with its number of clients.

    Without one, each value of the column by which rows are divided is a client.
    """
    if experiment.clients:
        return experiment
    count = len(task_of(experiment.to_json()).clients(experiment.seeds[0]))
    # Strategies that choose among clients are checked again.
    return Experiment.model_validate({**experiment.model_dump(), "clients": count})


def checked(experiment: Experiment) -> Checked:
    """Load data and model of an experiment, try every strategy, and time a step.

    Raises ``FedrotError`` for bad input.
    """
    task = task_of(experiment.to_json())
    training.check_labels(task)
    seeds = {}
    for seed in experiment.seeds:
        names, seeds[str(seed)] = task.partition(seed)
    model = build_model(experiment, task.data, seed=0)
    training.check_model(task, model)
    if experiment.start == "scrambled":
        symmetry_of(model.config, model.state_dict())
    strategies = {}
    for strategy in experiment.strategies:
        try:
            _check_strategy(task, strategy, model)
        except (TypeError, ValueError) as error:
            raise FedrotError(f"strategy '{strategy.name}': {error}") from error
        strategies[strategy.name] = {
            **strategy.model_dump(mode="json"),
            "code": strategy.code(experiment),
            "says": NAMED.get(strategy.name, {}).get("says", ""),
        }
    seed = experiment.seeds[0]
    sizes = [sum(counts) for counts in seeds[str(seed)]]
    sites = [task.site(seed, client) for client in range(experiment.clients)]
    remarks = [*_remarks(task, names, dict(zip(sites, sizes, strict=True)))]
    described = {
        **experiment.model_dump(mode="json"),
        "label_names": [*names],
        "sites": sites,
        "scored": next((remark for remark in remarks if UNTESTED in remark), ""),
        "seeds": seeds,
        "strategies": strategies,
    }
    model_bytes = sum(tensor.nbytes for tensor in tensors_of(model).values())
    sentences = [
        task.data.remarks,
        *remarks,
        *_few_rows(task, model),
        getattr(model, "remark", ""),
    ]
    sentences += [f"{note}." for note in notes_of(described)]
    return Checked(
        described=described,
        sentences=sentences,
        test_rows=len(task.test),
        seconds=_timed(task, model),
        memory=(experiment.clients + 3) * model_bytes,
    )


def _timed(task: Task, model: Any) -> float:
    """Return the processor time of a row in ``TIMED`` steps of training."""
    torch.set_num_threads(1)
    size = task.experiment.batch_size
    rows = task.objective.usable(task.train, np.arange(len(task.train)))
    # As in training, of several batches each has rows of similar lengths.
    for timed in (rows[:size], rows[: TIMED * size]):  # the first step allocates memory
        start = process_time()
        training.train(model, task, timed, seed=0, epochs=1.0)
    return (process_time() - start) / len(timed)


def _check_strategy(task: Task, strategy: Strategy, model: Any) -> None:
    experiment = task.experiment
    known = task.objective.diverged()
    if strategy.guard and strategy.guard not in known:
        raise FedrotError(
            f"unknown metric '{strategy.guard}'; one of {', '.join(known)}"
        )
    if strategy.chooses:
        for seed in experiment.seeds:
            rows = CellRun(experiment, seed, strategy).client_rows()
            if not any(map(len, rows.values())):
                raise FedrotError(
                    f"it needs clients' held-out rows, but holdout "
                    f"{experiment.holdout:g} gives none with seed {seed}; use a larger "
                    "holdout, fewer clients or more rows"
                )
    if strategy.fits and not experiment.lora:
        task_head_of(model.config, model.state_dict())
    if strategy.kind in ("fedrot", "local_finetuning"):
        built = strategy_of(CellRun(experiment, 0, strategy), model)
        options = getattr(built, "alignment", None)  # adapters have none
        if options is not None:
            symmetry = symmetry_of(model.config, model.state_dict())
            options.layer_indices(symmetry.layers)


def _remarks(
    task: Task, names: Sequence[str], sizes: Mapping[int | str, int]
) -> Iterator[str]:
    """Yield sentences about the data; ``sizes`` has the clients of the first seed."""
    experiment = task.experiment
    train = task.data.train
    seed = experiment.seeds[0]
    rows = len(train.labels)
    yield (
        f"{rows} training rows and {len(task.test)} test rows, {len(names)} classes."
    )
    held_out = np.concatenate(
        [task.client_rows(seed, client)[1] for client in range(experiment.clients)]
    )
    if task.objective.uses_labels:
        yield from class_remarks(task.data, held_out if held_out.size else slice(None))
    counts = sizes.values()
    yield f"{len(sizes)} clients have {span(counts)} rows each (seed {seed})."
    if experiment.partition.startswith("column"):
        rows_of = (f"{site} {size}" for site, size in sizes.items())
        yield f"Rows by site: {listed(rows_of)}."
        yield from look_alike("sites", map(str, sizes))
    if task.objective.classifies and task.data.one_class:
        largest = int(np.bincount(train.labels).argmax())
        share = np.mean(task.data.test.labels == largest)
        yield (
            f"A model that always answers '{names[largest]}' would have accuracy "
            f"{share:.3f}."
        )
    lost = rows - sum(counts)
    if lost:
        yield (
            f"Partition {experiment.partition} leaves out {lost} of {rows} rows (seed "
            f"{seed})."
        )
    choosing = [strategy.name for strategy in experiment.strategies if strategy.chooses]
    if choosing and len(held_out) < FEW:
        yield (
            f"Clients hold out {len(held_out)} rows in all (seed {seed}), by which "
            f"{', '.join(choosing)} choose: the choice may be noise. Give more rows, "
            f"or a holdout above {experiment.holdout:g}."
        )


def _few_rows(task: Task, model: Any) -> Iterator[str]:
    """Yield a sentence if sums tell whether a known text is among a client's rows."""
    experiment = task.experiment
    if not any(strategy.fits for strategy in experiment.strategies):
        return
    tensors = tensors_of(model)
    if experiment.lora:
        task_head = adapter_task_head_of(tensors)
    else:
        task_head = task_head_of(model.config, tensors)
    least = 3 * tensors[f"{task_head}.weight"].shape[1]
    seed = experiment.seeds[0]
    clients = range(experiment.clients)
    few = [len(task.client_rows(seed, client)[0]) < least for client in clients]
    if any(few):
        yield (
            f"{sum(few)} of {len(few)} clients send sums over fewer than {least} rows, "
            "three times their width. From such sums, whoever knows a text can tell "
            "whether it is among the rows."
        )


def costs_of(
    cells: Sequence[Cell],
    experiments: Mapping[str, Checked],
) -> dict[str, float]:
    """Return the cost of each cell, by name, in rows of training.

    Of cells that share the first round's trainings only the first has their cost, and
    strategies that differ only at the end share all trainings.
    """
    costs = {}
    trained = set[object]()
    for cell in cells:
        experiment = cell.experiment
        strategy = cell.strategy
        known = experiments[experiment.name]
        rows = sum(map(sum, known.described["seeds"][str(cell.seed)]))
        rounds = experiment.rounds if strategy.kind != "head_only" else 0
        tuned = strategy.kind == "local_finetuning"
        first = cell.trains_first
        # The rounds before local fine-tuning are those of another strategy.
        kind = "fedrot" if tuned else strategy.kind
        usual = {"name": "", "kind": kind, "fit_at_end": False}
        unnamed = strategy.model_copy(update=usual)
        all_rounds = (first, unnamed.model_dump_json())
        shared = rounds if all_rounds in trained else int(first in trained)
        trained |= {first, all_rounds}
        epochs = sum(
            experiment.epochs(number) for number in range(shared + 1, rounds + 1)
        )
        epochs += tuned
        share = strategy.fraction_train or experiment.fraction_train
        # A task head is fitted to sums over all rows: once, or before and after rounds.
        passes = int(strategy.fits)
        if strategy.fit_head:
            passes = 2 * rounds + 1
        evaluated = (
            (rounds + 2) * known.test_rows + experiment.holdout * rows + passes * rows
        )
        costs[cell.name] = rows * share * epochs + training.EVALUATED * evaluated
    return costs


def estimate(
    cells: Sequence[Cell],
    costs: Mapping[str, float],
    known: Mapping[str, Checked],
    machine: Machine,
) -> str:
    """Return a sentence about the time and memory of a run.

    Each new process imports modules and reads data, as this one has done. Processes
    that are more than the cores, with what runs there already, take turns.
    """
    seconds = 0.0
    models = 0
    for cell in cells:
        experiment = known[cell.experiment.name]
        seconds += costs[cell.name] * experiment.seconds
        models = max(models, experiment.memory)
    # macOS counts bytes, Linux kilobytes.
    unit = 1 if sys.platform == "darwin" else 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    jobs = len({cell.trains_first for cell in cells})
    places = machine.places(jobs)
    starts = process_time() if places > 1 else 0.0
    load = max(1.0, (os.getloadavg()[0] + places) / (os.cpu_count() or 1))
    noun = "processes" if places > 1 else "process"
    where = f"in {places} {noun}"
    if machine.ray:
        # The load of this machine is not that of a cluster.
        load = 1.0
        places = 1
        where = f"of one core, {jobs} jobs"
    seconds = (seconds * longer(jobs, places) / places + starts) * load
    return (
        f"This takes about {range_in_words(seconds)} {where} with "
        f"{(used + models) / 1e9:.1f} GB each (from timed steps, starts of processes "
        "and the load of the cores)."
    )


def longer(jobs: int, places: int) -> float:
    """Return how many times longer a run is because no job is divided."""
    return ceil(jobs / places) * places / jobs


def range_in_words(seconds: float) -> str:
    """Return the range of an expected duration as ``3 min to 6 min``."""
    return span([factor * seconds for factor in RANGE], in_words)


def in_words(seconds: float) -> str:
    """Return a duration as ``50 s``, ``3 min`` or ``1 h 20 min``."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
