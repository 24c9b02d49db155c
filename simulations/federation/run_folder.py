"""Run folders: configuration, versions, partitions and rows, readable while the run goes on."""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, Protocol

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedrot._io import append_rows, json_line, read_json, replacing, write_json, write_text
from fedrot.errors import FedrotError
from fedrot.simulations.folder_lock import only_writer

_PACKAGES = (
    *("fedrot", "torch", "numpy", "scipy", "flwr", "ray", "flwr-datasets"),
    *("transformers", "tokenizers", "datasets", "scikit-learn"),
)

#: The files of rows of results and of alignment.
ROWS, ALIGNMENT = "rows.jsonl", "alignment.jsonl"
#: The scope of rows about the merged model on the held-out split.
CENTRAL = "central"
ROW_FIELDS = ("setting", "arm", "start", "seed", "round", "scope", "metric", "value")


#: What names a cell in rows.
_CELL = ("setting", "seed", "start", "arm")


class _Row(BaseModel):
    """The types of fields that readers of rows use, where a row has them."""

    model_config = ConfigDict(strict=True)

    setting: str = ""
    arm: str = ""
    start: str = ""
    scope: str = ""
    metric: str = ""
    part: str = ""
    seed: int = 0
    round: int = 0
    layer: int = 0
    client: int = 0
    value: float | None = 0
    before: float | None = 0
    after: float | None = 0
    found: float | None = 0
    chance: float | None = 0
    moved: float | None = 0
    of: float | None = 0


_ROWS = TypeAdapter(list[_Row])


class Rows(Protocol):
    """Takes the rows of cells."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Take one row of results."""

    def alignment(self, row: Mapping[str, Any]) -> None:
        """Take one row of the alignment report."""


class RunFolder:
    """Writes ``config.json``, ``versions.json``, ``partition.json``, ``rows.jsonl`` and ``rows.csv``.

    An unfinished run of the same settings goes on: cells before its last one are finished, and the rows
    of that one are removed.

    Raises:
        FileExistsError: the folder holds another run, or a finished one; nothing is written then.
        FedrotError: another process writes to the folder.
    """

    def __init__(self, path: Path, settings: Sequence[Mapping[str, Any]], command: str) -> None:
        refuse_used(path, settings)
        self.path = path
        self._lock = ExitStack()
        self._lock.enter_context(only_writer(path))
        self._finished: set[tuple[Any, ...]] = set()
        self._partitions: dict[str, Any] = {}
        if rows_file(path) is not None:
            self._go_on()
        write_json(path / "config.json", {"command": command, "settings": list(settings)})
        write_json(path / "versions.json", versions())
        for name in (ROWS, ALIGNMENT):
            append_rows(path / name, [])

    def _go_on(self) -> None:
        # A killed run may lack the last rows of its last cell.
        self._finished = {*list(dict.fromkeys(map(_cell, read_rows(self.path))))[:-1]}
        for name in (ROWS, ALIGNMENT):
            kept = [row for row in read_rows(self.path, name) if _cell(row) in self._finished]
            write_text(self.path / name, "".join(map(json_line, kept)))
        held = self.path / "partition.json"
        self._partitions = read_json(held) if held.is_file() else {}

    @property
    def finished_cells(self) -> int:
        """Number of cells that an earlier attempt has finished."""
        return len(self._finished)

    def finished(self, *cell: Any) -> bool:
        """Whether an earlier attempt has all rows of a cell: setting, seed, start and arm."""
        return cell in self._finished

    def row(self, row: Mapping[str, Any]) -> None:
        """Append one row of results; a value that is not finite becomes null."""
        append_rows(self.path / ROWS, [{name: row[name] for name in ROW_FIELDS}])

    def alignment(self, row: Mapping[str, Any]) -> None:
        """Append one row of the alignment report."""
        append_rows(self.path / ALIGNMENT, [row])

    def partition(
        self, setting: str, seed: int, names: Sequence[str], sizes: list[int], counts: list[list[int]]
    ) -> None:
        """Record a partition, see ``Task.partition``; ``FedrotError`` if the folder has another one."""
        held = self._partitions.get(setting, {}).get("seeds", {}).get(str(seed))
        if held not in (None, {"sizes": sizes, "counts": counts}):
            refuse_other_rows(self.path, setting, seed)
        note_partition(self._partitions, setting, seed, names, sizes, counts)
        write_json(self.path / "partition.json", self._partitions)

    def close(self, complete: bool) -> None:
        """Write ``rows.csv``, and ``status.json`` with whether the run is complete."""
        write_csv(self.path)
        write_json(self.path / "status.json", {"complete": complete})
        self._lock.close()


