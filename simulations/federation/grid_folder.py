"""The folder of a grid: filled cell by cell in any order, and continued where it was left."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrot._io import append_rows, json_line, write_json, write_text
from fedrot.errors import FedrotError
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig, Start
from fedrot.simulations.federation.run_folder import (
    ALIGNMENT,
    ROW_FIELDS,
    ROWS,
    rows_file,
    versions,
    write_csv,
)

#: What cells of one setting may differ in, from one command to the next.
_FREE = ("seeds", "arms", "starts", "data_dir")


@dataclass(frozen=True)
class GridCell:
    """One arm of a setting, from one start with one seed."""

    config: SimulationConfig
    seed: int
    start: Start
    arm: Arm

    @property
    def title(self) -> str:
        """The cell in words."""
        return f"{self.config.setting} · seed {self.seed} · {self.start} · {self.arm.name}"

    @property
    def name(self) -> str:
        """The cell's name in files; no two cells share it."""
        digest = hashlib.sha256(self.title.encode()).hexdigest()[:8]
        return re.sub(r"[^a-zA-Z0-9]+", "-", self.title).strip("-")[:100] + f".{digest}"

    @property
    def trains_first(self) -> tuple[str, int, Start]:
        """What decides the first round's training: equal for cells that may share it."""
        # Clients scramble what they have trained.
        return (self.config.setting, self.seed, "same" if self.start == "scrambled" else self.start)


def cells_of(configs: Sequence[SimulationConfig]) -> list[GridCell]:
    """Return all cells in the order of tables."""
    return [GridCell(config, *cell) for config in configs for cell in config.cells()]


@dataclass
class CellRows:
    """The rows of one cell, in memory."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    alignments: list[dict[str, Any]] = field(default_factory=list)

    def row(self, row: Mapping[str, Any]) -> None:
        """Take one row of results."""
        self.rows.append({name: row[name] for name in ROW_FIELDS})

    def alignment(self, row: Mapping[str, Any]) -> None:
        """Take one row of the alignment report."""
        self.alignments.append(dict(row))


class GridFolder:
    """A run folder (see ``RunFolder``) that keeps the rows of every finished cell under ``cells/``.

    Raises:
        FileExistsError: the folder holds a run that is no grid.
        FedrotError: it holds a setting of the same name with other values.
    """

    def __init__(self, path: Path, configs: Sequence[SimulationConfig], command: str) -> None:
        self.path, self._cells = path, path / "cells"
        self._order = [cell.name for cell in cells_of(configs)]
        if rows_file(path) is not None and not self._cells.is_dir():
            raise FileExistsError(
                f"The folder '{path}' holds a run of another kind; choose another --out."
            )
        settings = _united(_held(path), [config.model_dump(mode="json") for config in configs], path)
        self._cells.mkdir(parents=True, exist_ok=True)
        write_json(path / "config.json", {"command": command, "settings": settings})
        write_json(path / "versions.json", versions())
        self._collect()

    def finished(self, cell: GridCell) -> bool:
        """Whether the folder has the cell's rows."""
        return self._file(cell).is_file()

    def add(self, cell: GridCell, found: CellRows, log: str) -> None:
        """Write the rows of a finished cell, and Flower's log."""
        with (self.path / "flower.log").open("a", encoding="utf-8") as file:
            file.write(f"{cell.title}\n{log}")
        write_text(self._file(cell), json_line({"rows": found.rows, "alignment": found.alignments}))
        append_rows(self.path / ROWS, found.rows)
        append_rows(self.path / ALIGNMENT, found.alignments)

    def partitions(self, found: Mapping[str, Any]) -> None:
        """Write the partitions, by setting."""
        write_json(self.path / "partition.json", found)

    def close(self, complete: bool) -> None:
        """Write all rows in the grid's order, ``rows.csv``, and whether all cells are finished."""
        self._collect()
        write_csv(self.path)
        write_json(self.path / "status.json", {"complete": complete})

    def _file(self, cell: GridCell) -> Path:
        return self._cells / f"{cell.name}.json"

    def _collect(self) -> None:
        """Write the files of all rows anew: the cells of this grid in order, then others."""
        names = [file.stem for file in sorted(self._cells.glob("[!.]*.json"))]
        places = {name: place for place, name in enumerate(self._order)}
        names.sort(key=lambda name: places.get(name, len(places)))
        found = [json.loads((self._cells / f"{name}.json").read_text("utf-8")) for name in names]
        for file, key in ((ROWS, "rows"), (ALIGNMENT, "alignment")):
            write_text(self.path / file, "".join(json_line(row) for cell in found for row in cell[key]))


def _held(path: Path) -> list[dict[str, Any]]:
    """Return the settings of a folder, none if it is new; fields that came later have their defaults."""
    file = path / "config.json"
    if not file.is_file():
        return []
    defaults = SimulationConfig.model_validate({}).model_dump(mode="json")
    return [{**defaults, **settings} for settings in json.loads(file.read_text("utf-8"))["settings"]]


def _united(
    held: Sequence[dict[str, Any]], given: Sequence[dict[str, Any]], path: Path
) -> list[dict[str, Any]]:
    """Return the settings of a folder and of a grid, by name; those of the grid come first."""
    before = {settings["setting"]: settings for settings in held}
    for settings in given:
        other = before.pop(settings["setting"], settings)
        changed = [
            key for key, value in settings.items() if key not in _FREE and other.get(key) != value
        ]
        if changed:
            raise FedrotError(
                f"The folder '{path}' holds the setting '{settings['setting']}' with {changed[0]} "
                f"{other.get(changed[0])!r}, not {settings[changed[0]]!r}. Choose another --out, or "
                "another name for the setting."
            )
    return [*given, *before.values()]
