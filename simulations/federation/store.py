"""``RunFolder``: the folder of a run. It is filled cell by cell, so that runs can be resumed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrot._io import append_rows, json_line, read_json, write_json, write_text
from fedrot.errors import FedrotError, safe
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig, Start
from fedrot.simulations.federation.run_folder import (
    ALIGNMENT,
    ROW_FIELDS,
    ROWS,
    refuse_other_config,
    versions,
)
from fedrot.simulations.tasks.task import task_of

#: Fields of a setting to which later commands may add values.
_LISTS = ("seeds", "arms", "starts")
#: Fields of a setting that may differ from one command to the next.
_FREE = (*_LISTS, "data_dir")


@dataclass(frozen=True)
class Cell:
    """One setting, seed, start and arm."""

    config: SimulationConfig
    seed: int
    start: Start
    arm: Arm

    @property
    def title(self) -> str:
        """The cell's title for people."""
        return f"{self.config.setting} · seed {self.seed} · {self.start} · {self.arm.name}"

    @property
    def name(self) -> str:
        """The cell's file name without suffix, unique for each cell."""
        digest = hashlib.sha256(self.title.encode()).hexdigest()[:8]
        return re.sub(r"[^a-zA-Z0-9]+", "-", self.title).strip("-")[:100] + f".{digest}"

    @property
    def trains_first(self) -> tuple[str, int, Start]:
        """A key that is equal for cells that share the first round's trainings."""
        # Clients scramble after training.
        return (self.config.training, self.seed, "same" if self.start == "scrambled" else self.start)


def cells_of(configs: Sequence[SimulationConfig]) -> list[Cell]:
    """Return all cells in the order of tables."""
    return [Cell(config, *cell) for config in configs for cell in config.cells()]


@dataclass
class CellRows:
    """The rows of one cell: results, and the alignment report."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    alignments: list[dict[str, Any]] = field(default_factory=list)

    def row(self, row: Mapping[str, Any]) -> None:
        """Add one row of results."""
        self.rows.append({name: row[name] for name in ROW_FIELDS})

    def alignment(self, row: Mapping[str, Any]) -> None:
        """Add one row of the alignment report."""
        self.alignments.append(dict(row))


class RunFolder:
    """The folder of a run, with a file under ``cells/`` for the rows of every finished cell.

    It also has ``config.json``, ``versions.json``, ``partition.json``, ``status.json``, ``flower.log``,
    and all rows in ``rows.jsonl`` and ``alignment.jsonl``. Later commands may add
    settings, seeds, starts and arms.

    Raises:
        FileExistsError: the folder has a run of another kind.
        FedrotError: the folder has a setting of the same name with other values.
    """

    def __init__(self, path: Path, configs: Sequence[SimulationConfig], command: str) -> None:
        self.path, self._cells = path, path / "cells"
        self._order = [cell.name for cell in cells_of(configs)]
        before = read_json(file) if (file := path / "config.json").is_file() else {}
        refuse_other_config(before, path, "settings")
        if (path / ROWS).is_file() and not self._cells.is_dir():
            raise FileExistsError(
                f"The folder '{path}' has a run of another kind. Choose another --out."
            )
        settings = _united(
            before.get("settings", ()), [config.model_dump(mode="json") for config in configs], path
        )
        self._cells.mkdir(parents=True, exist_ok=True)
        commands = "\n".join(dict.fromkeys([*str(before.get("command") or "").splitlines(), command]))
        write_json(file, {"command": commands, "settings": settings})
        write_json(path / "versions.json", versions())
        self._collect()

    def finished(self, cell: Cell) -> bool:
        """Return whether the folder has the cell's rows."""
        return self._file(cell).is_file()

    def add(self, cell: Cell, found: CellRows, log: str = "") -> None:
        """Write the rows of a finished cell and Flower's log, unless its worker has written them."""
        if not self.finished(cell):
            write_cell(self.path, cell, found, log)

    def publish(self, cell: Cell) -> list[dict[str, Any]]:
        """Append the rows of a finished cell to the files of all rows; return its results."""
        found = _cell_rows(self._file(cell))
        append_rows(self.path / ROWS, found["rows"])
        append_rows(self.path / ALIGNMENT, found["alignment"])
        return list(found["rows"])

    def partitions(self, found: Mapping[str, Any]) -> None:
        """Add partitions, by setting and seed, to those in the folder.

        Raises:
            FedrotError: a seed has other rows than in the folder, because the data have changed.
        """
        file = self.path / "partition.json"
        held = read_json(file) if file.is_file() else {}
        for setting, given in found.items():
            before = held.get(setting, {}).get("seeds", {})
            other = [seed for seed, rows in given["seeds"].items() if before.get(seed, rows) != rows]
            if other:
                raise FedrotError(
                    f"The folder '{self.path}' has the setting '{setting}' with other rows for seed "
                    f"{other[0]}: the data have changed. Choose another --out."
                )
            held[setting] = {**given, "seeds": {**before, **given["seeds"]}}
        write_json(file, held)

    def close(self, complete: bool) -> None:
        """Write all rows in the order of cells, and whether all cells are finished."""
        self._collect()
        write_json(self.path / "status.json", {"complete": complete})

    def _file(self, cell: Cell) -> Path:
        return self._cells / f"{cell.name}.json"

    def _collect(self) -> None:
        """Rewrite the files of all rows: the cells of this run in order, then other cells."""
        names = [file.stem for file in sorted(self._cells.glob("[!.]*.json"))]
        places = {name: place for place, name in enumerate(self._order)}
        names.sort(key=lambda name: places.get(name, len(places)))
        found = [_cell_rows(self._cells / f"{name}.json") for name in names]
        for file, key in ((ROWS, "rows"), (ALIGNMENT, "alignment")):
            write_text(self.path / file, "".join(json_line(row) for cell in found for row in cell[key]))


