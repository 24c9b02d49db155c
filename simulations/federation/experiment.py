"""The server's side of a simulation: every cell of a configuration through Flower's strategy loop."""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from fedrot.options import AlignmentOptions
from fedrot.simulations.config import JOINED, Arm, SimulationConfig, Start
from fedrot.simulations.federation.arms import aggregation_of, evaluate_ensemble, train_joined
from fedrot.simulations.federation.client_app import ALONE
from fedrot.simulations.federation.run_folder import RunFolder
from fedrot.simulations.models.build import build_model, model_config
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.strategies import FedRot
from fedrot.strategies.client_matching import OTHER_BASIS_OPTIONS
from fedrot.strategies.lazy_grid import LazyGrid
from fedrot.strategies.round.inbox import client_id, own_id
from fedrot.strategies.round.round_report import Update

#: Called with (cell description, round, rounds) after every round.
Progress = Callable[[str, int, int], None]


class Interrupted(Exception):
    """The user asked to stop; what is done is in the run folder."""


class OrderedGrid(LazyGrid):
    """A grid that names nodes in the order of their partitions and can be stopped.

    Node ids are random, so sampling from them would differ between two runs of the same seed. It looks
    for replies more often than Flower's default of seconds: rounds here are short.
    """

    def __init__(self, grid: Grid, stop: threading.Event, nodes: int) -> None:
        super().__init__(grid)
        self._stop = stop
        self._nodes = list(grid.get_node_ids())
        while len(self._nodes) < nodes:
            log(INFO, "Waiting for nodes: %d of %d are connected.", len(self._nodes), nodes)
            self._wait(1.0)
            self._nodes = list(grid.get_node_ids())
        questions = [
            Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
            for node in self._nodes
        ]
        answers = self.send_and_receive(questions)
        own = {m.metadata.src_node_id: client_id(m) for m in answers if m.has_content()}
        if sorted(own.values()) != list(range(nodes)):
            raise RuntimeError(
                f"The {len(self._nodes)} nodes hold the partitions {sorted(own.values())}, but the "
                f"configuration has {nodes} clients. Start one node per partition id 0 to {nodes - 1}."
            )
        self._nodes.sort(key=own.__getitem__)

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Interrupted

    def pause(self, seconds: float) -> None:
        self._wait(min(seconds, 0.02))

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)


