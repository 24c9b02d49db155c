"""Grids of experiments: TOML files, given by path or bundled under ``experiments/``."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from fedrot.errors import FedrotError


def bundled_grids(entries: str) -> dict[str, str]:
    """Return the text of each bundled grid of ``[[entries]]`` tables, by name."""
    folder = resources.files("fedrot.simulations") / "experiments"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    texts = {Path(file.name).stem: file.read_text("utf-8") for file in files}
    return {name: text for name, text in texts.items() if f"\n[[{entries}]]" in text}


def read_grid(grid: Path, entries: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the ``[base]`` table of a grid and its ``[[entries]]`` tables.

    Args:
        grid: path of a TOML file, or the name of a bundled grid, such as ``one-shot``.
        entries: ``setting`` for ``fedrot compare``, ``task`` for ``fedrot barriers``.

    Raises:
        OSError, ValueError: no such grid, the file is no TOML, or these are no tables.
    """
    described = tomllib.loads(_text(grid, entries))
    base, found = described.get("base", {}), described.get(entries, [])
    tables = isinstance(found, list) and all(isinstance(entry, dict) for entry in found)
    if not isinstance(base, dict) or not tables:
        raise ValueError(
            f"'{grid}' is no grid; write one [base], and [[{entries}]] before each {entries}"
        )
    return base, found


def _text(grid: Path, entries: str) -> str:
    if grid.is_file() or grid.suffix or grid.parent.name:
        return grid.read_bytes().decode()
    bundled = bundled_grids(entries)
    if str(grid) not in bundled:
        raise FedrotError(
            f"There is no bundled grid '{grid}'. Give the path of a TOML file, or one of "
            f"{', '.join(bundled)}."
        )
    return bundled[str(grid)]
