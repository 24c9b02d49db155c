"""Run folders: configuration, versions, partitions and rows, readable while the run goes on."""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from fedrot._io import json_line, replacing, write_json

_PACKAGES = (
    *("fedrot", "torch", "numpy", "scipy", "flwr", "ray", "flwr-datasets"),
    *("transformers", "tokenizers", "datasets", "scikit-learn"),
)

#: The files of rows of results and of alignment.
ROWS, ALIGNMENT = "rows.jsonl", "alignment.jsonl"
#: The scope of rows about the merged model on the held-out split.
CENTRAL = "central"
ROW_FIELDS = ("setting", "arm", "start", "seed", "round", "scope", "metric", "value")


class Rows(Protocol):
    """Takes the rows of cells."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Take one row of results."""

    def alignment(self, row: Mapping[str, Any]) -> None:
        """Take one row of the alignment report."""


class RunFolder:
    """Writes ``config.json``, ``versions.json``, ``partition.json``, ``rows.jsonl`` and ``rows.csv``.

    ``FileExistsError`` if the folder already holds rows of another run; nothing is written then.
    """

    def __init__(self, path: Path, settings: Sequence[Mapping[str, Any]], command: str) -> None:
        self.path = path
        refuse_used(path)
        path.mkdir(parents=True, exist_ok=True)
        self._partitions: dict[str, Any] = {}
        write_json(path / "config.json", {"command": command, "settings": list(settings)})
        write_json(path / "versions.json", versions())
        self._rows = (path / ROWS).open("a", encoding="utf-8", buffering=1)
        self._alignments = (path / ALIGNMENT).open("a", encoding="utf-8", buffering=1)

    def row(self, row: Mapping[str, Any]) -> None:
        """Append one row of results; a value that is not finite becomes null."""
        self._rows.write(json_line({name: row[name] for name in ROW_FIELDS}))

    def alignment(self, row: Mapping[str, Any]) -> None:
        """Append one row of the alignment report."""
        self._alignments.write(json_line(row))

    def partition(
        self, setting: str, seed: int, names: Sequence[str], sizes: list[int], counts: list[list[int]]
    ) -> None:
        """Record a partition, see ``Task.partition``."""
        note_partition(self._partitions, setting, seed, names, sizes, counts)
        write_json(self.path / "partition.json", self._partitions)

    def close(self, complete: bool) -> None:
        """Write ``rows.csv``, and ``status.json`` with whether the run is complete."""
        self._rows.close()
        self._alignments.close()
        write_csv(self.path)
        write_json(self.path / "status.json", {"complete": complete})


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


def refuse_used(path: Path) -> None:
    """Raise ``FileExistsError`` if the folder already holds the rows of a run."""
    if rows_file(path) is not None:
        raise FileExistsError(f"The folder '{path}' already holds a run. Choose another --out.")


def rows_file(path: Path, name: str = ROWS) -> Path | None:
    """Return the file of a run folder with these rows: JSON lines or Parquet, None if there is none."""
    found = (path / name, (path / name).with_suffix(".parquet"))
    return next((file for file in found if file.is_file()), None)


def read_rows(path: Path, name: str = ROWS) -> list[dict[str, Any]]:
    """Read the rows of a run folder, or of a compact copy that has them as a Parquet file.

    In JSON lines an unfinished last line is left out, and the value null is NaN.

    Raises:
        FileNotFoundError: the folder has no such rows.
        ValueError: a line is JSON, but not an object.
    """
    file = rows_file(path, name) or path / name
    if file.suffix == ".parquet":
        from pyarrow import parquet

        stored = parquet.read_table(file).to_pylist()
        return [{key: value for key, value in row.items() if value is not None} for row in stored]
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(row, dict):
            raise ValueError(f"'{file}' has a line that is not a row: {line:.60}")
        rows.append({**row, "value": math.nan} if row.get("value", 0) is None else row)
    return rows


def read_alignment(path: Path) -> list[dict[str, Any]]:
    """Read the alignment rows of a run folder; none if it has no such file."""
    return read_rows(path, ALIGNMENT) if rows_file(path, ALIGNMENT) else []


def versions() -> dict[str, str]:
    """Return the date, and the versions of Python and of the packages that results depend on."""
    found = {"date": date.today().isoformat(), "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
