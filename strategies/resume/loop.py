"""``run``: the rounds of a run with a checkpoint after each, from the start or from a checkpoint."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedrot.errors import FedrotError
from fedrot.strategies.reporting.rows import Evaluate
from fedrot.strategies.resume.checkpoints import Checkpoint, Checkpoints
from fedrot.strategies.resume.state import RunState, restore_random
from fedrot.strategies.wire.arrays import wire_bytes

T = TypeVar("T")


def run(
    strategy: Strategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int = 3,
    timeout: float = 3600,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: Evaluate | None = None,
    should_stop: Callable[[int, Result], bool] | None = None,
    *,
    checkpoints: Checkpoints | None = None,
    resume: str | Path | None = None,
) -> Result:
    """Run a strategy as Flower's ``Strategy.start`` does, and write a checkpoint after every round.

    A resumed run goes on after the newest valid checkpoint. It restores the model, the result so far,
    the strategy's state, the changed entries of the configurations, and the random generators. If the
    strategy has a method ``begin``, it is called first, with the last finished round: 0 if the run was
    killed in round 1, None for a new run. If it has a method ``model_of``, this returns the arrays by
    which a checkpoint of another model is recognised.

    Args:
        strategy: built as for the run that is resumed.
        grid: as in ``Strategy.start``, like all arguments up to ``should_stop``.
        num_rounds: of the whole run, with the rounds before it was resumed.
        should_stop: asked after each checkpoint, and first about the round of the one that is resumed.
        checkpoints: where to write.
        resume: the folder of checkpoints to resume from. If ``checkpoints`` writes to it, it may be
            empty or missing; then the run starts from round 1.

    Raises:
        FedrotError: there is no valid checkpoint; it is of another model or strategy; another run
            writes to the folder, or has left checkpoints there; a checkpoint cannot be written.
    """
    this = _Run(
        strategy,
        grid,
        timeout,
        ConfigRecord() if train_config is None else train_config,
        ConfigRecord() if evaluate_config is None else evaluate_config,
        evaluate_fn,
        initial_arrays,
        Result(arrays=initial_arrays),
    )
    this.log_start(num_rounds)
    with ExitStack() as stack:
        killed_in_first = resume is not None and checkpoints is not None and checkpoints.used()
        if checkpoints is not None:
            stack.enter_context(checkpoints.writing())
        source = _source(checkpoints, resume)
        state = RunState(strategy, this.train_config, this.evaluate_config)
        started = time.time()
        if source is not None:
            this.go_on(source.newest(), state)
        else:
            this.begin(0 if killed_in_first else None)
        stops = should_stop or (lambda number, result: False)
        stopped = this.done > 0 and stops(this.done, this.result)
        for number in range(this.done + 1, num_rounds + 1):
            if stopped:
                log(INFO, "Stopping early after round %d", number - 1)
                break
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", number, num_rounds)
            this.round(number)
            if checkpoints is not None:
                saving = time.time()
                folder = checkpoints.save(number, this.arrays, this.result, state)
                log(INFO, "Checkpoint written to '%s' in %.2fs", folder, time.time() - saving)
            stopped = stops(number, this.result)
    this.log_end(time.time() - started)
    return this.result


def _source(checkpoints: Checkpoints | None, resume: str | Path | None) -> Checkpoints | None:
    """Return the checkpoints to resume from; None starts from round 1.

    Raises:
        FedrotError: the folder to write to has checkpoints, and is not the one to resume from.
    """
    found = Checkpoints(resume) if resume is not None else None
    if checkpoints is None:
        if found is not None:
            log(INFO, "No checkpoints are written from here on: no folder for them was given.")
        return found
    used = checkpoints.rounds() != []
    same = found is not None and checkpoints.folder.resolve() == found.folder.resolve()
    if used and not same:
        raise FedrotError(
            f"'{checkpoints.folder}' already has checkpoints. Go on from them with resume="
            f"'{checkpoints.folder}', or write to another folder."
        )
    if same and not used:
        log(INFO, "There is no checkpoint in '%s' yet: starting from round 1.", resume)
        return None
    return found


@dataclass
class _Run:
    """The arguments of a run, and its model, result and last finished round."""

    strategy: Strategy
    grid: Grid
    timeout: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: Evaluate | None
    arrays: ArrayRecord
    result: Result
    done: int = 0

    def begin(self, after_round: int | None) -> None:
        """Begin with the initial model."""
        self._tell_strategy(after_round)
        self._evaluate_at_server(0, "Initial global evaluation results: %s")

    def go_on(self, found: Checkpoint, state: RunState) -> None:
        """Go on from a checkpoint."""
        model_of = getattr(self.strategy, "model_of", lambda arrays: arrays)
        _check_same_model(found, model_of(found.arrays), model_of(self.arrays))
        self.arrays, self.result, self.done = found.arrays, found.result, found.round
        state.restore(found.state, found.state_arrays)
        self._tell_strategy(found.round)
        restore_random(found.state, found.state_arrays)
        log(INFO, "Resumed after round %d from '%s'.", found.round, found.folder)

    def _tell_strategy(self, after_round: int | None) -> None:
        if hasattr(self.strategy, "begin"):
            self.strategy.begin(after_round)

    def round(self, number: int) -> None:
        """Train at the clients, and evaluate there and at the server."""
        strategy, result = self.strategy, self.result
        aggregated, metrics = self._answers(
            number, strategy.configure_train, self.train_config, strategy.aggregate_train
        )
        _note(result.train_metrics_clientapp, number, metrics)
        if aggregated is not None:
            self.arrays = result.arrays = aggregated
        metrics = self._answers(
            number, strategy.configure_evaluate, self.evaluate_config, strategy.aggregate_evaluate
        )
        _note(result.evaluate_metrics_clientapp, number, metrics)
        if self.evaluate_fn is not None:
            log(INFO, "Global evaluation")
        self._evaluate_at_server(number, "\t└──> MetricRecord: %s")

    def _answers(
        self, number: int, configure: Callable[..., Any], config: ConfigRecord, read: Callable[..., T]
    ) -> T:
        """Return what the strategy makes of the clients' replies to its messages of one stage."""
        messages = configure(number, self.arrays, config, self.grid)
        return read(number, self.grid.send_and_receive(messages=messages, timeout=self.timeout))

    def _evaluate_at_server(self, number: int, message: str) -> None:
        if self.evaluate_fn is not None:
            metrics = self.evaluate_fn(number, self.arrays)
            log(INFO, message, metrics)
            if metrics is not None:
                self.result.evaluate_metrics_serverapp[number] = metrics

    def log_start(self, num_rounds: int) -> None:
        """Log what ``Strategy.start`` logs at the start."""
        log(INFO, "Starting %s strategy:", type(self.strategy).__name__)
        log(INFO, "\t├── Number of rounds: %d", num_rounds)
        log(INFO, "\t├── ArrayRecord (%.2f MB)", wire_bytes(self.arrays) / 1024**2)
        for name, config in (("train", self.train_config), ("evaluate", self.evaluate_config)):
            shown = {key: "<bytes>" if isinstance(v, bytes) else v for key, v in config.items()}
            log(INFO, "\t├── ConfigRecord (%s): %s", name, shown or "(empty!)")
        self.strategy.summary()
        log(INFO, "")

    def log_end(self, seconds: float) -> None:
        """Log what ``Strategy.start`` logs at the end."""
        for line in ("", f"Strategy execution finished in {seconds:.2f}s", "", "Final results:", ""):
            log(INFO, line)
        for line in io.StringIO(str(self.result)):
            log(INFO, "\t%s", line.strip("\n"))
        log(INFO, "")


def _check_same_model(
    found: Checkpoint, there: Mapping[str, Array], initial: Mapping[str, Array]
) -> None:
    saved, ours = ({name: array.shape for name, array in arrays.items()} for arrays in (there, initial))
    different = sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
    if different:
        name = different[0]
        raise FedrotError(
            f"'{found.folder}' is of another model: '{name}' is {saved.get(name, 'missing')} there and "
            f"{ours.get(name, 'missing')} in initial_arrays ({len(different)} tensors differ)."
        )


def _note(found: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
        found[number] = metrics
