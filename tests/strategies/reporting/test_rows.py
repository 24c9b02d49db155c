"""The rows and metrics that a run reports."""

import json
import math

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam

import fedrot
from fedrot.strategies import Aligned, FedRot
from fedrot.strategies.reporting.rows import cut_rows, report_metrics
from fedrot.strategies.settings import Checkpointing, Reporting
from tests.models import near
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import grid_of, reply


class AlignedFedAdam(Aligned, FedAdam):
    """Has both a mixin and a state of its own."""


def update(index):
    return fedrot.random_equivalent(near(state(), 0.05, index), SYMMETRY, index)


def client(index, loss=0.5):
    def answer(message):
        if message.metadata.message_type == "train":
            return reply(
                message, update(index), 10, index, loss=loss, per_class=[0.1, loss]
            )
        metrics = MetricRecord({"num-examples": 4, "accuracy": 0.25 * index})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return answer


def grid():
    return grid_of(map(client, range(3)))


def rows_of(path):
    def refused(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [
        json.loads(line, parse_constant=refused)
        for line in path.read_text().splitlines()
    ]


def stages_of(path):
    """Return the rows of metrics."""
    return [row for row in rows_of(path) if "stage" in row]


@pytest.mark.parametrize("strategy", [FedRot, AlignedFedAdam])
def test_every_round_and_stage_has_one_row_that_is_there_when_its_stage_ends(
    strategy, tmp_path
):
    path = tmp_path / "deep" / "rows.jsonl"
    seen = []
    heard = []

    def evaluate(number, arrays):
        seen.append(
            [(row["round"], row["stage"]) for row in stages_of(path)] if number else []
        )
        return MetricRecord({"norm": 1.5 * number}) if number != 1 else None

    reporting = Reporting(path, lambda number, metrics: heard.append((number, metrics)))
    result = strategy(SYMMETRY, reporting=reporting).start(
        grid(), ArrayRecord(state()), 2, evaluate_fn=evaluate
    )
    rows = stages_of(path)
    stages = [(row["round"], row["stage"]) for row in rows]
    first = [(0, "server"), (1, "train"), (1, "evaluate")]
    assert stages == [*first, (2, "train"), (2, "evaluate"), (2, "server")]
    assert seen == [[], first, stages[:-1]]
    kinds = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    for row in rows:
        assert row["metrics"] == dict(kinds[row["stage"]][row["round"]])
    assert rows[1]["metrics"]["per_class"] == [0.1, 0.5]
    assert [number for number, _ in heard] == [number for number, _ in stages]
    for row, (_, metrics) in zip(rows, heard, strict=True):
        flat = dict(row["metrics"])
        each = {f"per_class/{i}": v for i, v in enumerate(flat.pop("per_class", []))}
        assert metrics == {
            f"{row['stage']}/{name}": v for name, v in (flat | each).items()
        }


def test_what_is_not_finite_is_null_in_a_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    heard = dict[str, float]()
    reporting = Reporting(path, lambda number, metrics: heard.update(metrics))
    given = MetricRecord({"loss": math.nan, "best": [math.inf, 1.0, -math.inf], "n": 3})
    report_metrics(reporting, 1, "train", given)
    (row,) = rows_of(path)
    assert row["metrics"] == {"loss": None, "best": [None, 1.0, None], "n": 3}
    assert math.isnan(heard.pop("train/loss"))
    assert heard == {
        "train/best/0": math.inf,
        "train/best/1": 1.0,
        "train/best/2": -math.inf,
        "train/n": 3.0,
    }


def test_an_error_of_the_function_ends_the_run():
    def full(number, metrics):
        raise OSError("no space left for the tracker")

    with pytest.raises(OSError, match="no space left"):
        FedRot(SYMMETRY, reporting=Reporting(on_round=full)).start(
            grid(), ArrayRecord(state()), 1
        )


def test_a_resumed_run_goes_on_with_its_rows(tmp_path, warnings):
    path = tmp_path / "rows.jsonl"
    kept = tmp_path / "checkpoints"
    heard = []

    def play(rounds):
        strategy = FedRot(
            SYMMETRY,
            reporting=Reporting(path, lambda number, metrics: heard.append(number)),
            checkpoints=Checkpointing(kept),
            fraction_evaluate=0,
        )
        strategy.start(grid(), ArrayRecord(state()), rounds)

    play(2)
    (kept / "round-000002" / "model.safetensors").write_bytes(b"")
    play(3)
    assert [row["round"] for row in stages_of(path)] == [1, 2, 3]
    assert heard == [1, 2, 2, 3]
    assert "Not in the checkpoints" not in warnings()


ROWS = ['{"round": 1, "a": "é"}', '{"round": 2}', '{"other": 3}', '{"round": 3}']


@pytest.mark.parametrize(
    "unfinished", ["", '{"round": 1', '{"round": 1}', '{"round": "é']
)
def test_later_rows_are_cut(tmp_path, unfinished):
    path = tmp_path / "rows.jsonl"
    for after, expected in ((0, [2]), (1, [0, 2]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])):
        path.write_bytes(
            "".join(row + "\n" for row in ROWS).encode() + unfinished.encode()
        )
        cut_rows(path, after)
        assert path.read_text(encoding="utf-8").splitlines() == [
            ROWS[i] for i in expected
        ]
    assert list(tmp_path.iterdir()) == [path]
