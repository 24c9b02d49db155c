"""``RunFolder``: the folder of a run, which is filled piece by piece, so that runs can
be resumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fedrot._io import (
    json_line,
    read_json,
    refuse_links,
    replacing,
    write_json,
    write_text,
)
from fedrot.errors import FedrotError

if TYPE_CHECKING:
    from fedrot.simulations.federation.cells import Cell

#: The keys of ``config.json`` and the types of their values, which are those of
#: ``Run``.
_CONFIG = {"commands": list, "versions": dict, "experiments": dict}
FIELDS = ("experiment", "strategy", "seed", "round", "scope", "metric", "value")
#: The types of the fields of rows that readers use.
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("experiment", "strategy", "scope", "metric", "part"), str),
    **dict.fromkeys(("seed", "round", "layer", "client"), int),
    **dict.fromkeys(
        ("value", "before", "after", "found", "moved", "of"), (int, float, type(None))
    ),
}


def _checked(
    rows: list[dict[str, Any]], file: Path, *needed: str
) -> list[dict[str, Any]]:
    """Return rows with NaN for null values; raises ``FedrotError`` if fedrot did not
    write them.
    """
    for row in rows:
        right = isinstance(row, dict) and row.keys() >= {*needed}
        if not right or not all(
            isinstance(row[n], kind) for n, kind in _TYPES.items() if n in row
        ):
            raise FedrotError(
                f"'{file}' has a row that fedrot did not write: {row!r:.100}."
            )
    return [
        {**row, "value": math.nan} if row.get("value", 0) is None else row
        for row in rows
    ]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows that a strategy wrote, JSON lines; those after an unreadable line
    are left out.

    Raises ``OSError`` if the file cannot be read, ``ValueError`` if fedrot did not
    write it.
    """
    rows = []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    with suppress(json.JSONDecodeError, RecursionError):
        for line in lines:
            rows.append(json.loads(line))
    return _checked(rows, file)


