"""Grids of barriers: pairs of small models as TOML files describe them, and the run of a grid."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from safetensors import safe_open
from safetensors.torch import load_file

from fedrot._io import (
    json_line,
    read_json,
    replacing,
    write_json,
    write_tensors,
    write_text,
)
from fedrot.errors import FedrotError
from fedrot.simulations.barrier.barrier_lines import (
    BarrierLine,
    lines_of,
    measure,
    ordered,
    training_batches,
    write_rows,
)
from fedrot.simulations.barrier.barrier_methods import METHODS, check_methods
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import read_rows, refuse_other_config, versions
from fedrot.simulations.folder_lock import only_writer
from fedrot.simulations.grids import read_grid
from fedrot.simulations.jobs import Job, Machine, check_failures, noted_failure, run_jobs

Sharing = Literal["same", "thirds", "disjoint"]

#: The number of pieces of the training rows, and the pieces that each of the two models sees.
SHARING: Mapping[Sharing, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "same": (1, (0,), (0,)),
    "thirds": (3, (0, 1), (1, 2)),
    "disjoint": (2, (0,), (1,)),
}


class Cell(BaseModel):
    """Pairs of models of one configuration that share their training data in one way.

    Attributes:
        config: model, data and training; its fields about clients, arms and rounds are ignored. With
            start ``pretrained`` each model is pretrained from its own seed.
        pairs: seeds of the two models. A seed decides the initialisation and the batches of its model;
            both seeds together decide how the rows are divided.
        points: positions on the line.
        rows: training rows for the methods that look at data.
        methods: those that are measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: SimulationConfig
    sharing: Sharing
    pairs: tuple[tuple[int, int], ...]
    points: Annotated[int, Field(ge=3)] = 21
    rows: Annotated[int, Field(gt=0)] = 2048
    methods: tuple[str, ...] = tuple(METHODS)

    @field_validator("methods", mode="before")
    @classmethod
    def _known(cls, value: object) -> tuple[str, ...]:
        return check_methods(map(str, value if isinstance(value, list | tuple) else [value]))

    @field_validator("points")
    @classmethod
    def _has_a_middle(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(f"is {value}; it must be odd, so that the middle is one of them")
        return value

    @field_validator("pairs")
    @classmethod
    def _different(cls, value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        if not value or len(set(value)) != len(value) or any(a == b for a, b in value):
            raise ValueError(f"are {value}; at least one is needed, each once, of two different seeds")
        return value

    @property
    def name(self) -> str:
        """The cell's name in rows, tables and files."""
        return f"{re.sub(r'[^a-zA-Z0-9_]+', '-', self.config.setting)}-{self.sharing}"

    def settings(self) -> dict[str, Any]:
        """Return all settings that a pair's results depend on, without the seeds."""
        config = self.config.model_dump(mode="json", exclude={"data_dir"})
        return {**self.model_dump(mode="json", exclude={"pairs", "config", "methods"}), "config": config}


class Grid(BaseModel):
    """Cells of pairs."""

    model_config = ConfigDict(frozen=True)

    cells: tuple[Cell, ...]

    @classmethod
    def read(cls, path: Path, data_dir: Path | None = None, *, quick: bool = False) -> Grid:
        """Read a TOML file of ``[base]`` and one ``[[task]]`` per data set.

        A task has the fields of ``SimulationConfig``, ``points``, ``rows``, ``methods`` and ``pairs``, a
        table from sharing to pairs of seeds. ``base`` has the fields that tasks share; see
        ``read_grid``. ``ValueError`` if the file is no TOML, or describes no task or an impossible one.
        """
        given = {"data_dir": data_dir} if data_dir else {}
        tasks = read_grid(path, "task", quick=quick)
        cells = tuple(cell for task in tasks for cell in _cells({**task, **given}))
        # Names of files are the same in capitals on some systems.
        if not cells or len({cell.name.casefold() for cell in cells}) != len(cells):
            raise FedrotError(f"'{path}' needs at least one [[task]], each with a setting of its own.")
        return cls(cells=cells)

    def only(self, names: Sequence[str]) -> Grid:
        """Return the grid of the given cells; the name of a setting stands for all of its cells."""
        known = {name for cell in self.cells for name in (cell.name, cell.config.setting)}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise FedrotError(f"Unknown cell '{unknown[0]}'; choose from {', '.join(sorted(known))}.")
        chosen = (cell for cell in self.cells if {cell.name, cell.config.setting} & {*names})
        return self.model_copy(update={"cells": tuple(chosen)})

    def measuring(self, methods: Sequence[str]) -> Grid:
        """Return the grid with the given methods in place of its own."""
        chosen = check_methods(methods)
        return Grid(cells=tuple(cell.model_copy(update={"methods": chosen}) for cell in self.cells))

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of all cells."""
        return tuple(dict.fromkeys(method for cell in self.cells for method in cell.methods))


def _cells(task: dict[str, Any]) -> Iterator[Cell]:
    pairs = task.pop("pairs", {})
    if not isinstance(pairs, dict) or not pairs:
        raise FedrotError(f"Task '{task.get('setting', task.get('data'))}' of the grid has no pairs.")
    own = {name: task.pop(name) for name in ("points", "rows", "methods") if name in task}
    config = SimulationConfig.from_flat(task)
    for sharing, seeds in pairs.items():
        yield Cell(config=config, sharing=sharing, pairs=seeds, **own)


def shared_rows(count: int, sharing: Sharing, seeds: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the training rows of the two models of a pair, ascending."""
    pieces, *chosen = SHARING[sharing]
    parts = np.array_split(np.random.default_rng(seeds).permutation(count), pieces)
    first, second = (np.sort(np.concatenate([parts[i] for i in which])) for which in chosen)
    return first, second


def run_grid(
    grid: Grid, out: Path, command: str, report: Callable[[str], None], workers: int | None = None
) -> list[BarrierLine]:
    """Measure the lines that ``out`` does not contain yet, and write the summary; return all lines.

    ``out`` contains ``config.json``, ``versions.json``, ``models/``, ``lines/`` (a file per pair and
    method) and ``rows.jsonl`` (of all lines, written anew after every pair). ``models.jsonl``,
    ``summary.md`` and ``plots/`` are written at the end, or when the run is stopped.

    Args:
        report: called with one sentence per pair.
        workers: processes, each with one thread, one per core if None; 1 works in this process.

    Raises:
        FileExistsError: ``out`` contains a run that is no grid of barriers.
        FedrotError: ``out`` contains a cell of the same name with other settings, or another run
            writes to it.
        RuntimeError: pairs failed; their tracebacks are in ``failures/``, and the others are finished.
    """
    out = out.resolve()
    with only_writer(out):
        return _run_grid(grid, out, command, report, workers)


def _run_grid(
    grid: Grid, out: Path, command: str, report: Callable[[str], None], workers: int | None
) -> list[BarrierLine]:
    _record(grid, out, command)
    for name in ("models", "lines", "plots"):
        (out / name).mkdir(exist_ok=True)
    jobs = [
        Job(f"{cell.name}, seeds {_pair_name(seeds)}", run_pair, (cell, seeds, missing, out))
        for cell in grid.cells
        for seeds in cell.pairs
        if (missing := [m for m in cell.methods if not _line_path(out, cell, seeds, m).exists()])
    ]
    failed = 0
    try:
        for number, (job, outcome) in enumerate(run_jobs(jobs, Machine(workers)), start=1):
            said = noted_failure(out, job.name, job.name, outcome.failure)
            if said:
                failed += 1
            else:
                found = (f"{line.method} {line.barrier.barrier:.3g}" for line in outcome.parts)
                said = f"barriers {', '.join(found)}"
            _collect(out)
            report(f"[{number} of {len(jobs)}] {job.name}: {said}")
    finally:
        lines = _collect(out)
        if lines:
            _write_summary(out, lines)
    check_failures(failed, len(jobs), "pairs", out)
    return lines


def run_pair(cell: Cell, seeds: tuple[int, int], methods: Sequence[str], out: Path) -> list[BarrierLine]:
    """Train the two models of a pair, or load them, and measure and write the missing methods."""
    from fedrot.simulations.tasks.task import task_of
    from fedrot.symmetry import symmetry_of

    torch.set_num_threads(1)
    task = task_of(cell.config.to_json())
    parts = shared_rows(len(task.train), cell.sharing, seeds)
    anchor, client = (
        trained(cell, seeds, seed, rows, out / "models") for seed, rows in zip(seeds, parts, strict=True)
    )
    symmetry = symmetry_of(anchor.config, anchor.state_dict())
    batches = training_batches(task, anchor, cell.rows)
    names = {"cell": cell.name, "pair": _pair_name(seeds)}
    lines = []
    for method in methods:
        line = measure(method, anchor, client, symmetry, task, batches, points=cell.points, **names)
        write_rows(_line_path(out, cell, seeds, method), [line])
        lines.append(line)
    return lines


def trained(cell: Cell, seeds: tuple[int, int], seed: int, rows: np.ndarray, folder: Path) -> Any:
    """Return a pair's model of one seed: from ``folder`` if it is there, else trained on these rows."""
    from fedrot.simulations.models.build import build_model
    from fedrot.simulations.tasks import training
    from fedrot.simulations.tasks.pretraining import load_pretrained
    from fedrot.simulations.tasks.task import task_of

    task = task_of(cell.config.to_json())
    model = build_model(cell.config, task.data, seed)
    path = folder / f"{cell.name}.{_pair_name(seeds)}.{seed}.safetensors"
    if path.exists():
        model.load_state_dict(load_file(path))
        return model.eval()
    start = time.perf_counter()
    if "pretrained" in cell.config.starts:
        load_pretrained(model, cell.config, seed)
    loss = training.train(model, task, rows, seed)
    about = {"cell": cell.name, "pair": _pair_name(seeds), "seed": seed, "rows": len(rows)}
    about |= {"training_loss": loss, "seconds": time.perf_counter() - start}
    # A safetensors file cannot contain tensors that share memory, as tied tensors do.
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with replacing(path) as temporary:
        write_tensors(temporary, tensors, {"training": json_line(about).rstrip()})
    return model.eval()


def _line_path(out: Path, cell: Cell, seeds: tuple[int, int], method: str) -> Path:
    return _file_of(out, cell.name, _pair_name(seeds), method)


def _file_of(out: Path, cell: str, pair: str, method: str) -> Path:
    # Names of a compact copy are what its rows say.
    return out / "lines" / f"{cell}.{pair}.{method}.jsonl".replace("/", "-")


def _pair_name(seeds: tuple[int, int]) -> str:
    return "-".join(map(str, seeds))


def _record(grid: Grid, out: Path, command: str) -> None:
    """Write configuration and versions; refuse to mix results of different settings."""
    path = out / "config.json"
    held = read_json(path) if path.exists() else {}
    if (out / "rows.jsonl").is_file() and "cells" not in held:
        raise FileExistsError(f"The folder '{out}' holds a run of another kind; choose another --out.")
    refuse_other_config(held, out, "cells")
    cells = held.get("cells", {})
    written = {name.casefold(): name for name in cells}
    for cell in grid.cells:
        before = cells.get(written.get(cell.name.casefold(), cell.name), {})
        if before and _settings_of(before) != cell.settings():
            raise FedrotError(
                f"The folder '{out}' holds cell '{cell.name}' with other settings. Choose another "
                "--out, or give the settings in its config.json."
            )
        pairs = [tuple(pair) for pair in before.get("pairs", [])]
        cells[cell.name] = {**cell.settings(), "pairs": list(dict.fromkeys([*pairs, *cell.pairs]))}
    known = held.get("methods", {}).items()
    methods = {name: [texts] if isinstance(texts, str) else texts for name, texts in known}
    for name in grid.methods:
        # Older versions described a method in other words, or defined it otherwise: all are kept.
        described = methods.setdefault(name, [])
        described += [METHODS[name].description] if METHODS[name].description not in described else []
    commands = [*held.get("commands", []), command]
    write_json(path, {"commands": commands, "methods": methods, "cells": cells})
    write_json(out / "versions.json", versions())


def _settings_of(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a cell as ``Cell.settings``; fields that came later have their defaults."""
    config = SimulationConfig.model_validate(held["config"])
    own = {name: value for name, value in held.items() if name not in ("pairs", "config")}
    return {**own, "config": config.model_dump(mode="json", exclude={"data_dir"})}


def _collect(out: Path) -> list[BarrierLine]:
    """Write ``rows.jsonl`` from the files of all lines, and return these in the grid's order."""
    files = sorted((out / "lines").glob("[!.]*.jsonl"))
    lines = ordered(lines_of(row for file in files for row in read_rows(out, f"lines/{file.name}")))
    cells = read_json(out / "config.json")["cells"]
    places = {name: place for place, name in enumerate(cells)}
    lines.sort(key=lambda line: places.get(line.cell, len(places)))
    write_rows(out / "rows.jsonl", lines)
    return lines


def _model_of(training: str) -> tuple[Any, ...]:
    about = json.loads(training)
    return about["cell"], about["pair"], about["seed"]


def _write_summary(out: Path, lines: Sequence[BarrierLine]) -> None:
    """Write ``models.jsonl``, ``summary.md`` and a plot per cell."""
    from fedrot.simulations.barrier.barrier_report import by_cell, markdown, plot, summarise

    for cell in by_cell(lines):
        plot(
            out / "plots" / f"{cell}.png".replace("/", "-"),
            [line for line in lines if line.cell == cell],
        )
    models = sorted((out / "models").glob("[!.]*.safetensors"))
    trained_here = [safe_open(file, "pt").metadata()["training"] for file in models]
    known = out / "models.jsonl"
    before = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    trainings = {_model_of(training): training for training in (*before, *trained_here)}
    write_text(known, "".join(f"{training}\n" for training in trainings.values()))
    write_text(out / "summary.md", markdown(summarise(lines)))
