"""Metrics as JSON lines and in TensorBoard, and log records as JSON."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedrot
from fedrot.errors import FedrotError
from fedrot.strategies import Aligned, FedRot, JsonLines, MetricsLog
from fedrot.strategies.reporting.metrics_log import begin_rows, cut_rows
from fedrot.strategies.settings import Checkpointing, Reporting, Robustness
from tests.models import State, config_of, near
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import FakeGrid, failure, reply

CONFIG = config_of(NAME)


class AlignedFedAdam(Aligned, FedAdam):
    """Has both a mixin and a state of its own."""


def update(index: int) -> State:
    return fedrot.random_equivalent(near(state(), 0.05, index), SYMMETRY, index)


def client(index: int, loss: float = 0.5) -> Any:
    def answer(message: Message) -> Message:
        if message.metadata.message_type == "train":
            return reply(message, update(index), 10, index, loss=loss, per_class=[0.1, loss])
        metrics = MetricRecord({"num-examples": 4, "accuracy": 0.25 * index})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return answer


def grid() -> FakeGrid:
    return FakeGrid({100 + i: client(i) for i in range(3)})


def rows_of(path: Path) -> list[dict[str, Any]]:
    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refused) for line in path.read_text().splitlines()]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    found = EventAccumulator(str(folder)).Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize("strategy", [FedRot, AlignedFedAdam])
def test_every_round_and_stage_has_one_row_that_is_there_when_its_stage_ends(
    strategy: type[Aligned], tmp_path: Path
) -> None:
    path, seen = tmp_path / "deep" / "metrics.jsonl", []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        seen.append([(row["round"], row["stage"]) for row in rows_of(path)] if number else [])
        return MetricRecord({"norm": 1.5 * number}) if number != 1 else None

    result = strategy(CONFIG, reporting=Reporting(metrics=path)).start(
        grid(), ArrayRecord(state()), 2, evaluate_fn=evaluate
    )
    rows = rows_of(path)
    stages = [(row["round"], row["stage"]) for row in rows]
    first = [(0, "server"), (1, "train"), (1, "evaluate")]
    assert stages == [*first, (2, "train"), (2, "evaluate"), (2, "server")]
    assert seen == [[], first, stages[:-1]]
    assert {tuple(row) for row in rows} == {("round", "stage", "seconds", "metrics")}
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert 0 <= rows[0]["seconds"] < rows[-1]["seconds"] < 60
    kinds = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    for row in rows:
        assert row["metrics"] == dict(kinds[row["stage"]][row["round"]])
    assert rows[1]["metrics"]["per_class"] == [0.1, 0.5]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(1, "train", MetricRecord({"loss": math.nan, "best": [math.inf, 1.0, -math.inf], "n": 3}))
    log.write(2, "train", None)
    (row,) = rows_of(path)
    assert row["metrics"] == {"loss": None, "best": [None, 1.0, None], "n": 3}


def test_without_a_path_nothing_is_wrapped_or_written(tmp_path: Path) -> None:
    def evaluate(number: int, arrays: ArrayRecord) -> None: ...

    log = MetricsLog()
    assert log.evaluating(evaluate) is evaluate
    assert MetricsLog(tmp_path / "m.jsonl").evaluating(None) is None
    log.write(1, "train", {"loss": 0.5})
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "board"
    strategy = FedRot(CONFIG, reporting=Reporting(metrics=path, tensorboard=folder))
    strategy.start(
        grid(),
        ArrayRecord(state()),
        2,
        evaluate_fn=lambda number, arrays: MetricRecord({"loss": math.nan if number else 2.0}),
    )
    found = scalars(folder)
    for row in rows_of(path):
        for name, value in row["metrics"].items():
            several = isinstance(value, list)
            values = {f"/{i}": v for i, v in enumerate(value)} if several else {"": value}
            for suffix, number in values.items():
                expected = math.nan if number is None else number
                tag = f"{row['stage']}/{name}{suffix}"
                assert found[tag].pop(row["round"]) == pytest.approx(expected, nan_ok=True)
    assert not any(found.values())
    assert {"train/per_class/1", "evaluate/accuracy", "server/loss"} < found.keys()


def test_a_missing_tensorboard_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(FedrotError, match=r"pip install 'fedrot\[tensorboard\]'"):
        FedRot(CONFIG, reporting=Reporting(tensorboard="board"))
    FedRot(CONFIG)


def test_rounds_that_are_played_again_are_written_once(tmp_path: Path) -> None:
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "board"
    with MetricsLog(path, folder) as log:
        for number in (1, 2, 3):
            log.write(number, "train", {"loss": float(number)})
    with path.open("a") as file:
        file.write('{"round": 4, "sta')
    with MetricsLog(path, folder) as log:
        log.begin(1)
        log.write(2, "train", {"loss": 20.0})
    assert [(row["round"], row["metrics"]["loss"]) for row in rows_of(path)] == [(1, 1.0), (2, 20.0)]
    assert scalars(folder) == {"train/loss": {1: 1.0, 2: 20.0}}


def test_a_resumed_run_goes_on_with_its_metrics(tmp_path: Path, warnings: Any) -> None:
    path, folder, kept = (tmp_path / name for name in ("metrics.jsonl", "board", "checkpoints"))

    def play(rounds: int) -> None:
        strategy = FedRot(
            CONFIG,
            reporting=Reporting(metrics=path, tensorboard=folder),
            checkpointing=Checkpointing(folder=kept, resume=kept),
            fraction_evaluate=0,
        )
        strategy.start(grid(), ArrayRecord(state()), rounds)

    play(2)
    (kept / "round-000002" / "model.safetensors").write_bytes(b"")
    play(3)
    assert [row["round"] for row in rows_of(path)] == [1, 2, 3]
    assert list(scalars(folder)["train/loss"]) == [1, 2, 3]
    assert "Not in the checkpoints" not in warnings()


def test_with_tensorboard_alone_the_servers_evaluation_is_written(tmp_path: Path) -> None:
    with MetricsLog(tensorboard=tmp_path) as log:
        evaluate = log.evaluating(lambda number, arrays: MetricRecord({"loss": 0.5}))
        assert evaluate is not None
        evaluate(3, ArrayRecord())
    assert scalars(tmp_path) == {"server/loss": {3: 0.5}}


def test_after_a_kill_in_the_first_round_tensorboard_has_round_0_once(tmp_path: Path) -> None:
    for after, loss in ((None, 1.0), (0, 2.0)):
        with MetricsLog(tensorboard=tmp_path) as log:
            log.begin(after)
            log.write(0, "server", {"loss": loss})
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("server/loss")
    assert [(event.step, event.value) for event in found] == [(0, 2.0)]


def test_seconds_count_from_the_start_of_a_run_and_not_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((100.0, 900.0, 902.5))
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("fedrot.strategies.reporting.metrics_log.time", clock)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(1, "train", {"loss": 0.5})
    (row,) = rows_of(tmp_path / "metrics.jsonl")
    assert row["seconds"] == 2.5


# --- the log -----------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Keeps the lines that the formatter makes."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def rows(self, *fields: str) -> list[tuple[Any, ...]]:
        """Return, sorted, the level and these fields of the rows that have them and no others."""
        own = {"time", "level", "logger", "message"}
        rows = [row for row in map(json.loads, self.lines) if row.keys() - own == {*fields}]
        return sorted((row["level"], *(row[name] for name in fields)) for row in rows)


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("flwr"), Lines()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_round_s_records_carry_their_fields(lines: Lines, tmp_path: Path) -> None:
    spoilt = {name: tensor * torch.nan for name, tensor in update(1).items()}
    clients = {
        100: client(0),
        101: lambda message: reply(message, spoilt, 10, 1),
        102: failure,
        103: lambda message: None,
        104: client(4, loss=0.25),
    }
    strategy = FedRot(CONFIG, fraction_evaluate=0.0, checkpointing=Checkpointing(folder=tmp_path))
    result = strategy.start(FakeGrid(clients), ArrayRecord(state()), 1, timeout=0.1)
    assert lines.rows("round", "client", "weight") == [("DEBUG", 1, 0, 10.0), ("DEBUG", 1, 4, 10.0)]
    aligned = lines.rows("round", "client", "before", "after", "seconds")
    assert [row[:3] for row in aligned] == [("DEBUG", 1, 0), ("DEBUG", 1, 4)]
    assert all(before > 10 * after > 0 < seconds for *_, before, after, seconds in aligned)
    ((_, _, client_id, reason),) = lines.rows("round", "client", "dropped")
    assert (client_id, "NaN" in reason) == (1, True)
    failed = lines.rows("round", "client", "failed")
    assert failed == [("INFO", 1, 102, "crashed"), ("INFO", 1, 103, "No answer came in time.")]
    ((level, number, metrics),) = lines.rows("round", "metrics")
    ours = {k: v for k, v in result.train_metrics_clientapp[1].items() if k.startswith("fedrot-")}
    assert (level, number) == ("INFO", 1)
    assert metrics == ours
    ((*_, folder, seconds),) = lines.rows("round", "checkpoint", "seconds")
    assert Path(folder) == tmp_path / "round-000001"
    assert 0 <= seconds < 60


def test_resuming_and_damaged_checkpoints_are_said_with_fields(lines: Lines, tmp_path: Path) -> None:
    def play(rounds: int) -> None:
        strategy = FedRot(
            CONFIG, fraction_evaluate=0.0, checkpointing=Checkpointing(folder=tmp_path, resume=tmp_path)
        )
        strategy.start(grid(), ArrayRecord(state()), rounds)

    play(2)
    (tmp_path / "round-000002" / "model.safetensors").write_bytes(b"")
    play(2)
    ((level, folder, reason),) = lines.rows("checkpoint", "damaged")
    assert (level, folder) == ("WARNING", str(tmp_path / "round-000002"))
    assert "model.safetensors" in reason
    assert lines.rows("round", "checkpoint", "resumed") == [
        ("INFO", 1, str(tmp_path / "round-000001"), True)
    ]


def test_evaluations_dropped_and_lost_rounds_are_said_with_fields(lines: Lines) -> None:
    strategy = FedRot(CONFIG, robustness=Robustness(min_replies=3))
    fake = FakeGrid(dict.fromkeys(range(100, 103), failure))
    messages = list(strategy.configure_evaluate(4, ArrayRecord(state()), ConfigRecord(), fake))
    like_most = {"num-examples": 1, "loss": 0.5}
    contents = [{"num-examples": -1, "loss": 0.5}, like_most, like_most]
    evaluations = [
        Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
        for message, metrics in zip(messages, contents, strict=True)
    ]
    strategy.aggregate_evaluate(4, evaluations)
    ((level, number, stage, node, reason),) = lines.rows("round", "stage", "client", "dropped")
    assert (level, number, stage, node) == ("WARNING", 4, "evaluate", messages[0].metadata.dst_node_id)
    assert "-1" in reason
    strategy.start(fake, ArrayRecord(state()), 1)
    assert lines.rows("round", "lost") == [("WARNING", 1, "0 good replies, 3 needed.")]


def test_a_line_is_json_whatever_the_record_holds() -> None:
    before = datetime.now(UTC)
    record = logging.makeLogRecord(
        {
            "name": "flwr",
            "levelname": "INFO",
            "msg": "two\nlines of %s ü",
            "args": ("a",),
            "fedrot": {"round": 1, "loss": math.nan, "path": Path("a/b"), "kept": {1: (math.inf, 2)}},
        }
    )
    line = JsonLines().format(record)
    assert "\n" not in line
    row = json.loads(line)
    time = datetime.fromisoformat(row.pop("time"))
    assert time.utcoffset() == timedelta(0)
    assert abs(time - before) < timedelta(seconds=60)
    assert row == {
        "level": "INFO",
        "logger": "flwr",
        "message": "two\nlines of a ü",
        "round": 1,
        "loss": None,
        "path": "a/b",
        "kept": {"1": [None, 2]},
    }


def test_an_exception_is_kept_in_its_line() -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    row = json.loads(JsonLines().format(record))
    assert row["exception"].startswith("Traceback")
    assert row["exception"].endswith("ValueError: boom")


ROWS = ['{"round": 1, "a": "é"}', '{"round": 2}', '{"other": 3}', '{"round": 3}']


@pytest.mark.parametrize("unfinished", ["", '{"round": 1', '{"round": 1}', '{"round": "é'])
def test_later_rows_are_cut(tmp_path: Path, unfinished: str) -> None:
    path = tmp_path / "rows.jsonl"
    for after, expected in ((0, [2]), (1, [0, 2]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])):
        path.write_bytes("".join(row + "\n" for row in ROWS).encode() + unfinished.encode())
        cut_rows(path, after)
        assert path.read_text(encoding="utf-8").splitlines() == [ROWS[i] for i in expected]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("taken", ["alignment.1.jsonl", "metrics.1.jsonl"])
def test_a_number_that_one_of_two_files_has_is_free_for_neither(taken: str, tmp_path: Path) -> None:
    paths = [tmp_path / "alignment.jsonl", tmp_path / "metrics.jsonl"]
    for path in (*paths, tmp_path / taken):
        path.write_text(path.name)
    begin_rows(paths, None)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    moved = {path.with_suffix(".2.jsonl").name: path.name for path in paths}
    assert left == {taken: taken, **moved}