def write_cell(folder: Path, cell: Cell, found: CellRows, log: str) -> None:
    """Write the rows of a finished cell and Flower's log to the folder of a run."""
    with (folder / "flower.log").open("ab", buffering=0) as file:
        file.write(safe(f"{cell.title}\n{log}").encode())  # In one call: other workers write there, too.
    line = json_line({"rows": found.rows, "alignment": found.alignments})
    write_text(folder / "cells" / f"{cell.name}.json", line)


def identity_of(folder: Path) -> str:
    """Return a hash that tells a run folder from one with the same path on another machine."""
    file = folder / "config.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def partitions_of(configs: Sequence[SimulationConfig]) -> dict[str, Any]:
    """Return the names of classes, and sizes and counts of all clients, by setting and seed."""
    found: dict[str, Any] = {}
    for config in configs:
        task = task_of(config.to_json())
        for seed in config.seeds:
            names, sizes, counts = task.partition(seed)
            held = found.setdefault(config.setting, {"label_names": list(names), "seeds": {}})
            held["seeds"][str(seed)] = {"sizes": sizes, "counts": counts}
    return found


def _cell_rows(file: Path) -> dict[str, Any]:
    found = read_json(file)
    for key in ("rows", "alignment"):
        if not isinstance(found.get(key), list) or not all(isinstance(row, dict) for row in found[key]):
            raise FedrotError(f"'{file}' is damaged: it has no {key}. Delete it to run its cell again.")
    return found


def _united(
    held: Sequence[dict[str, Any]], given: Sequence[dict[str, Any]], path: Path
) -> list[dict[str, Any]]:
    """Return the given settings, with the folder's seeds, arms and starts, then its other settings."""
    before = {settings["setting"]: settings for settings in held}
    found = []
    for settings in given:
        other = before.pop(settings["setting"], settings)
        changed = [
            key for key, value in settings.items() if key not in _FREE and other.get(key) != value
        ]
        if changed:
            raise FedrotError(
                f"The folder '{path}' has the setting '{settings['setting']}' with {changed[0]} "
                f"{other.get(changed[0])!r}, not {settings[changed[0]]!r}. Choose another --out, or "
                "another name for the setting."
            )
        both = {name: [*dict.fromkeys([*other[name], *settings[name]])] for name in _LISTS}
        found.append({**settings, **both})
    return [*found, *before.values()]
