"""``Cell``, a part of a run, and ``RunFolder``, which has the results of cells.

A folder is filled cell by cell, so that runs can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import distributions
from math import nan
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
    from fedrot.simulations.experiment import Experiment
    from fedrot.simulations.strategy import Strategy

#: A row of results or of alignment, or a table of ``config.json``.
Row = dict[str, Any]

#: The keys of ``config.json`` and the types of their values, which are those of
#: ``Run``.
_CONFIG = {"commands": list, "versions": dict, "experiments": dict}
#: Folder of shared trainings of running jobs, in a run folder.
TRAININGS = ".fedrot-trainings"
#: What a run writes in its folder, beside ``LOCK``.
WRITTEN = {"cells", "config.json", "report.html", "rows.csv"}
FIELDS = ("experiment", "strategy", "seed", "round", "scope", "metric", "value")
LOCK = ".fedrot-lock"
#: Fields of an experiment that later commands may add to, and what a conflict means.
_GROWING = {
    "seeds": "other rows of a client: the data have changed",
    "strategies": "another strategy of the same name",
}
#: The types of the fields of rows that readers use.
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("experiment", "strategy", "scope", "metric", "part"), str),
    **dict.fromkeys(("seed", "round", "layer"), int),
    "client": (int, str),  # a number, or a site's name
    **dict.fromkeys(
        ("value", "before", "after", "found", "moved", "of"), (int, float, type(None))
    ),
}

#: Fields of a row about a group of weights, beside ``before``.
OF_GROUP = ("part", "layer", "after", "found", "moved")


@dataclass(frozen=True)
class Cell:
    """One experiment, seed and strategy."""

    experiment: Experiment
    seed: int
    strategy: Strategy

    @property
    def title(self) -> str:
        """The cell's title for people."""
        return title_of(self.experiment.name, self.seed, self.strategy.name)

    @property
    def name(self) -> str:
        """The cell's file name without suffix, unique for each cell."""
        return file_name(self.title)

    @property
    def trains_first(self) -> tuple[object, ...]:
        """A key that is equal for cells that share the first round's trainings.

        A fitted head is another start, and sites that train alone share no round.
        """
        strategy = self.strategy
        apart = strategy.kind in ("alone", "head_only") and strategy.kind
        starts = strategy.fit_head, strategy.learning_rate
        return self.experiment.training, self.seed, *starts, apart


def cells_of(experiments: Iterable[Experiment]) -> list[Cell]:
    """Return all cells in the order of tables."""
    return [
        Cell(experiment, seed, strategy)
        for experiment in experiments
        for seed in experiment.seeds
        for strategy in experiment.strategies
    ]


def title_of(experiment: str, seed: object, strategy: str) -> str:
    """Return the title, for people, of an experiment with one seed and strategy."""
    return f"{experiment} · seed {seed} · {strategy}"


def file_name(title: str) -> str:
    """Return a title as the name of a file without suffix, unique for each title."""
    digest = hashlib.sha256(title.encode()).hexdigest()[:8]
    words = re.sub(r"[^a-zA-Z0-9]+", "-", title).strip("-")
    return f"{words[:100]}.{digest}"


def _checked(rows: list[Row], file: Path, needed: Iterable[str] = ()) -> list[Row]:
    """Return rows with NaN for null values.

    Raises ``FedrotError`` if fedrot did not write them.
    """
    for row in rows:
        if not _is_row(row, needed):
            raise FedrotError(
                f"'{file}' has a row that fedrot did not write: {row!r:.100}."
            )
        if row.get("value", 0) is None:
            row["value"] = nan
    return rows


def _is_row(row: Any, needed: Iterable[str]) -> bool:
    if not isinstance(row, dict) or not row.keys() >= {*needed}:
        return False
    return all(isinstance(row[name], _TYPES[name]) for name in row.keys() & _TYPES)


