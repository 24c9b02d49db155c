"""The rounds of a run, with a checkpoint after each, from the first one on or from a checkpoint."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedrot._io import replacing
from fedrot.errors import FedrotError
from fedrot.strategies.reporting.json_log import log_fields
from fedrot.strategies.resume.checkpoints import Checkpoint, Checkpoints
from fedrot.strategies.resume.state import RunState, restore_random
from fedrot.strategies.wire.arrays import wire_bytes

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def run(
    strategy: Strategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int = 3,
    timeout: float = 3600,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: Evaluate | None = None,
    *,
    checkpoints: Checkpoints | None = None,
    resume: str | Path | None = None,
) -> Result:
    """Do what ``Strategy.start`` of Flower does, and write a checkpoint at the end of every round.

    Resumed, the run goes on after the newest good checkpoint with its model, its result so far, the
    state of the strategy and of the random generators, and what the strategy changed in the
    configurations. A strategy that has a method ``begin`` is told, before anything else happens, after
    which round it goes on: 0 if the run was killed in its first, None if this is a new run.

    Args:
        strategy: as it was built for the run that is resumed.
        grid: of ``Strategy.start``, like all up to ``evaluate_fn``.
        num_rounds: of the whole run, those before it was resumed included.
        checkpoints: where to write.
        resume: the folder of checkpoints to go on from. It may be the one that is written to; then it
            may be empty or missing, too, and the run starts from its first round.

    Raises:
        FedrotError: there is no good checkpoint; it is of another model or strategy; another run
            writes to the folder, or has left checkpoints there; a checkpoint cannot be written.
    """
    train_config = ConfigRecord() if train_config is None else train_config
    evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
    _log_start(strategy, num_rounds, initial_arrays, train_config, evaluate_config)
    with ExitStack() as stack:
        goes_on = resume is not None and (checkpoints is None or checkpoints.used())
        if checkpoints is not None:
            stack.enter_context(checkpoints.writing())
        found = _found(checkpoints, resume)
        state = RunState(strategy, train_config, evaluate_config)
        arrays, result, done = initial_arrays, Result(), 0
        if found is not None:
            _check_same_model(found, initial_arrays)
            arrays, result, done = found.arrays, found.result, found.round
            state.restore(found.state, found.state_arrays)
        if hasattr(strategy, "begin"):
            strategy.begin(done if goes_on or found is not None else None)
        started = time.time()
        if found is not None:
            restore_random(found.state, found.state_arrays)
            fields = {"round": done, "checkpoint": str(found.folder), "resumed": True}
            log_fields(INFO, fields, "Resumed after round %d from '%s'.", done, found.folder)
            del found
        elif evaluate_fn is not None:
            metrics = evaluate_fn(0, initial_arrays)
            log(INFO, "Initial global evaluation results: %s", metrics)
            if metrics is not None:
                result.evaluate_metrics_serverapp[0] = metrics
        for number in range(done + 1, num_rounds + 1):
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", number, num_rounds)
            arrays = _train(strategy, grid, number, arrays, train_config, timeout, result)
            _evaluate(strategy, grid, number, arrays, evaluate_config, timeout, result)
            if evaluate_fn is not None:
                log(INFO, "Global evaluation")
                metrics = evaluate_fn(number, arrays)
                log(INFO, "\t└──> MetricRecord: %s", metrics)
                if metrics is not None:
                    result.evaluate_metrics_serverapp[number] = metrics
            if checkpoints is not None:
                saving = time.time()
                folder = checkpoints.save(number, arrays, result, state)
                seconds = time.time() - saving
                fields = {"round": number, "checkpoint": str(folder), "seconds": seconds}
                log_fields(INFO, fields, "Checkpoint written to '%s' in %.2fs", folder, seconds)
    _log_end(result, time.time() - started)
    return result


def begin_rows(paths: Iterable[Path | None], after_round: int | None) -> None:
    """Make JSON-lines files ready for the rows of a run.

    Args:
        paths: of one run. None, and a file that does not exist, need nothing.
        after_round: the run goes on in the files after this round, and the rows of later ones go; after
            round 0 everything happens again. A new run, None, begins files of its own: what an earlier
            run wrote moves to ``NAME.1.jsonl``, or the next number that is free for all of them.
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
    """Return where the file of an earlier run lies: ``NAME.1.jsonl`` for ``NAME.jsonl`` and 1."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def cut_rows(path: Path, after_round: int) -> None:
    """Remove the rows of later rounds, and what is no finished row, from a JSON-lines file.

    Args:
        path: nothing happens if there is no such file.
        after_round: rows whose ``round`` is larger go.
    """
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


def _found(checkpoints: Checkpoints | None, resume: str | Path | None) -> Checkpoint | None:
    """Return the checkpoint to go on from, None to start from the first round."""
    used = checkpoints is not None and checkpoints.rounds() != []
    same = (
        checkpoints is not None
        and resume is not None
        and checkpoints.folder.resolve() == Path(resume).resolve()
    )
    if used and not same:
        assert checkpoints is not None
        raise FedrotError(
            f"'{checkpoints.folder}' already has checkpoints. Go on from them with resume="
            f"'{checkpoints.folder}', or write to another folder."
        )
    if resume is None:
        return None
    if same and not used:
        log(INFO, "There is no checkpoint in '%s' yet: starting from round 1.", resume)
        return None
    if checkpoints is None:
        log(INFO, "No further checkpoints are written; for these, give their folder too.")
    return Checkpoints(resume).newest()


def _check_same_model(found: Checkpoint, initial: ArrayRecord) -> None:
    saved, ours = ({n: a.shape for n, a in arrays.items()} for arrays in (found.arrays, initial))
    different = sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
    if different:
        name = different[0]
        raise FedrotError(
            f"'{found.folder}' is of another model: '{name}' is {saved.get(name, 'missing')} there and "
            f"{ours.get(name, 'missing')} in initial_arrays ({len(different)} tensors differ)."
        )


def _train(
    strategy: Strategy,
    grid: Grid,
    number: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    timeout: float,
    result: Result,
) -> ArrayRecord:
    """Return the model after a round of training: the old one if nothing came of the round."""
    messages = strategy.configure_train(number, arrays, config, grid)
    replies = grid.send_and_receive(messages=messages, timeout=timeout)
    aggregated, metrics = strategy.aggregate_train(number, replies)
    if metrics is not None:
        log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
        result.train_metrics_clientapp[number] = metrics
    if aggregated is None:
        return arrays
    result.arrays = aggregated
    return aggregated


def _evaluate(
    strategy: Strategy,
    grid: Grid,
    number: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    timeout: float,
    result: Result,
) -> None:
    messages = strategy.configure_evaluate(number, arrays, config, grid)
    replies = grid.send_and_receive(messages=messages, timeout=timeout)
    metrics = strategy.aggregate_evaluate(number, replies)
    if metrics is not None:
        log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
        result.evaluate_metrics_clientapp[number] = metrics


def _log_start(
    strategy: Strategy,
    num_rounds: int,
    arrays: ArrayRecord,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
) -> None:
    log(INFO, "Starting %s strategy:", type(strategy).__name__)
    log(INFO, "\t├── Number of rounds: %d", num_rounds)
    log(INFO, "\t├── ArrayRecord (%.2f MB)", wire_bytes(arrays) / 1024**2)
    for name, config in (("train", train_config), ("evaluate", evaluate_config)):
        shown = {key: "<bytes>" if isinstance(v, bytes) else v for key, v in config.items()}
        log(INFO, "\t├── ConfigRecord (%s): %s", name, shown or "(empty!)")
    strategy.summary()
    log(INFO, "")


def _log_end(result: Result, seconds: float) -> None:
    log(INFO, "")
    log(INFO, "Strategy execution finished in %.2fs", seconds)
    log(INFO, "")
    log(INFO, "Final results:")
    log(INFO, "")
    for line in io.StringIO(str(result)):
        log(INFO, "\t%s", line.strip("\n"))
    log(INFO, "")
