"""Writing of files: atomic replacement, flushing to disk, and rows as JSON lines."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside a file or folder, which takes its place if the block succeeds.

    A file is on the disk before it takes the place: after a power cut there is the old or the new one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        if temporary.is_file():
            sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to the disk; on Windows that is not possible."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a JSON-lines file in one write; create the file and its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json_line(row) for row in rows))


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON; non-finite numbers become null, unknown types text."""
    return json.dumps(_finite(row), allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
