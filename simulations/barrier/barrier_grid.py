"""Grids of barriers as TOML files describe them: pairs of small models, and methods to match them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedrot.errors import FedrotError
from fedrot.simulations.barrier.barrier_methods import METHODS, check_methods
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.grids import read_grid

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
        config: model, data and training; its fields about clients, arms and rounds are ignored.
        pairs: seeds of the two models of every pair. A seed decides the initialisation and the order
            of batches of its model; both seeds together decide how the rows are divided.
        points: positions on the line.
        rows: training rows for the methods that look at data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: SimulationConfig
    sharing: Sharing
    pairs: tuple[tuple[int, int], ...]
    points: Annotated[int, Field(ge=3)] = 21
    rows: Annotated[int, Field(gt=0)] = 2048

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
        config = self.config.model_dump(mode="json", exclude_defaults=True, exclude={"data_dir"})
        return {**self.model_dump(mode="json", exclude={"pairs", "config"}), "config": config}


class Grid(BaseModel):
    """Cells, and the methods that are measured in each."""

    model_config = ConfigDict(frozen=True)

    cells: tuple[Cell, ...]
    methods: tuple[str, ...]

    @classmethod
    def read(cls, path: Path, data_dir: Path | None = None) -> Grid:
        """Read a TOML file of ``[base]`` and one ``[[task]]`` per data set.

        A task has the fields of ``SimulationConfig``, ``points``, ``rows`` and ``pairs``, a table from
        sharing to pairs of seeds. ``base`` has the fields that tasks share, and ``methods``.

        Raises:
            ValueError: the file is no TOML, or describes no task or an impossible one.
        """
        base, tasks = read_grid(path, "task")
        methods = base.pop("methods", [*METHODS])
        methods = check_methods(map(str, methods if isinstance(methods, list) else [methods]))
        given = {"data_dir": data_dir} if data_dir else {}
        cells = tuple(cell for task in tasks for cell in _cells({**base, **task, **given}))
        if not cells or len({cell.name for cell in cells}) != len(cells):
            raise FedrotError(f"'{path}' needs at least one [[task]], each with a setting of its own.")
        return cls(cells=cells, methods=methods)

    def only(self, names: Sequence[str]) -> Grid:
        """Return the grid of the given cells; the name of a setting stands for all of its cells."""
        known = {name for cell in self.cells for name in (cell.name, cell.config.setting)}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise FedrotError(f"Unknown cell '{unknown[0]}'; choose from {', '.join(sorted(known))}.")
        chosen = (cell for cell in self.cells if {cell.name, cell.config.setting} & {*names})
        return self.model_copy(update={"cells": tuple(chosen)})


def _cells(task: dict[str, Any]) -> Iterator[Cell]:
    pairs = task.pop("pairs", {})
    if not isinstance(pairs, dict) or not pairs:
        raise FedrotError(f"Task '{task.get('setting', task.get('data'))}' of the grid has no pairs.")
    own = {name: task.pop(name) for name in ("points", "rows") if name in task}
    config = SimulationConfig.from_flat(task)
    for sharing, seeds in pairs.items():
        yield Cell(config=config, sharing=sharing, pairs=seeds, **own)


def shared_rows(count: int, sharing: Sharing, seeds: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the training rows of the two models of a pair, ascending."""
    pieces, *chosen = SHARING[sharing]
    parts = np.array_split(np.random.default_rng(seeds).permutation(count), pieces)
    first, second = (np.sort(np.concatenate([parts[i] for i in which])) for which in chosen)
    return first, second