class SeededFedRot(FedRot):
    """FedRot that samples the same clients in every arm: Flower samples from the global ``random``.

    ``updates`` are the last round's, in the round's coordinates, if they are to be kept.
    """

    def __init__(self, *args: Any, seed: int, keeps_updates: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seed, self._keeps_updates = seed, keeps_updates
        self.round = 0
        self.updates: list[Mapping[str, Tensor]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.round = server_round
        random.seed(f"{self._seed}:{server_round}")
        return super().configure_train(server_round, arrays, config, grid)

    def _updates(self, *args: Any, **kwargs: Any) -> Iterator[Update]:
        self.updates = []
        for update in super()._updates(*args, **kwargs):
            if self._keeps_updates:
                self.updates.append(update.tensors)
            yield update


def run_cells(
    grid: Grid,
    config: SimulationConfig,
    folder: RunFolder,
    stop: threading.Event,
    progress: Progress,
    shared_cache: bool = True,
) -> None:
    """Run every cell of ``config`` and write its rows as they come.

    ``shared_cache`` lets arms share what their clients trained in the first round; it needs clients
    that see this machine's files.

    Raises:
        Interrupted: ``stop`` was set.
        RuntimeError: the nodes are not the configuration's clients, or a round brought no update.
    """
    task = task_of(config.to_json())
    for seed in config.seeds:
        parts = task.clients(seed)
        folder.partition(config.setting, seed, task.data.train.labels, parts, task.data.label_names)
    ordered = OrderedGrid(grid, stop, config.clients)
    with tempfile.TemporaryDirectory(prefix="fedrot-") as scratch:
        previous: int | None = None
        initial: dict[int, dict[str, float]] = {}
        for seed, start, arm in config.cells():
            if seed != previous:
                # Arms share updates only within a seed.
                for file in Path(scratch).iterdir():
                    file.unlink()
                previous = seed
            cache = Path(scratch)
            _run_cell(ordered, task, seed, start, arm, folder, cache, shared_cache, progress, initial)


def _run_cell(
    grid: Grid,
    task: Task,
    seed: int,
    start: Start,
    arm: Arm,
    folder: RunFolder,
    scratch: Path,
    shared_cache: bool,
    progress: Progress,
    initial: dict[int, dict[str, float]],
) -> None:
    """Run one arm; ``initial`` are the metrics of each seed's initial model, once they are known."""
    config = task.config
    labels = {"setting": config.setting, "arm": arm.name, "start": start, "seed": seed}
    model = build_model(config, task.data, seed)
    everything = np.arange(len(task.test.labels))

    def record(scope: str, server_round: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            folder.row({**labels, "round": server_round, "scope": scope, "metric": name, "value": value})

    def report_round(server_round: int, metrics: Mapping[str, float]) -> MetricRecord:
        record("central", server_round, metrics)
        progress(f"{config.setting} · seed {seed} · {start} · {arm.name}", server_round, config.rounds)
        return MetricRecord(dict(metrics))

    def central(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if arm.ensemble and server_round > 0 and strategy.updates:
            return report_round(server_round, evaluate_ensemble(task, arm, model, strategy.updates))
        model.load_state_dict(arrays.to_torch_state_dict())
        return report_round(server_round, evaluated(server_round))

    def evaluated(server_round: int) -> dict[str, float]:
        if server_round == 0 and seed in initial:
            return initial[seed]
        metrics = training.evaluate(model, task, task.test, everything)
        return initial.setdefault(seed, metrics) if server_round == 0 else metrics

    if arm.name == JOINED:
        for server_round in range(config.rounds + 1):
            if server_round > 0:
                train_joined(task, seed, model, server_round)
            report_round(server_round, evaluated(server_round))
        return

    trained_rounds: set[int] = set()

    def after_training(contents: list[RecordDict], key: str) -> MetricRecord:
        trained_rounds.add(strategy.round)
        for client, metrics in _client_metrics(contents):
            alone = {k.removeprefix(ALONE): v for k, v in metrics.items() if k.startswith(ALONE)}
            record(f"alone:{client}", strategy.round, alone)
            record(f"client:{client}", strategy.round, {"train-loss": metrics["train-loss"]})
        return MetricRecord()

    def after_evaluation(contents: list[RecordDict], key: str) -> MetricRecord:
        for client, metrics in _client_metrics(contents):
            if metrics.pop(key) > 0:
                record(f"client:{client}", strategy.round, metrics)
        return MetricRecord()

    other_basis = OTHER_BASIS_OPTIONS if arm.other_basis else AlignmentOptions(parts=arm.parts)
    # A Fisher diagonal cannot follow rotations: clients align before they compute it.
    at_clients = arm.align and arm.aggregation == "fisher"
    at_server = arm.align and not at_clients
    report = scratch / "alignment.jsonl"
    strategy = SeededFedRot(
        model_config(config, task.data).to_dict(),
        seed=seed,
        keeps_updates=arm.ensemble,
        anchor=arm.anchor,
        aggregation=aggregation_of(arm, task, seed, model),
        options=AlignmentOptions(parts=arm.parts) if at_server else None,
        other_basis=None if arm.evidence == "probe" and arm.other_basis else other_basis,
        model=(lambda: build_model(config, task.data, seed))
        if at_server and arm.evidence == "probe"
        else None,
        match_at_clients=arm.evidence in ("clients", "learned"),
        align=at_server,
        deterministic=True,
        report_path=report,
        fraction_train=config.fraction_train,
        fraction_evaluate=1.0 if config.holdout else 0.0,
        min_train_nodes=1,
        min_evaluate_nodes=1 if config.holdout else 0,
        min_available_nodes=config.clients,
        train_metrics_aggr_fn=after_training,
        evaluate_metrics_aggr_fn=after_evaluation,
    )
    job: dict[str, int | str | bool] = {
        "simulation": config.to_json(),
        "seed": seed,
        "start": start,
        "last-round": config.rounds,
        "cache": str(scratch) if shared_cache else "",
        "learn": arm.evidence == "learned",
        "align": "+".join(arm.parts) if at_clients else "",
    }
    try:
        result = strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            num_rounds=config.rounds,
            train_config=ConfigRecord({**job}),
            evaluate_config=ConfigRecord({**job}),
            evaluate_fn=central,
        )
    finally:
        reasons = _move_report(report, folder, labels)
    lost = sorted(set(range(1, config.rounds + 1)) - trained_rounds)
    if lost:
        raise RuntimeError(
            f"No client returned a usable update in round {lost[0]} of arm '{arm.name}', seed {seed}. "
            f"Drop: {reasons or 'none'}; failed clients are in Flower's log."
        )
    for server_round, metrics in result.train_metrics_clientapp.items():
        record("alignment", server_round, dict(metrics))


def _move_report(report: Path, folder: RunFolder, labels: Mapping[str, Any]) -> list[str]:
    """Append a cell's alignment report to the run's, and return why replies were dropped."""
    rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    report.unlink(missing_ok=True)
    for row in rows:
        folder.alignment({**labels, **row})
    return sorted({row["dropped"] for row in rows if "dropped" in row})


def _client_metrics(contents: list[RecordDict]) -> list[tuple[int, dict[str, Any]]]:
    """Return every client's id and metrics, in the order of the ids: replies arrive in any."""
    found = []
    for content in contents:
        (metrics,) = content.metric_records.values()
        client = own_id(content)
        assert client is not None, "our ClientApp always names itself"
        found.append((client, dict(metrics)))
    return sorted(found, key=lambda pair: pair[0])
