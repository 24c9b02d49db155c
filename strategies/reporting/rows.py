"""The file of a run's rows, and metrics of every stage for it and ``on_round``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import count
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.common import log

from fedrot._io import replacing
from fedrot.strategies.settings import Reporting
from fedrot.strategies.wire.flower_compat import Evaluate, StageMetrics

#: Stages of a round: training and evaluation at the clients, ``evaluate_fn`` at the
#: server.
TRAIN = "train"
EVALUATE = "evaluate"
SERVER = "server"
#: Stages after the last round: a row of each site, and metrics over sites.
SITE_ROW = "site"
SITES = "sites"


def report_metrics(
    reporting: Reporting, number: int, stage: str, metrics: Mapping[str, Any] | None
) -> None:
    """Report the metrics of one stage, if any, at once: a killed run keeps them.

    The file of rows receives ``{"round": 1, "stage": "train", "metrics": {...}}``;
    numbers that are not finite are null. ``on_round`` receives numbers as
    ``train/NAME``, and lists as ``train/NAME/0`` and so on.
    """
    if metrics is None:
        return
    reporting.append([{"round": number, "stage": stage, "metrics": dict(metrics)}])
    if reporting.on_round is not None:
        reporting.on_round(
            number, {f"{stage}/{name}": value for name, value in scalars(metrics)}
        )


def reporting_evaluations(reporting: Reporting, evaluate: Evaluate) -> Evaluate:
    """Return the server's evaluation function, which then also reports its metrics."""

    def reported(number: int, arrays: ArrayRecord) -> StageMetrics:
        metrics = evaluate(number, arrays)
        report_metrics(reporting, number, SERVER, metrics)
        return metrics

    return reported


def scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and numbers; a list has one for each entry, and null is NaN."""
    for name, value in metrics.items():
        if isinstance(value, list | tuple):
            yield from scalars({f"{name}/{i}": entry for i, entry in enumerate(value)})
        else:
            yield name, math.nan if value is None else float(value)


def begin_rows(path: Path, after_round: int | None) -> None:
    """Prepare the file of a run's rows.

    In a resumed run, rows of rounds after ``after_round`` are removed, and those of
    sites, which report again at its end; all rows if it is 0. In a new run (None), the
    file of an earlier run is renamed to ``NAME.1.jsonl``, or to the next free number.
    """
    if not path.is_file():
        return
    if after_round is not None:
        cut_rows(path, after_round or -1)
    elif path.stat().st_size:
        names = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in count(1))
        earlier = next(name for name in names if not name.exists())
        path.rename(earlier)
        log(INFO, "'%s' is of an earlier run; renamed to '%s'.", path, earlier)


def cut_rows(path: Path, after_round: int) -> None:
    """Remove rows of rounds after ``after_round`` and of sites, and unfinished rows."""
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
        row = json.loads(line)
    except ValueError:
        return math.inf
    if row.get("stage") in (SITE_ROW, SITES):
        return math.inf
    return row.get("round", 0)