@dataclass(frozen=True)
class Run:
    """The contents of a run folder.

    Attributes:
        commands: the commands that wrote it.
        versions: the date, and versions of Python and packages.
        experiments: by name, see ``checks.Checked.described``.
        rows: dictionaries with ``FIELDS``.
        alignment: rows of alignment reports.
        missing: titles of what has no rows yet.
    """

    commands: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    alignment: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def read_run(path: Path) -> Run:
    """Read a run folder, complete or not.

    Raises:
        FileNotFoundError: there is no such folder, or it is no run folder.
        FedrotError: a file is damaged, or a link leads out of the folder.
    """
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"'{path}' is not a run folder: it has no config.json.")
    refuse_links(path)
    config, rows, alignment, missing = read_json(file), [], [], []
    try:
        titles = [
            title_of(name, seed, strategy)
            for name, experiment in config["experiments"].items()
            for seed in experiment["seeds"]
            for strategy in experiment["strategies"]
        ]
        known: Any = {name: kind(config[name]) for name, kind in _CONFIG.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FedrotError(f"'{file}' is not that of a run: {error!r:.300}") from error
    for title in titles:
        cell = path / "cells" / f"{file_name(title)}.json"
        if not cell.is_file():
            missing.append(title)
            continue
        found = read_json(cell)
        if not all(isinstance(found.get(key), list) for key in ("rows", "alignment")):
            raise FedrotError(
                f"'{cell}' is damaged: it has no rows. Delete it to run that part "
                "again."
            )
        rows += _checked(found["rows"], cell, *FIELDS)
        alignment += _checked(found["alignment"], cell, "strategy")
    _checked(
        [r for r in alignment if "before" in r],
        path,
        "part",
        "layer",
        "after",
        "found",
        "moved",
    )
    return Run(**known, rows=rows, alignment=alignment, missing=missing)


def title_of(experiment: str, seed: object, strategy: str) -> str:
    """Return the title, for people, of an experiment with one seed and strategy."""
    return f"{experiment} · seed {seed} · {strategy}"


def file_name(title: str) -> str:
    """Return a title as the name of a file without suffix, unique for each title."""
    digest = hashlib.sha256(title.encode()).hexdigest()[:8]
    return re.sub(r"[^a-zA-Z0-9]+", "-", title).strip("-")[:100] + f".{digest}"


class RunFolder:
    """The folder of a run: a file under ``cells/`` for each experiment, seed and
    strategy.

    It also has ``config.json`` and, after a command, ``rows.csv``. Later commands may
    add experiments, seeds and strategies.

    Raises:
        FileExistsError: the folder has something else.
        FedrotError: the folder has an experiment of the same name with other values or
            rows.
    """

    def __init__(
        self, path: Path, experiments: Mapping[str, Any], command: str
    ) -> None:
        """Open a folder for experiments by name, see ``checks.Checked.described``."""
        self.path, file = path, path / "config.json"
        config = (
            read_json(file)
            if file.is_file()
            else {name: kind() for name, kind in _CONFIG.items()}
        )
        if not all(
            isinstance(config.get(name), kind) for name, kind in _CONFIG.items()
        ):
            raise FileExistsError(
                f"The folder '{path}' has a config.json of another kind, for example "
                "of a model, which results would overwrite. Choose another --out."
            )
        held = config["experiments"]
        united = {
            name: self._united(held.get(name, own), own)
            for name, own in experiments.items()
        }
        (path / "cells").mkdir(parents=True, exist_ok=True)
        commands = [*dict.fromkeys([*config["commands"], command])]
        told = {
            "commands": commands,
            "versions": versions(),
            "experiments": {**held, **united},
        }
        write_json(file, told)

    def has(self, cell: Cell) -> bool:
        """Return whether the folder has a cell's rows."""
        return self._file(cell).is_file()

    def add(
        self,
        cell: Cell,
        rows: list[dict[str, Any]],
        alignment: list[dict[str, Any]],
        log: str = "",
    ) -> None:
        """Write a finished cell's rows, alignment report and Flower's log."""
        found = {"title": cell.title, "rows": rows, "alignment": alignment, "log": log}
        write_text(self._file(cell), json_line(found))
        self._file(cell).with_suffix(".txt").unlink(missing_ok=True)

    def fail(self, cell: Cell, failure: str) -> Path:
        """Write the traceback of a failed cell, and return its file."""
        file = self._file(cell).with_suffix(".txt")
        write_text(file, f"{cell.title}\n\n{failure}")
        return file

    def write_rows(self) -> None:
        """Write the rows of all results to ``rows.csv``."""
        import pandas

        with replacing(self.path / "rows.csv") as file:
            pandas.DataFrame(read_run(self.path).rows, columns=[*FIELDS]).to_csv(
                file, index=False
            )

    def _file(self, cell: Cell) -> Path:
        return self.path / "cells" / f"{cell.name}.json"

    def _united(
        self, held: Mapping[str, Any], own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return an experiment with the folder's seeds and strategies, too."""
        united = dict(own)
        for key, value in own.items():
            before: Any = held.get(key)
            if key in ("seeds", "strategies"):
                united[key] = {**before, **value}
                value, before = united[key], {**value, **before}
            if value != before and key != "data_dir":  # data may be moved
                other = {
                    "seeds": "other rows of a client: the data have changed",
                    "strategies": "another strategy of the same name",
                }
                raise FedrotError(
                    f"The folder '{self.path}' has the experiment '{own['name']}' with "
                    f"{other.get(key, f'another {key} ({before!r:.80})')}. Choose "
                    "another --out or name."
                )
        return united


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make a folder if needed, and lock it against other writing processes; the process
    holds the lock.

    Raises ``FedrotError`` if another process holds it, or a link in the folder leads
    out of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links(folder)
    try:
        with FileLock(folder / ".lock", timeout=0):
            try:
                yield
            finally:
                (folder / ".lock").unlink(missing_ok=True)
    except Timeout as error:
        raise FedrotError(
            f"Another run is writing to '{folder}'. Wait until it ends, or choose "
            "another folder."
        ) from error


def versions() -> dict[str, str]:
    """Return the date, and the versions of Python and of all installed packages."""
    packages = sorted((own.name, own.version) for own in distributions() if own.name)
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        **dict(packages),
    }