def read_rows(file: Path) -> list[Row]:
    """Read the rows that a strategy wrote, JSON lines, up to an unreadable line.

    Raises ``OSError`` if the file cannot be read, ``ValueError`` if fedrot did not
    write it.
    """
    rows = []
    with suppress(json.JSONDecodeError, RecursionError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
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
    experiments: dict[str, Row] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    alignment: list[Row] = field(default_factory=list)
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
    config = read_json(file)
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
    run = Run(**known)
    for title in titles:
        cell = path / "cells" / f"{file_name(title)}.json"
        if not cell.is_file():
            run.missing.append(title)
            continue
        results = read_json(cell)
        rows = results.get("rows")
        alignment = results.get("alignment")
        if not (isinstance(rows, list) and isinstance(alignment, list)):
            raise FedrotError(
                f"'{cell}' is damaged: it has no rows. Delete it to run that part "
                "again."
            )
        run.rows.extend(_checked(rows, cell, FIELDS))
        run.alignment.extend(_checked(alignment, cell, ("strategy",)))
    _checked([row for row in run.alignment if "before" in row], path, OF_GROUP)
    return run


def config_in(path: Path) -> Row:
    """Return ``config.json`` of a run folder; in a folder without a run, a new one.

    Raises ``FileExistsError`` if that folder has what a run would replace.
    """
    file = path / "config.json"
    config = read_json(file) if file.is_file() else {}
    if all(isinstance(config.get(name), kind) for name, kind in _CONFIG.items()):
        return config
    names = WRITTEN.intersection(os.listdir(path) if path.exists() else ())
    if names:
        raise FileExistsError(
            f"The folder '{path}' has {', '.join(sorted(names))}, which no run of "
            "fedrot wrote and results would replace. Choose another --out."
        )
    return {name: kind() for name, kind in _CONFIG.items()}


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
        self,
        path: Path,
        experiments: Mapping[str, Row],
        command: str,
    ) -> None:
        """Open a folder for experiments by name, see ``checks.Checked.described``."""
        self.path = path
        config = config_in(path)
        united = {**config["experiments"]}
        for name, experiment in experiments.items():
            united[name] = self._united(united.get(name, experiment), experiment)
        path.mkdir(parents=True, exist_ok=True)
        write_json(
            path / "config.json",
            {
                "commands": [*dict.fromkeys([*config["commands"], command])],
                "versions": versions(),
                "experiments": united,
            },
        )
        (path / "cells").mkdir(exist_ok=True)

    def has(self, cell: Cell) -> bool:
        """Return whether the folder has a cell's rows."""
        return self._file(cell).is_file()

    def add(
        self,
        cell: Cell,
        rows: list[Row],
        alignment: list[Row],
        log: str = "",
    ) -> None:
        """Write a finished cell's rows, alignment report and Flower's log."""
        file = self._file(cell)
        write_text(
            file,
            json_line(
                {
                    "title": cell.title,
                    "rows": rows,
                    "alignment": alignment,
                    "log": log,
                }
            ),
        )
        file.with_suffix(".txt").unlink(missing_ok=True)

    def fail(self, cell: Cell, failure: str) -> Path:
        """Write the traceback of a failed cell, and return its file."""
        file = self._file(cell).with_suffix(".txt")
        write_text(file, f"{cell.title}\n\n{failure}")
        return file

    def write_rows(self) -> None:
        """Write the rows of all results to ``rows.csv``."""
        import pandas

        rows = read_run(self.path).rows
        with replacing(self.path / "rows.csv") as file:
            pandas.DataFrame(rows, columns=FIELDS).to_csv(file, index=False)

    def _file(self, cell: Cell) -> Path:
        return self.path / "cells" / f"{cell.name}.json"

    def _united(self, held: Row, experiment: Row) -> Row:
        """Return an experiment with the folder's seeds and strategies, too."""
        united = {**experiment}
        for key, value in experiment.items():
            before: Any = held.get(key)
            other = f"another {key} ({before!r:.80})"
            if key in _GROWING:
                united[key] = {**before, **value}
                # Only what both have has to be equal.
                before = {**value, **before}
                value = united[key]
                other = _GROWING[key]
            if value != before and key != "data_dir":  # data may be moved
                raise FedrotError(
                    f"The folder '{self.path}' has the experiment "
                    f"'{experiment['name']}' with {other}. Choose another --out or "
                    "name."
                )
        return united


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make a folder if needed, and lock it against other writing processes.

    Raises ``FedrotError`` if another process holds it, or a link in the folder leads
    out of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links(folder)
    try:
        with FileLock(folder / LOCK, timeout=0):
            try:
                yield
            finally:
                (folder / LOCK).unlink(missing_ok=True)
    except Timeout as error:
        raise FedrotError(
            f"Another run is writing to '{folder}'. Wait until it ends, or choose "
            "another folder."
        ) from error


def versions() -> dict[str, str]:
    """Return the date, and the versions of Python and of all installed packages."""
    packages = sorted(
        (package.name, package.version) for package in distributions() if package.name
    )
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        **dict(packages),
    }
