"""Readers of run folders and of rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrot._io import read_json
from fedrot.errors import FedrotError


@dataclass(frozen=True)
class Run:
    """The contents of a run folder; empty values for absent files."""

    path: Path = Path()
    commands: list[str] = field(default_factory=list)
    experiments: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=dict)
    partitions: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    alignment: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def read_run(path: Path) -> Run:
    """Read a run folder."""
    config, versions, partitions = (
        _object(path / name) for name in ("config.json", "versions.json", "partition.json")
    )
    cells = [read_json(file) for file in sorted((path / "cells").glob("*.json"))]
    return Run(
        path,
        config.get("commands", []),
        config.get("experiments", []),
        versions,
        partitions,
        [row for cell in cells for row in cell["rows"]],
        [row for cell in cells for row in cell["alignment"]],
        config.get("missing", []),
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, FedrotError):
        return {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            raise FedrotError(
                f"'{path}' has rows that fedrot did not write: row is {row} in line {number}"
            )
        found.append(row)
    return found
