"""``MetricsLog``: the metrics of a run as JSON lines and TensorBoard scalars; the files of a run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.common import log

from fedrot._io import append_rows, replacing
from fedrot.errors import FedrotError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

#: Stages of a round: training and evaluation at the clients, ``evaluate_fn`` at the server.
TRAIN, EVALUATE, SERVER = "train", "evaluate", "server"

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class MetricsLog:
    """Writes the metrics of every round and stage at once, so that a killed run keeps them.

    A stage with metrics is one line ``{"round": 1, "stage": "train", "seconds": 2.5, "metrics": {...}}``
    with the seconds since the run was started or resumed. Numbers that are not finite are null. In
    TensorBoard the same numbers are scalars ``train/NAME``, and ``train/NAME/0`` and so on for a list.

    Args:
        path: the JSON-lines file that is appended to, or None.
        tensorboard: the folder for TensorBoard's event files, or None.

    Raises:
        FedrotError: ``tensorboard`` is given, and the package is not installed.
    """

    def __init__(self, path: str | Path | None = None, tensorboard: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self.tensorboard = Path(tensorboard) if tensorboard is not None else None
        self._start = time.monotonic()
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None
        if tensorboard is not None:
            _summary_writer()

    def __enter__(self) -> MetricsLog:
        self._start = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def write(self, number: int, stage: str, metrics: Mapping[str, Any] | None) -> None:
        """Write the metrics of one round and stage, if there are any."""
        if metrics is None:
            return
        if self.path is not None:
            seconds = time.monotonic() - self._start
            row = {"round": number, "stage": stage, "seconds": seconds, "metrics": dict(metrics)}
            append_rows(self.path, [row])
        if self.tensorboard is not None:
            if self._writer is None:
                self._writer = _summary_writer()(str(self.tensorboard), purge_step=self._purge_step)
                self._purge_step = None
            for name, value in _scalars(metrics):
                self._writer.add_scalar(f"{stage}/{name}", value, number)
            self._writer.flush()

    def evaluating(self, evaluate: Evaluate | None) -> Evaluate | None:
        """Return the server's evaluation function, extended so that its metrics are written."""
        if evaluate is None or (self.path is None and self.tensorboard is None):
            return evaluate

        def written(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate(number, arrays)
            self.write(number, SERVER, metrics)
            return metrics

        return written

    def begin(self, after_round: int | None) -> None:
        """Prepare the file for a run, see ``begin_rows``; TensorBoard drops rounds that are repeated."""
        begin_rows((self.path,), after_round)
        self._purge_step = None if after_round is None else after_round + 1 if after_round else 0


def _summary_writer() -> type[SummaryWriter]:
    # Imported late: the package 'tensorboard' is optional and takes seconds to import.
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise FedrotError(
            f"'tensorboard' needs the package of this name ({error}): pip install 'fedrot[tensorboard]'"
        ) from error
    return SummaryWriter


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}/{index}", float(item)) for index, item in enumerate(value))
        else:
            yield name, float(value)


def begin_rows(paths: Iterable[Path | None], after_round: int | None) -> None:
    """Prepare the JSON-lines files of a run.

    A resumed run goes on after a round: the rows of later rounds are removed, and all rows for 0. For a
    new run (None) rows of an earlier one move to ``NAME.1.jsonl``, or to the next number that is free
    for all of the files. Paths that are None, or do not exist, are left out.
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
    """Remove rows of rounds after ``after_round``, and unfinished rows."""
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
