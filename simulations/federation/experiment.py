"""The cells of a configuration (seed, start, arm), each run through Flower's strategy loop."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import defaultdict
from itertools import groupby
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedrot.simulations.config import SimulationConfig, Start
from fedrot.simulations.federation.arm_strategies import ArmRun, Progress, strategy_of
from fedrot.simulations.federation.arms import train_joined
from fedrot.simulations.federation.ordered_grid import OrderedGrid
from fedrot.simulations.federation.run_folder import RunFolder
from fedrot.simulations.models.federated import tensors_of
from fedrot.simulations.tasks.task import task_of


def run_cells(
    grid: Grid,
    config: SimulationConfig,
    folder: RunFolder,
    stop: threading.Event,
    progress: Progress,
    shared_cache: bool = True,
) -> None:
    """Run every cell that the folder lacks, and write its rows as they come.

    With ``shared_cache``, arms share trainings of their clients, who have to see this machine's files.

    Raises:
        Interrupted: ``stop`` was set.
        RuntimeError: the nodes are not the configuration's clients, or a round brought no update.
    """
    task = task_of(config.to_json())
    for seed in config.seeds:
        folder.partition(config.setting, seed, *task.partition(seed))
    ordered = OrderedGrid(grid, stop, config.clients)
    for seed, cells in groupby(config.cells(), key=lambda cell: cell[0]):
        initial: dict[Start, dict[str, float]] = defaultdict(dict)
        with tempfile.TemporaryDirectory(prefix="fedrot-", ignore_cleanup_errors=True) as scratch:
            for _, start, arm in cells:
                if folder.finished(config.setting, seed, start, arm.name):
                    continue
                cell = ArmRun(task, seed, start, arm, folder, progress, initial[start])
                run_cell(cell, ordered, Path(scratch), scratch if shared_cache else "")


def run_cell(cell: ArmRun, grid: OrderedGrid, scratch: Path, cache: str) -> None:
    """Run one cell.

    Args:
        grid: of the configuration's clients.
        scratch: a folder for temporary files.
        cache: folder of clients' results that cells of one seed share; empty for none.

    Raises:
        Interrupted: the grid was stopped.
        RuntimeError: a round brought no update.
    """
    if cell.arm.joined:
        _run_joined(cell)
    else:
        _run_federated(cell, grid, scratch, cache)


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
        "count": cell.arm.evidence in ("tokens", "learned"),
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
    """Append a cell's alignment report to the run's, and return why replies were dropped."""
    rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    rows = [row for row in rows if "stage" not in row]
    report.unlink(missing_ok=True)
    for row in rows:
        cell.rows.alignment({**cell.labels, **row})
    return sorted({row["dropped"] for row in rows if "dropped" in row})
