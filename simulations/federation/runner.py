"""Checks of a run's configurations, and tables of its results."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import read_results

if TYPE_CHECKING:
    from fedrot.simulations.arm import Arm
    from fedrot.simulations.tasks.task import Task

#: Printed where alignment changed nothing in a classification, and no arm fits a task head.
HINT = (
    "If clients have different labels, compare also the average with a fitted task head: --arms "
    "plain,aligned,plain+task-head (docs/methods/head.md; in Flower FedRot(config, fit_head=True))."
)


def check(configs: Sequence[SimulationConfig]) -> None:
    """Load data, partitions and model of every configuration, and try the model on the data.

    Raises ``FedrotError`` for bad input, before anything is run.
    """
    from fedrot.head import head_of
    from fedrot.simulations.arm import Arm
    from fedrot.simulations.models.architectures import pretrained_settings
    from fedrot.simulations.models.build import build_model, model_config
    from fedrot.simulations.tasks.task import task_of
    from fedrot.simulations.tasks.trial import check_head, check_held_out, check_labels, check_model
    from fedrot.symmetry import check_family, symmetry_of

    for config in configs:
        if config.moves and config.model is not None:
            # An unsupported family is refused before its tokenizer and weights are loaded.
            check_family(pretrained_settings(config.model))
        if "pretrained" in config.starts:
            first = task_of(config.pretraining.to_json())
            check_model(first, build_model(first.config, first.data, seed=0))
        task = task_of(config.to_json())
        check_labels(task)
        for seed in config.seeds:
            task.clients(seed)
        known = task.objective.diverged()
        arms = list(map(Arm.parse, config.arms))
        for arm in (arm for arm in arms if arm.chooses):
            check_held_out(task, arm)
        for arm in arms:
            if arm.guard and arm.guard not in known:
                listed = ", ".join(known)
                raise FedrotError(f"arm '{arm.name}': unknown metric '{arm.guard}'; one of {listed}")
        check_head(task)
        model = build_model(config, task.data, seed=0)
        check_model(task, model)
        for arm in (arm for arm in arms if arm.fits_task_head):
            with _naming(arm):
                head_of(model.config, model.state_dict())
        if config.moves:
            symmetry = symmetry_of(model_config(config, task.data), model.state_dict())
            for arm in filter(lambda arm: arm.align, arms):
                with _naming(arm):
                    arm.options.layer_indices(symmetry.layers)


@contextmanager
def _naming(arm: Arm) -> Iterator[None]:
    """Add an arm's name to the errors about it."""
    try:
        yield
    except FedrotError as error:
        raise FedrotError(f"arm '{arm.name}': {error}") from error


def present(out: Path, console: Console, *, brief: bool = False) -> None:
    """Print the results of a run folder, and write its report.

    Args:
        brief: leave the tables of several settings out if sentences say whether alignment helped.
    """
    from fedrot.simulations.arm import TASK_HEAD
    from fedrot.simulations.report.findings.sentences import IDENTICAL, verdicts
    from fedrot.simulations.report.run_page import write_report
    from fedrot.simulations.report.summaries import by_setting, metrics_in
    from fedrot.simulations.report.tables import result_tables

    rows = read_results(out)
    said = verdicts(rows)
    brief = brief and bool(said) and len(by_setting(rows)) > 1
    if not brief:
        for table in result_tables(rows):
            console.print(table)
    if said:
        console.print("What helped? (95 % t intervals over seeds)", style="bold")
        console.print(*(f"  {sentence}" for sentence in said), sep="\n", highlight=False)
    fits = any(TASK_HEAD in row["arm"] for row in rows)
    if "ece" in metrics_in(rows) and not fits and any(IDENTICAL in sentence for sentence in said):
        console.print(HINT, highlight=False)
    if brief:
        console.print(f"Tables: fedrot report {shlex.quote(str(out))}", highlight=False)
    console.print(f"Report: {write_report(out)}")


def print_partitions(configs: Sequence[SimulationConfig], console: Console, *, brief: bool) -> None:
    """Print the partition of each setting's data with the first seed; in brief, clients and rows."""
    from fedrot.simulations.report.tables import partition_table
    from fedrot.simulations.tasks.task import task_of

    said = set[str]()

    def say_once(sentence: str) -> None:
        if sentence not in said:
            console.print(sentence, highlight=False)
        said.add(sentence)

    for config in configs:
        task, seed = task_of(config.to_json()), config.seeds[0]
        for sentence in filter(None, (task.data.note, task.data.said)):
            say_once(sentence)
        names, sizes, counts = task.partition(seed)
        for sentence in _remarks(task, seed, names, counts):
            say_once(sentence)
        if brief and len(configs) > 1:
            rows = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
            say_once(f"{len(sizes)} clients have {rows} rows each (seed {seed}; --dry-run shows more).")
        else:
            console.print(partition_table(counts, names, config.setting, seed))


def _remarks(
    task: Task, seed: int, names: Sequence[str], counts: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Yield sentences about the largest class, rows that no client has, and few held-out rows."""
    import numpy as np

    from fedrot.simulations.arm import Arm
    from fedrot.simulations.data.partition import partition_keys
    from fedrot.strategies.sums.choice import FEW

    config, labels = task.config, task.data.train.labels
    if task.config.task in ("classification", "image") and task.data.kind == "single":
        largest = int(np.bincount(labels).argmax())
        share = float(np.mean(task.data.test.labels == largest))
        yield f"Always '{task.data.label_names[largest]}' would have accuracy {share:.3f}."
    held = sum(map(sum, counts))
    if held < len(labels):
        present = set(partition_keys(labels).tolist())
        totals = [sum(of_class) for of_class in zip(*counts, strict=True)]
        absent = [name for key, name in enumerate(names) if key in present and not totals[key]]
        yield (
            f"Partition {config.partition} leaves out {len(labels) - held} of {len(labels)} training "
            f"rows: no client has the classes {', '.join(absent)} (seed {seed})."
        )
    choosing = [arm for arm in config.arms if Arm.parse(arm).chooses]
    if not choosing:
        return
    rows = sum(len(task.client_rows(seed, client)[1]) for client in range(config.clients))
    if rows < FEW:
        yield (
            f"Clients hold out {rows} rows in all (seed {seed}), by which {', '.join(choosing)} choose: "
            "the choice may be noise. --set holdout=0.3 gives more."
        )


def check_gpus(gpus: float) -> None:
    """Raise ``FedrotError`` if this machine cannot give each job so many GPUs."""
    import torch

    found = torch.cuda.device_count()
    if not (0 <= gpus <= 1 or (gpus > 1 and gpus % 1 == 0)):
        raise FedrotError(f"gpus is {gpus:g}; give a fraction such as 0.5, or a whole number.")
    if gpus > found:
        raise FedrotError(
            f"gpus is {gpus:g} for each job, but PyTorch finds {found or 'no'} GPU(s) on this "
            f"machine; {'give at most ' + str(found) if found else 'omit --gpus'}."
        )


def log_to(handler: logging.Handler) -> None:
    """Send Flower's log to one handler only; the console shows the progress."""
    logger = logging.getLogger("flwr")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
