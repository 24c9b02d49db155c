"""Readers and writers of run folders: rows of results and of alignment, versions of packages."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedrot.errors import FedrotError

_PACKAGES = (
    *("fedrot", "torch", "numpy", "scipy", "flwr", "ray", "flwr-datasets"),
    *("transformers", "tokenizers", "datasets", "scikit-learn"),
)

#: The files of rows of results and of alignment.
ROWS, ALIGNMENT = "rows.jsonl", "alignment.jsonl"
#: The scope of rows about the global model on the data set's held-out split.
CENTRAL = "central"
#: Start of the scope of rows about a client's own model on that split; the client's id follows.
OF_OWN_MODEL = "alone:"
ROW_FIELDS = ("setting", "arm", "start", "seed", "round", "scope", "metric", "value")


class _Row(BaseModel):
    """The types of the fields that readers of rows use; a row may lack any of them."""

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


def refuse_other_config(held: Mapping[str, Any], path: Path, key: str) -> None:
    """Raise ``FileExistsError`` if a folder's ``config.json`` lacks the key of such runs."""
    if held and key not in held:
        raise FileExistsError(
            f"The folder '{path}' has a config.json of another kind, for example of a model, which "
            "results would overwrite. Choose another --out."
        )


def read_rows(path: Path, name: str = ROWS) -> list[dict[str, Any]]:
    """Read the rows of a run folder.

    Lines after the first unreadable one are left out, and the value null becomes NaN.

    Raises:
        FileNotFoundError: the folder has no such rows.
        FedrotError: the file is damaged, or a field has an unexpected type.
    """
    file = path / name
    stored = _lines(file)
    try:
        _ROWS.validate_python(stored)
    except ValidationError as error:
        problem = error.errors()[0]
        row, *place = problem["loc"]
        raise FedrotError(
            f"'{file}' has rows that fedrot did not write: {'.'.join(map(str, place)) or 'row'} is "
            f"{problem['input']!r:.60} in line {int(row) + 1}."
        ) from error
    return [{**row, "value": math.nan} if row.get("value", 0) is None else row for row in stored]


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read the results of a run folder; raises as ``read_rows``, and if a row lacks a field."""
    rows = read_rows(path)
    _need(ROW_FIELDS, rows, path)
    return rows


def _lines(file: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FedrotError(f"'{file}' is damaged: it is not UTF-8 text ({error}).") from error
    for line in lines:
        try:
            rows.append(json.loads(line))
        except (json.JSONDecodeError, RecursionError):
            break
    return rows


def read_alignment(path: Path) -> list[dict[str, Any]]:
    """Read the alignment rows of a run folder; empty without such a file. Raises as ``read_rows``."""
    rows = read_rows(path, ALIGNMENT) if (path / ALIGNMENT).is_file() else []
    _need(
        ("start", "arm", "part", "layer", "after", "found", "moved"),
        [row for row in rows if "before" in row],
        path,
    )
    return rows


def _need(fields: Collection[str], rows: Sequence[Mapping[str, Any]], where: Path) -> None:
    lacking = next((name for row in rows for name in fields if name not in row), None)
    if lacking:
        raise FedrotError(f"'{where}' has rows that fedrot did not write: a row has no '{lacking}'.")


def versions() -> dict[str, str]:
    """Return the date, and the versions of Python and of the packages that results depend on."""
    found = {"date": date.today().isoformat(), "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
