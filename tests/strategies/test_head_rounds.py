"""``FedRot(fit_head=True)``: head first, the choice after each round, and what travels for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedrot.strategies import Checkpointing, FedRot, fit_task_head
from fedrot.strategies.sums.requests import EVALUATE, LACKS, MODEL, STEP, SUM
from fedrot.strategies.wire.arrays import wire_bytes
from tests.strategies.fakes import Client, FakeGrid, tensors_of
from tests.strategies.toy import HEAD, State, Toy, client, loss, state

CLIENTS = 4


def run(
    clients: Iterable[Client], rounds: int, body: float = 0.0, **given: Any
) -> tuple[Any, list[State]]:
    """Return the result of a run, and the models that its rounds broadcast."""
    sent: list[State] = []

    class Noting(FedRot):
        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            sent.append(tensors_of(arrays))
            return super().configure_train(server_round, arrays, config, grid)

    strategy = Noting(
        {"model_type": "bert"}, alignment=None, fit_head=HEAD, fraction_evaluate=0.0, **given
    )
    grid = FakeGrid(dict(enumerate(clients, start=100)))
    return strategy.start(grid, ArrayRecord(state(body)), rounds, timeout=1), sent


def clients(
    to: Callable[[float], float], folder: Path | None = None, count: int = CLIENTS
) -> list[Client]:
    return [client(seed, folder, to) for seed in range(count)]


def bodies(sent: list[State], result: Any) -> list[float]:
    """Return the bodies that rounds began with, and the last one."""
    return [float(one["body"]) for one in [*sent, tensors_of(result.arrays)]]


def test_the_first_model_has_the_head_that_fit_task_head_finds(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO, "flwr")
    nodes = clients(lambda body: body)
    _, (first, *_) = run(nodes, 1)
    grid = FakeGrid(dict(enumerate(nodes, start=100)))
    found = fit_task_head(grid, ArrayRecord(state(0.0)), {"model_type": "bert"}, head=HEAD, timeout=1)
    assert found.fitted
    assert all(torch.equal(first[name], own) for name, own in tensors_of(found.arrays).items())
    said = [record.getMessage() for record in caplog.records if "Before round 1" in record.getMessage()]
    assert len(said) == 1
    assert "360 held-out rows: taken is the new model with a fitted head. The loss of" in said[0]


#: What training does to the body, and how much of the change is taken. The best body is 1.
STEPS: dict[str, tuple[float, Callable[[float], float], float]] = {
    "better": (0.0, lambda body: 1.0, 1.0),
    "half way is better": (0.0, lambda body: 2.0, 0.5),
    "worse": (1.0, lambda body: -1.0, 0.0),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_best_of_old_new_and_half_way_is_taken(case: str) -> None:
    start, to, step = STEPS[case]
    # Below four clients losses are means.
    result, sent = run(clients(to, count=3), 1, start)
    assert bodies(sent, result) == [start, start + step * (to(start) - start)]
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["fedrot-head-step"], metrics["fedrot-head-fitted"]) == (step, int(step > 0))
    assert (metrics["fedrot-head-change"] < 0) == (step > 0)
    page = Path("docs/reference/metrics.md").read_text(encoding="utf-8")
    assert all(f"* `{name}`: " in page for name in metrics if name.startswith("fedrot-head"))
    assert metrics["fedrot-head-loss"] == pytest.approx(loss(tensors_of(result.arrays), 3), rel=1e-5)


def test_no_round_is_worse_than_the_one_before() -> None:
    """Training walks at random; the oracle is the loss of each broadcast model on all held-out rows."""
    steps = iter(torch.randn(6, generator=torch.Generator().manual_seed(1)).tolist())
    changes: dict[float, float] = {}

    def walk(body: float) -> float:
        if body not in changes:
            changes[body] = body + next(steps)
        return changes[body]

    result, sent = run(clients(walk), 6)
    losses = [loss(one, CLIENTS) for one in [*sent, tensors_of(result.arrays)]]
    assert all(after <= before + 1e-6 for before, after in pairwise(losses))
    assert losses[-1] < losses[0] - 0.05
    refused = [m["fedrot-head-step"] == 0 for m in result.train_metrics_clientapp.values()]
    assert any(refused)


def test_the_error_is_the_standard_error_of_the_differences_of_rows() -> None:
    """The oracle: the rows of all clients, which have equal numbers of rows; below four, a mean."""
    nodes = clients(lambda body: body + 0.05, count=3)
    result, (first, *_) = run(nodes, 1)
    from tests.strategies.toy import rows

    last, losses = tensors_of(result.arrays), []
    for tensors in (first, last):
        model = Toy()
        model.load_state_dict(tensors)
        own = []
        for seed in range(3):
            given = rows(1000 + seed, 90)
            logits = model(given["noise"], given["centres"]).logits.double()
            own.append(torch.nn.functional.cross_entropy(logits, given["labels"], reduction="none"))
        losses.append(torch.stack(own))
    differences = losses[1] - losses[0]
    metrics = result.train_metrics_clientapp[1]
    assert metrics["fedrot-head-change"] == pytest.approx(float(differences.mean()), abs=1e-6)
    within = differences.var(1, correction=0).mean() / (3 * 90)
    assert metrics["fedrot-head-error"] == pytest.approx(float(within) ** 0.5, rel=0.2)


def noting(nodes: Iterable[Client], notes: list[tuple[str, list[str]]]) -> list[Client]:
    """Return nodes that note the step of each request and the models in it."""

    def wrapped(node: Client) -> Client:
        def answer(message: Message) -> Message | None:
            (config,) = message.content.config_records.values()
            step = str(config.get(STEP, "train"))
            models = [
                name for name in message.content.array_records if name.startswith((MODEL, "arrays"))
            ]
            notes.append((step, models))
            return node(message)

        return answer

    return [wrapped(node) for node in nodes]


def test_a_model_travels_once_for_its_head(tmp_path: Path) -> None:
    notes: list[tuple[str, list[str]]] = []
    run(noting(clients(lambda body: body + 0.3, tmp_path), notes), 2)
    first = [("count", []), ("sum", [f"{MODEL}-0"]), ("evaluate", [])]
    each = [("train", ["arrays"]), ("count", []), ("sum", [f"{MODEL}-0"]), ("sum", []), ("evaluate", [])]
    assert notes == [one for one in [*first, *each, *each] for _ in range(CLIENTS)]
    # The new model, the one before it, and the one half way; nobody else may read them.
    files = [*tmp_path.rglob("*.safetensors")]
    assert len(files) == 3
    assert files[0].parent.stat().st_mode & 0o077 == 0


def test_only_models_of_runs_long_ago_are_deleted(tmp_path: Path) -> None:
    old, new, others = (
        tmp_path / "fedrot-bodies" / name for name in ("1/a.safetensors", "2/b.safetensors", "1/c")
    )
    for path in (old, new, others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for path in (old, others):
        os.utime(path, (0, 0))
    run(clients(lambda body: body, tmp_path), 1)
    assert [path.exists() for path in (old, new, others)] == [False, True, True]


def test_who_has_lost_a_model_receives_it(tmp_path: Path) -> None:
    notes: list[tuple[str, list[str]]] = []
    nodes = clients(lambda body: body + 0.3, tmp_path)
    expected, _ = run(nodes, 2)
    tidy = noting(nodes, notes)

    def forgetful(message: Message) -> Message | None:
        for path in tmp_path.rglob("*.safetensors"):
            path.unlink()
        return tidy[0](message)

    found, _ = run([forgetful, *tidy[1:]], 2)
    # The body half way is computed from the two that came.
    assert ("evaluate", [f"{MODEL}-0", f"{MODEL}-1"]) in notes
    ours, theirs = tensors_of(found.arrays), tensors_of(expected.arrays)
    assert all(torch.equal(ours[name], own) for name, own in theirs.items())


def test_clients_that_always_lack_the_model_are_left_out(warnings: Callable[[], str]) -> None:
    def lacking(message: Message) -> Message | None:
        (config,) = message.content.config_records.values()
        lacks = Message(RecordDict({LACKS: ConfigRecord()}), reply_to=message)
        return lacks if config.get(STEP) in (SUM, EVALUATE) else client(9)(message)

    honest = clients(lambda body: body + 0.3)
    found, _ = run([*honest, lacking], 1)
    expected, _ = run(honest, 1)
    ours, theirs = tensors_of(found.arrays), tensors_of(expected.arrays)
    assert float((ours["body"] - theirs["body"]).abs()) < 0.1
    run([lacking, lacking], 1)
    assert "all say that they lack the model" in warnings()


def test_damaged_files_and_full_disks_cost_only_bytes(
    tmp_path: Path, warnings: Callable[[], str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    nodes = clients(lambda body: body + 0.3, tmp_path / "sound")
    expected, _ = run(nodes, 1)

    def damaging(message: Message) -> Message | None:
        for path in (tmp_path / "sound").rglob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
        return nodes[0](message)

    for others in ([damaging, *nodes[1:]], clients(lambda body: body + 0.3, blocked)):
        found, _ = run(others, 1)
        ours, theirs = tensors_of(found.arrays), tensors_of(expected.arrays)
        assert all(torch.equal(ours[name], own) for name, own in theirs.items())
    assert "is not kept for the next request" in warnings()


def test_a_resumed_run_does_not_begin_anew(tmp_path: Path) -> None:
    """The run is stopped after round 1; the same command goes on and ends with the same bits."""
    given: dict[str, Any] = {"checkpoints": Checkpointing(tmp_path / "runs")}
    whole, _ = run(clients(lambda body: body + 0.3), 3)
    run(clients(lambda body: body + 0.3), 1, **given)
    notes: list[tuple[str, list[str]]] = []
    found, sent = run(noting(clients(lambda body: body + 0.3), notes), 3, **given)
    assert len(sent) == 2
    assert notes[0][0] == "train"
    ours, theirs = tensors_of(found.arrays), tensors_of(whole.arrays)
    assert all(torch.equal(ours[name], own) for name, own in theirs.items())


def test_the_evaluation_of_round_0_is_of_the_fitted_model() -> None:
    seen: list[float] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(loss(tensors_of(arrays), CLIENTS))
        return MetricRecord({"loss": seen[-1]})

    strategy = FedRot({"model_type": "bert"}, alignment=None, fit_head=HEAD, fraction_evaluate=0.0)
    grid = FakeGrid(dict(enumerate(clients(lambda body: body + 0.3), start=100)))
    strategy.start(grid, ArrayRecord(state(0.0)), 2, timeout=1, evaluate_fn=evaluate)
    assert seen[0] < loss(state(0.0), CLIENTS) - 0.1
    assert seen == sorted(seen, reverse=True)


def test_an_answer_at_width_768_is_a_quarter_of_a_matrix_in_float64() -> None:
    from fedrot.head import ClassSums
    from fedrot.strategies.wire.arrays import to_arrays

    features = torch.randn(100, 768, dtype=torch.float64)
    hot = torch.nn.functional.one_hot(torch.arange(100) % 20, 20).double()
    sums = ClassSums(hot.sum(0), hot.mT @ features, features.mT @ features)
    assert wire_bytes(to_arrays(sums.packed())) <= 1.3e6
