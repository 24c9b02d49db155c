"""JSON-lines files of one run: a new run begins new files, a resumed run goes on in its own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import count
from logging import INFO
from pathlib import Path

from flwr.common import log

from fedrot._io import replacing


def begin_rows(paths: Iterable[Path | None], after_round: int | None) -> None:
    """Prepare the JSON-lines files of a run.

    Args:
        paths: of one run. None, and files that do not exist, are left out.
        after_round: the round after which a resumed run goes on: the rows of later rounds are removed,
            and all rows for 0. None for a new run: rows of an earlier run move to ``NAME.1.jsonl``, or
            to the next number that is free for all of the files.
    """
    present = [path for path in paths if path is not None and path.is_file()]
    if after_round is not None:
        for path in present:
            cut_rows(path, after_round or -1)
        return
    written = [path for path in present if path.stat().st_size]
    number = next(n for n in count(1) if not any(_numbered(path, n).exists() for path in written))
    for path in written:
        earlier = _numbered(path, number)
        path.rename(earlier)
        log(INFO, "'%s' is of an earlier run, and is now '%s'.", path, earlier)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def cut_rows(path: Path, after_round: int) -> None:
    """Remove rows of rounds after ``after_round``, and unfinished rows, if the file exists."""
    if not path.exists():
        return
    with (
        path.open(encoding="utf-8") as file,
        replacing(path) as temporary,
        temporary.open("w", encoding="utf-8") as kept,
    ):
        for line in file:
            if line.endswith("\n") and _round_of(line) <= after_round:
                kept.write(line)


def _round_of(line: str) -> float:
    try:
        return json.loads(line).get("round", 0)
    except ValueError:
        return math.inf