def note_partition(
    found: dict[str, Any],
    setting: str,
    seed: int,
    names: Sequence[str],
    sizes: list[int],
    counts: list[list[int]],
) -> None:
    """Add a partition, see ``Task.partition``, to those that a folder holds, by setting and seed."""
    by_setting = found.setdefault(setting, {"label_names": list(names), "seeds": {}})
    by_setting["seeds"][str(seed)] = {"sizes": sizes, "counts": counts}


def write_csv(path: Path) -> None:
    """Write the rows of a run folder once more, as ``rows.csv``."""
    with (
        replacing(path / "rows.csv") as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, ROW_FIELDS)
        writer.writeheader()
        writer.writerows(read_rows(path))


def _cell(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _CELL)


def refuse_used(path: Path, settings: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise ``FileExistsError`` if a folder holds a run, unless an unfinished one of these settings.

    It is also raised for a folder whose ``config.json`` is not a run's.
    """
    found = rows_file(path)
    config, status = path / "config.json", path / "status.json"
    if found is None:
        refuse_other_config(read_json(config) if config.is_file() else {}, path, "settings")
        return
    if found.name == ROWS and config.is_file():
        unfinished = not (status.is_file() and read_json(status).get("complete"))
        if unfinished and read_json(config).get("settings") == list(settings):
            return
    raise FileExistsError(f"The folder '{path}' already holds a run. Choose another --out.")


def refuse_other_config(held: Mapping[str, Any], path: Path, key: str) -> None:
    """Raise ``FileExistsError`` if a folder's ``config.json`` is of something else, such as a model."""
    if held and key not in held:
        raise FileExistsError(
            f"The folder '{path}' has a config.json of something else, such as a model or a run of "
            "another kind, which results would overwrite. Choose another --out."
        )


def refuse_other_rows(path: Path, setting: str, seed: object) -> NoReturn:
    """Raise ``FedrotError``: the rows of a setting and seed are no longer those of a folder."""
    raise FedrotError(
        f"The folder '{path}' holds the setting '{setting}' with other rows for seed {seed}: the data "
        "have changed. Choose another --out."
    )


def rows_file(path: Path, name: str = ROWS) -> Path | None:
    """Return the file of a run folder with these rows: JSON lines or Parquet, None if there is none."""
    found = (path / name, (path / name).with_suffix(".parquet"))
    return next((file for file in found if file.is_file()), None)


def read_rows(path: Path, name: str = ROWS) -> list[dict[str, Any]]:
    """Read the rows of a run folder, or of a compact copy that has them as a Parquet file.

    In JSON lines an unfinished last line is left out, and the value null is NaN.

    Raises:
        FileNotFoundError: the folder has no such rows.
        FedrotError: the file is damaged, or a field has another type than readers expect.
    """
    file = rows_file(path, name) or path / name
    stored = _stored(file) if file.suffix == ".parquet" else _lines(file)
    try:
        _ROWS.validate_python(stored)
    except ValidationError as error:
        problem = error.errors()[0]
        row, *place = problem["loc"]
        raise FedrotError(
            f"'{file}' holds other rows than fedrot writes: {'.'.join(map(str, place)) or 'row'} is "
            f"{problem['input']!r:.60} in line {int(row) + 1}."
        ) from error
    return [{**row, "value": math.nan} if row.get("value", 0) is None else row for row in stored]


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read the rows of results of a run folder; raises as ``read_rows``, also if a row lacks a field."""
    rows = read_rows(path)
    _need(ROW_FIELDS[1:], rows, path)  # Older files name no setting.
    return rows


def _stored(file: Path) -> list[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        stored = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError) as error:
        raise FedrotError(f"'{file}' is damaged: it cannot be read as Parquet ({error}).") from error
    return [{key: value for key, value in row.items() if value is not None} for row in stored]


def _lines(file: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FedrotError(f"'{file}' is damaged: it is no text ({error}).") from error
    for line in lines:
        try:
            rows.append(json.loads(line))
        except (json.JSONDecodeError, RecursionError):
            break
    return rows


def read_alignment(path: Path) -> list[dict[str, Any]]:
    """Read the alignment rows of a run folder; none if it has no such file. Raises as ``read_rows``."""
    rows = read_rows(path, ALIGNMENT) if rows_file(path, ALIGNMENT) else []
    _need(("start", "arm", "part", "layer", "after"), [row for row in rows if "before" in row], path)
    return rows


def _need(fields: Collection[str], rows: Sequence[Mapping[str, Any]], where: Path) -> None:
    lacking = next((name for row in rows for name in fields if name not in row), None)
    if lacking:
        raise FedrotError(f"'{where}' holds other rows than fedrot writes: a row has no '{lacking}'.")


def versions() -> dict[str, str]:
    """Return the date, and the versions of Python and of the packages that results depend on."""
    found = {"date": date.today().isoformat(), "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
