"""``run_cells``: the cells of a configuration (seed, start, arm) in Flower's strategy loop."""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord

from fedrot.simulations.federation.arm_strategies import ArmRun, strategy_of
from fedrot.simulations.federation.arms import train_joined
from fedrot.simulations.federation.ordered_grid import OrderedGrid
from fedrot.simulations.federation.store import Cell, CellRows
from fedrot.simulations.models.federated import tensors_of
from fedrot.simulations.tasks.task import task_of

#: The file in ``scratch`` with a line about the last finished round.
PROGRESS = "progress.txt"


def run_cells(
    cells: Iterable[Cell], grid: OrderedGrid, scratch: Path, *, shared_cache: bool
) -> Iterator[tuple[Cell, CellRows, Exception | None]]:
    """Run cells one after the other; yield each with its rows and its exception, None if it has none.

    Among other reasons, a cell fails if no update of a round was accepted.

    Args:
        grid: the grid of the configuration's clients.
        scratch: a folder for temporary files.
        shared_cache: clients keep their trainings for other cells in ``scratch``, which they can access.
    """
    initial: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
    for cell in cells:
        rows, failure = CellRows(), None
        config_json = cell.config.to_json()
        known = initial[cell.trains_first]
        progress = scratch / PROGRESS
        run = ArmRun(task_of(config_json), cell.seed, cell.start, cell.arm, rows, known, progress)
        try:
            if cell.arm.joined:
                _run_joined(run)
            else:
                _run_federated(run, grid, scratch, str(scratch) if shared_cache else "")
        except Exception as error:
            failure = error
        gc.collect()  # The strategy refers to itself, and holds models and updates.
        yield cell, rows, failure


def _run_joined(cell: ArmRun) -> None:
    model = cell.model()
    for server_round in range(cell.task.config.rounds + 1):
        if server_round > 0:
            train_joined(cell.task, cell.arm, cell.seed, model, server_round)
        cell.finish_round(server_round, cell.evaluate(model, server_round))


def _run_federated(cell: ArmRun, grid: OrderedGrid, scratch: Path, cache: str) -> None:
    config, model = cell.task.config, cell.model()
    report = scratch / "alignment.jsonl"
    strategy = strategy_of(cell, model, report)
    job: dict[str, int | float | str | bool] = {
        "simulation": config.to_json(),
        "seed": cell.seed,
        "start": cell.start,
        "last-round": config.rounds,
        "cache": cache,
        "align": "+".join(cell.arm.parts) if cell.arm.aligns_at_clients else "",
        "chance": cell.arm.chance,
        "batches": cell.arm.batches,
        "loads": strategy.loads,
    }
    if cell.arm.clients:
        grid = grid.of(cell.arm.clients)
    try:
        result = strategy.start(
            grid,
            ArrayRecord(tensors_of(model)),
            num_rounds=config.rounds,
            train_config=ConfigRecord({**job}),
            evaluate_config=ConfigRecord({**job}),
            evaluate_fn=strategy.evaluate_centrally,
        )
    finally:
        reasons = _move_report(report, cell)
    lost = sorted(set(range(1, config.rounds + 1)) - strategy.trained_rounds)
    if lost:
        raise RuntimeError(
            f"No client returned a usable update in round {lost[0]} of arm '{cell.arm.name}', seed "
            f"{cell.seed}. Dropped: {reasons or 'none'}; failed clients are in Flower's log."
        )
    for server_round, metrics in result.train_metrics_clientapp.items():
        cell.record("alignment", server_round, dict(metrics))


def _move_report(report: Path, cell: ArmRun) -> list[str]:
    """Move a cell's alignment report to its rows, and return why replies were dropped."""
    rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    rows = [row for row in rows if "stage" not in row]
    report.unlink(missing_ok=True)
    for row in rows:
        cell.rows.alignment({**cell.labels, **row})
    return sorted({row["dropped"] for row in rows if "dropped" in row})
