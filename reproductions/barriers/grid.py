"""Grids of barriers: pairs of small models as TOML files describe them, and the run of
a grid.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedrot._io import read_json, write_json, write_text
from fedrot.errors import FedrotError
from fedrot.simulations.engine import Ended, Job, Machine, Tell, run_jobs
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.models import build_model
from fedrot.simulations.run_folder import only_writer, read_rows, versions
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task, task_of
from fedrot.symmetry import symmetry_of
from reproductions.barriers.line import (
    BarrierLine,
    lines_of,
    measure,
    training_batches,
    write_rows,
)
from reproductions.barriers.methods import METHODS

#: Folder of tracebacks.
FAILURES = "failures"
Sharing = Literal["same", "thirds", "disjoint"]

#: The number of pieces of the training rows, and the pieces that each of the two models
#: sees.
SHARING: Mapping[Sharing, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "same": (1, (0,), (0,)),
    "thirds": (3, (0, 1), (1, 2)),
    "disjoint": (2, (0,), (1,)),
}


class Cell(BaseModel):
    """Pairs of models of one experiment that share their training data in one way.

    Attributes:
        experiment: model, data and training; fields about clients, strategies and
            rounds are ignored.
        pairs: seeds of the two models. A seed decides the initialisation and the
            batches of its model; both seeds together decide how the rows are divided.
        points: positions on the line.
        rows: training rows for the methods that look at data.
        methods: those that are measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment: Experiment
    sharing: Sharing
    pairs: tuple[tuple[int, int], ...]
    points: Annotated[int, Field(ge=3)] = 21
    rows: Annotated[int, Field(gt=0)] = 2048
    methods: tuple[str, ...]

    @field_validator("methods")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in value if name not in METHODS]
        if unknown or not value:
            problem = (
                f"unknown method '{unknown[0]}'" if unknown else "no method is given"
            )
            raise ValueError(f"{problem}; choose from {', '.join(METHODS)}")
        return value

    @field_validator("points")
    @classmethod
    def _has_a_middle(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(
                f"is {value}; it must be odd, so that the middle is one of them"
            )
        return value

    @field_validator("pairs")
    @classmethod
    def _different(
        cls, value: tuple[tuple[int, int], ...]
    ) -> tuple[tuple[int, int], ...]:
        if not value or len(set(value)) != len(value) or any(a == b for a, b in value):
            raise ValueError(
                f"are {value}; at least one is needed, each once, of two different "
                "seeds"
            )
        return value

    @property
    def name(self) -> str:
        """The cell's name in rows, tables and files."""
        return f"{re.sub(r'[^a-zA-Z0-9_]+', '-', self.experiment.name)}-{self.sharing}"

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that a pair's results depend on, without the seeds."""
        return self.model_dump(
            mode="json", exclude={"pairs": True, "experiment": {"data_dir"}}
        )

    def file(self, out: Path, seeds: tuple[int, int]) -> Path:
        """Return the file of a pair's lines in the folder of a grid."""
        return out / "lines" / f"{self.name}.{seeds[0]}-{seeds[1]}.jsonl"


def read_cells(path: Path, data_dir: Path | None = None) -> tuple[Cell, ...]:
    """Read the cells of a TOML file of ``[base]`` and one ``[[task]]`` per data set.

    A task has the fields of ``Experiment``, ``points``, ``rows``, ``methods`` and
    ``pairs``, a table from sharing to pairs of seeds. ``base`` has the fields that
    tasks share. ``ValueError`` if the file is no TOML, or describes no task or an
    impossible one.
    """
    given = {"data_dir": data_dir} if data_dir else {}
    try:
        described = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise FedrotError(f"'{path}' is no TOML: {error}") from error
    base, tasks = described.get("base", {}), described.get("task", [])
    cells = tuple(cell for task in tasks for cell in _cells({**base, **task, **given}))
    # Names of files are the same in capitals on some systems.
    if not cells or len({cell.name.casefold() for cell in cells}) != len(cells):
        raise FedrotError(
            f"'{path}' needs at least one [[task]], each with a name of its own."
        )
    return cells


def _cells(task: dict[str, Any]) -> Iterator[Cell]:
    pairs = task.pop("pairs", {})
    if not isinstance(pairs, dict) or not pairs:
        raise FedrotError(
            f"Task '{task.get('name', task.get('data'))}' of the grid has no pairs."
        )
    own = {
        name: task.pop(name) for name in ("points", "rows", "methods") if name in task
    }
    experiment = Experiment.from_flat(task)
    for sharing, seeds in pairs.items():
        yield Cell(experiment=experiment, sharing=sharing, pairs=seeds, **own)


def shared_rows(
    count: int, sharing: Sharing, seeds: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the training rows of the two models of a pair, ascending."""
    pieces, *chosen = SHARING[sharing]
    parts = np.array_split(np.random.default_rng(seeds).permutation(count), pieces)
    first, second = (
        np.sort(np.concatenate([parts[i] for i in which])) for which in chosen
    )
    return first, second


def run_grid(
    cells: Sequence[Cell],
    out: Path,
    command: str,
    report: Callable[[str], None],
    workers: int | None = None,
) -> list[BarrierLine]:
    """Measure the pairs that ``out`` does not contain yet; return all lines.

    ``out`` contains ``config.json``, ``versions.json`` and ``lines/`` with a file per
    finished pair. ``rows.jsonl`` with all lines is written at the end, or when the run
    is stopped.

    Args:
        report: called with one sentence per pair.
        workers: processes, each with one thread, one per core if None; 1 works in this
            process.

    Raises:
        FileExistsError: ``out`` contains a run that is no grid of barriers.
        FedrotError: ``out`` contains a cell of the same name with other settings, or
            another run writes to it.
        RuntimeError: pairs failed; their tracebacks are in ``failures/``, and the
            others are finished.
    """
    with only_writer(out):
        _record(cells, out, command)
        (out / "lines").mkdir(exist_ok=True)
        jobs = [
            Job(cell.file(out, seeds).stem, run_pair, (cell, seeds, out))
            for cell in cells
            for seeds in cell.pairs
            if not cell.file(out, seeds).exists()
        ]
        shutil.rmtree(out / FAILURES, ignore_errors=True)
        failed: list[Job] = []

        def hear(job: Job, said: str | Ended) -> None:
            if isinstance(said, str):
                report(f"{job.name}: {said}")
            elif said.failure:
                failed.append(job)
                (file := out / FAILURES / f"{job.name}.txt").parent.mkdir(exist_ok=True)
                write_text(file, said.failure)
                report(
                    f"{job.name}: FAILED, see {file}: {said.failure.splitlines()[-1]}"
                )

        try:
            run_jobs(jobs, Machine(workers), hear, lambda: None)
        finally:
            lines = _summarised(out)
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(jobs)} pairs failed; the tracebacks are in "
            f"{out / FAILURES}. Repeat the command to try them again."
        )
    return lines


def run_pair(cell: Cell, seeds: tuple[int, int], out: Path, tell: Tell) -> None:
    """Train the two models of a pair, measure and write the line of every method, and
    tell barriers.
    """
    torch.set_num_threads(1)
    task = task_of(cell.experiment.to_json())
    parts = shared_rows(len(task.train), cell.sharing, seeds)
    anchor, client = (
        trained(task, seed, rows) for seed, rows in zip(seeds, parts, strict=True)
    )
    symmetry = symmetry_of(anchor.config, anchor.state_dict())
    batches = training_batches(task, anchor, cell.rows)
    names = {"cell": cell.name, "pair": f"{seeds[0]}-{seeds[1]}"}
    lines = [
        measure(
            method, anchor, client, symmetry, task, batches, points=cell.points, **names
        )
        for method in cell.methods
    ]
    write_rows(cell.file(out, seeds), lines)
    tell(f"barriers {', '.join(f'{line.method} {line.barrier:.3g}' for line in lines)}")


def trained(task: Task, seed: int, rows: np.ndarray) -> Any:
    """Return a model of one seed, trained on these rows."""
    model = build_model(task.experiment, task.data, seed)
    training.train(model, task, rows, seed)
    return model.eval()


def _record(cells: Sequence[Cell], out: Path, command: str) -> None:
    """Write configuration and versions; refuse to mix results of different settings."""
    path = out / "config.json"
    held = read_json(path) if path.exists() else {}
    if held and "cells" not in held:
        raise FileExistsError(
            f"The folder '{out}' holds a run of another kind; choose another --out."
        )
    known = held.get("cells", {})
    for cell in cells:
        if known.setdefault(cell.name, cell.settings) != cell.settings:
            raise FedrotError(
                f"The folder '{out}' holds cell '{cell.name}' with other settings. "
                "Choose another --out, or give the settings in its config.json."
            )
    write_json(path, {"commands": [*held.get("commands", []), command], "cells": known})
    write_json(out / "versions.json", versions())


def _summarised(out: Path) -> list[BarrierLine]:
    """Write ``rows.jsonl``, and return all lines of the folder."""
    files = sorted((out / "lines").glob("[!.]*.jsonl"))
    lines = lines_of(row for file in files for row in read_rows(file))
    places = {
        name: place
        for place, name in enumerate(read_json(out / "config.json")["cells"])
    }
    lines.sort(key=lambda line: places[line.cell])
    write_rows(out / "rows.jsonl", lines)
    return lines
