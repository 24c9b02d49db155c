"""``run``: Flower's loop with a checkpoint after every round, maybe resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedrot.errors import FedrotError
from fedrot.strategies.resume.checkpoints import Checkpointing
from fedrot.strategies.resume.state import RunState
from fedrot.strategies.wire.arrays import shapes_of
from fedrot.strategies.wire.flower_compat import (
    Aggregated,
    Evaluate,
    Messages,
    StageMetrics,
)

Stop = Callable[[int, Result], bool]


def run(
    strategy: Strategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int = 3,
    timeout: float = 3600,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: Evaluate | None = None,
    should_stop: Stop | None = None,
    *,
    checkpoints: Checkpointing,
) -> Result:
    """Run a strategy by Flower's ``Strategy.start``; write a checkpoint a round.

    A resumed run continues after the newest valid checkpoint. It restores the model,
    the result so far, the strategy's state, the changed entries of the configurations,
    and the random generators. If the strategy has a method ``begin``, it is called
    first, with the last finished round: 0 if the run was killed in round 1, None for a
    new run.

    Args:
        strategy: built as for the run that is resumed.
        grid: as in ``Strategy.start``, like all other arguments.
        checkpoints: the folder to write to; a run resumes from the checkpoints that it
            holds.
        num_rounds: of the whole run, including the rounds before it was resumed.
        should_stop: called after each checkpoint, and first with the round of the
            resumed checkpoint; for Flower 1.43 and later.

    Raises:
        FedrotError: no checkpoint of the folder is valid, or the newest is of another
            model or strategy; another run writes to the folder; a checkpoint cannot be
            written.
    """
    train_config = train_config or ConfigRecord()
    evaluate_config = evaluate_config or ConfigRecord()
    killed_in_first = checkpoints.used()
    with checkpoints.writing():
        state = RunState(strategy, train_config, evaluate_config)
        done = 0
        #: Of all rounds; ``rounds`` adds the new ones.
        result = Result(arrays=initial_arrays)
        if not checkpoints.rounds():
            log(
                INFO,
                "There is no checkpoint in '%s' yet: starting from round 1.",
                checkpoints.folder,
            )
        else:
            done, result = _restored(checkpoints, initial_arrays, state)
            if done > num_rounds:
                log(
                    WARNING,
                    f"'{checkpoints.folder}' holds round {done}, and num_rounds is "
                    f"{num_rounds}: no round is run, and the model of round {done} is "
                    "returned. Give another folder to start anew.",
                )
        if hasattr(strategy, "begin"):
            strategy.begin(done or (0 if killed_in_first else None))
        # Flower logs the name of the class.
        named = type(type(strategy).__name__, (CheckpointedRun,), {})
        rounds: CheckpointedRun = named(
            strategy, evaluate_fn, state, checkpoints, done, result
        )
        further: dict[str, Any] = {}
        if should_stop is not None:
            # Flower before 1.43 has no such argument. The rounds before ``done`` had
            # their calls before the run was resumed.
            further["should_stop"] = lambda number, result: (
                number >= done and should_stop(number, result)
            )
        Strategy.start(
            rounds,
            grid,
            initial_arrays,
            max(num_rounds, done),
            timeout,
            train_config,
            evaluate_config,
            rounds.evaluate if rounds.evaluates else None,
            **further,
        )
    return result


@dataclass(eq=False)
class CheckpointedRun(Strategy):
    """A strategy in Flower's loop: rounds are read from a checkpoint, or saved.

    In a finished round no client is asked, and Flower receives the saved metrics, and
    in the last finished round, ``done``, also the model. The random generators are
    restored at the end of this round. ``result`` is of the finished rounds and of the
    new rounds.
    """

    strategy: Strategy
    evaluate_fn: Evaluate | None
    state: RunState
    checkpoints: Checkpointing
    done: int
    result: Result

    def __post_init__(self) -> None:
        #: Whether Flower ends a round with ``evaluate``; otherwise it ends with
        #: ``aggregate_evaluate``.
        self.evaluates = self.evaluate_fn is not None or bool(
            self.result.evaluate_metrics_serverapp
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Messages:
        """Ask the clients to train, in a round that is not finished."""
        if server_round <= self.done:
            return []
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Messages) -> Aggregated:
        """Return a round's model and metrics."""
        noted = self.result.train_metrics_clientapp
        arrays = self.result.arrays if server_round == self.done else None
        if server_round > self.done:
            arrays, metrics = self.strategy.aggregate_train(server_round, replies)
            if arrays is not None:
                self.result.arrays = arrays
            _note(noted, server_round, metrics)
        return arrays, noted.get(server_round)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Messages:
        """Ask the clients to evaluate, in a round that is not finished."""
        if server_round <= self.done:
            return []
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Messages) -> StageMetrics:
        """Return the metrics of the clients' evaluations."""
        noted = self.result.evaluate_metrics_clientapp
        if server_round > self.done:
            _note(
                noted,
                server_round,
                self.strategy.aggregate_evaluate(server_round, replies),
            )
        if not self.evaluates:
            self._end_round(server_round)
        return noted.get(server_round)

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> StageMetrics:
        """Return the metrics of the server's evaluation: Flower's ``evaluate_fn``."""
        noted = self.result.evaluate_metrics_serverapp
        # Flower evaluates the initial model as round 0.
        if self.evaluate_fn is not None and (
            server_round > self.done or self.done == 0
        ):
            _note(noted, server_round, self.evaluate_fn(server_round, arrays))
        if server_round > 0:
            self._end_round(server_round)
        return noted.get(server_round)

    def summary(self) -> None:
        """Log the summary of the strategy."""
        self.strategy.summary()

    def _end_round(self, number: int) -> None:
        """Save a new round, or restore the random generators after the last old one."""
        if number == self.done:
            self.state.restore_random()
        elif number > self.done:
            started = time.time()
            folder = self.checkpoints.save(number, self.result, self.state)
            log(
                INFO,
                "Checkpoint written to '%s' in %.2fs",
                folder,
                time.time() - started,
            )


def _note(noted: dict[int, MetricRecord], number: int, metrics: StageMetrics) -> None:
    """Store the metrics of a round, if there are any."""
    if metrics is not None:
        noted[number] = metrics


def _restored(
    source: Checkpointing, initial: ArrayRecord, state: RunState
) -> tuple[int, Result]:
    """Return the last finished round and the result so far; restore the state."""
    newest = source.newest()
    saved = shapes_of(newest.result.arrays)
    ours = shapes_of(initial)
    different = sorted(dict(saved.items() ^ ours.items()))
    if different:
        name = different[0]
        there = saved.get(name, "missing")
        here = ours.get(name, "missing")
        raise FedrotError(
            f"'{newest.folder}' is of another model: '{name}' is {there} there and "
            f"{here} in initial_arrays ({len(different)} tensors differ)."
        )
    state.restore(newest.state, newest.state_arrays)
    log(INFO, "Resumed after round %d from '%s'.", newest.round, newest.folder)
    return newest.round, newest.result
