"""The guard keeps the better of the plain and the aligned mean, each to the last bit."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    Result,
)

import fedrot
from fedrot.aggregation import Fisher, Mean, RegMean
from fedrot.errors import FedrotError
from fedrot.strategies import Aligned, Checkpointing, FedRot, Guard, Reporting, Server
from tests.fedrot.pretend import Pretend
from tests.models import near
from tests.strategies.aggregating import (
    PERMUTATIONS,
    Statistics,
    answer,
    apart,
    ask,
    fishers,
    grams,
    honest,
    merged,
    play,
    scrambled,
)
from tests.strategies.classifier import SYMMETRY, build, state
from tests.strategies.fakes import FakeGrid, reply, tensors_of

ROUNDS, CLIENTS = 2, 3
#: Nothing removes so much more than chance: the plain mean.
UNMOVED = fedrot.AlignmentOptions(chance=1e12)
BOTH = pytest.mark.parametrize("better", ["plain", "aligned"])
KEPT = "fedrot-guard-kept-aligned"
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class AlignedAdam(Aligned, FedAdam):
    pass


class AlignedMomentum(Aligned, FedAvgM):
    pass


class AlignedMedian(Aligned, FedMedian):
    pass


class AlignedPrivacy(Aligned, DifferentialPrivacyServerSideFixedClipping):
    pass


def scrambling(index: int) -> Callable[[Message], Message]:
    """Return a client that trains a little, and answers in coordinates of its own."""

    def trained(message: Message) -> Message:
        number: Any = message.content.config_records["config"]["server-round"]
        received = tensors_of(message.content.array_records["arrays"])
        update = near(received, 0.05, 10 * number + index)
        sent = fedrot.random_equivalent(update, SYMMETRY, 10 * number + index)
        return reply(message, sent, 10 + index, index)

    return trained


class Points:
    """An evaluation that likes the mean of one kind best: it is told which mean comes when.

    Without a guard's two calls per round it returns points of the ordinary evaluation.
    """

    def __init__(self, metric: str, plain: float, aligned: float) -> None:
        self.metric, self.values = metric, (plain, aligned)
        self.calls: list[int] = []

    def __call__(self, number: int, arrays: ArrayRecord) -> MetricRecord:
        seen = self.calls.count(number)
        self.calls.append(number)
        return MetricRecord({self.metric: self.values[seen] if seen < 2 else 0.5})


def points(better: str) -> Points:
    """Return an evaluation whose accuracy is higher for one of the means."""
    return Points("accuracy", *((0.75, 0.5) if better == "plain" else (0.5, 0.75)))


def run(
    build: Callable[..., FedAvg] = FedRot,
    evaluate: Evaluate | None = None,
    rounds: int = ROUNDS,
    **given: Any,
) -> Result:
    """Play rounds in the order of the clients' ids."""
    given.setdefault("server", Server(deterministic=True))
    strategy = build(SYMMETRY, fraction_evaluate=0.0, **given)
    grid = FakeGrid({100 + i: scrambling(i) for i in range(CLIENTS)})
    return strategy.start(grid, ArrayRecord(state()), rounds, evaluate_fn=evaluate)


def bits(result: Result) -> list[tuple[str, bytes]]:
    return [(name, array.data) for name, array in result.arrays.items()]


def kept(result: Result) -> list[Any]:
    return [metrics[KEPT] for metrics in result.train_metrics_clientapp.values()]


def unguarded(better: str, build: Callable[..., FedAvg] = FedRot, **given: Any) -> Result:
    if better == "plain":
        given["alignment"] = UNMOVED
    return run(build, **given)


# --- which mean is kept ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "guard", ["accuracy", "eval-loss", Guard("points", True), Guard("points", False), Guard("f1", False)]
)
def test_the_better_mean_is_kept_to_the_last_bit(guard: str | Guard, better: str) -> None:
    metric = guard if isinstance(guard, str) else guard.metric
    higher = guard.higher_is_better if isinstance(guard, Guard) else guard == "accuracy"
    plain, aligned = (2.0, 1.0) if (better == "plain") == higher else (1.0, 2.0)
    result = run(evaluate=Points(metric, plain, aligned), guard=guard)
    assert bits(result) == bits(unguarded(better))
    assert bits(result) != bits(unguarded({"plain": "aligned", "aligned": "plain"}[better]))
    assert kept(result) == [int(better == "aligned")] * ROUNDS
    for metrics in result.train_metrics_clientapp.values():
        found = (metrics["fedrot-guard-plain"], metrics["fedrot-guard-aligned"])
        assert found == (plain, aligned)


@pytest.mark.parametrize(
    ("plain", "aligned", "better"),
    [
        (0.5, 0.5, "plain"),
        (math.nan, math.nan, "plain"),
        (0.5, math.nan, "plain"),
        (math.nan, 0.5, "aligned"),
    ],
)
def test_ties_keep_the_plain_mean_and_nan_is_worst(plain: float, aligned: float, better: str) -> None:
    result = run(evaluate=Points("loss", plain, aligned), rounds=1, guard="loss")
    assert bits(result) == bits(unguarded(better, rounds=1))


def test_a_mean_that_was_kept_is_evaluated_once(tmp_path: Path) -> None:
    evaluate, file = points("aligned"), tmp_path / "rows.jsonl"
    result = run(evaluate=evaluate, guard="accuracy", reporting=Reporting(file))
    assert evaluate.calls == [0, 1, 1, 2, 2]
    found = {number: m["accuracy"] for number, m in result.evaluate_metrics_serverapp.items()}
    assert found == {0: 0.5, 1: 0.75, 2: 0.75}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    server = {row["round"]: row["metrics"]["accuracy"] for row in rows if row.get("stage") == "server"}
    assert server == found


def test_a_guard_may_evaluate_on_data_of_its_own() -> None:
    reported, chosen = points("plain"), points("plain")
    result = run(evaluate=reported, guard=Guard("accuracy", evaluate=chosen))
    assert (reported.calls, chosen.calls) == ([0, 1, 2], [1, 1, 2, 2])
    assert bits(result) == bits(unguarded("plain"))
    assert bits(run(guard=Guard("accuracy", evaluate=points("aligned")))) == bits(unguarded("aligned"))


def test_what_is_evaluated_are_the_two_means() -> None:
    seen: list[ArrayRecord] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(arrays)
        return MetricRecord({"loss": float(len(seen))})

    run(evaluate=evaluate, rounds=1, guard="loss")
    _, plain, aligned = ([(name, a.data) for name, a in arrays.items()] for arrays in seen)
    assert plain == bits(unguarded("plain", rounds=1))
    assert aligned == bits(unguarded("aligned", rounds=1))


def test_one_line_is_logged_and_one_row_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level("INFO", "flwr")
    evaluate, file = Points("accuracy", 0.564, 0.672), tmp_path / "rows.jsonl"
    run(evaluate=evaluate, rounds=1, guard="accuracy", reporting=Reporting(file))
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("Round 1: aligned 0.672, plain 0.564 accuracy: kept aligned") == 1
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    own = {"fedrot-guard-plain": 0.564, "fedrot-guard-aligned": 0.672, KEPT: 1}
    assert [row for row in rows if KEPT in row] == [{"round": 1, **own}]


def test_where_nothing_is_moved_nothing_is_evaluated(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level("INFO", "flwr")
    evaluate = points("aligned")
    result = run(evaluate=evaluate, guard="accuracy", alignment=UNMOVED)
    assert evaluate.calls == [0, 1, 2]
    assert bits(result) == bits(unguarded("plain"))
    assert kept(result) == [0, 0]
    assert "fedrot-guard-plain" not in result.train_metrics_clientapp[1]
    assert "Round 1: nothing was moved" in caplog.text


def test_biases_that_become_0_are_compared_where_no_group_is_moved() -> None:
    evaluate = points("plain")
    canonical = fedrot.AlignmentOptions(chance=1e12, canonical=True)
    assert bits(run(evaluate=evaluate, guard="accuracy", alignment=canonical)) == bits(
        unguarded("plain")
    )
    assert evaluate.calls == [0, 1, 1, 2, 2]


# --- with everything else ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("build", "given"),
    [
        (AlignedAdam, {"eta": 0.01}),
        (AlignedMomentum, {"server_learning_rate": 0.7, "server_momentum": 0.9}),
    ],
)
def test_an_optimiser_sees_the_kept_mean_only(
    build: Callable[..., FedAvg], given: dict[str, Any], better: str
) -> None:
    evaluate = points(better)
    result = run(build, evaluate, guard="accuracy", **given)
    assert bits(result) == bits(unguarded(better, build, **given))
    # The new model is a step from the mean, so it is evaluated by itself.
    assert evaluate.calls == [0, 1, 1, 1, 2, 2, 2]


@BOTH
@pytest.mark.parametrize(
    "given",
    [
        {
            "alignment": fedrot.AlignmentOptions(anchor="global"),
            "server": Server(deterministic=True),
        },
        {"server": Server()},
    ],
)
def test_every_way_to_take_updates(given: dict[str, Any], better: str) -> None:
    result = run(evaluate=points(better), rounds=1, guard="accuracy", **given)
    # The plain mean is the same for every anchor.
    anchor = {"alignment": fedrot.AlignmentOptions()} if better == "plain" else {}
    wanted = unguarded(better, rounds=1, **{**given, **anchor})
    # Views of messages lie elsewhere in memory in every run: last bits differ, and rotations with them.
    within = 0.0 if given.get("server") != Server() else 5e-3
    assert apart(result.arrays, tensors_of(wanted.arrays)) <= within


@BOTH
@pytest.mark.parametrize(
    ("aggregation", "collect", "options"),
    [(RegMean, grams, fedrot.AlignmentOptions(chance=0)), (Fisher, fishers, PERMUTATIONS)],
)
def test_statistics_go_with_their_updates(
    aggregation: Any, collect: Callable[..., Statistics], options: fedrot.AlignmentOptions, better: str
) -> None:
    clients = scrambled(honest(collect), collect, options.parts)
    given: dict[str, Any] = {"aggregation": aggregation, "alignment": options}
    guard = Guard("accuracy", evaluate=points(better))
    found, metrics = play(FedRot(SYMMETRY, guard=guard, **given), clients)
    if better == "plain":
        wanted = merged(Mean(), clients)
    else:
        wanted = tensors_of(play(FedRot(SYMMETRY, **given), clients)[0])
    assert apart(found, wanted) <= 1e-6
    assert metrics[KEPT] == int(better == "aligned")


def test_both_means_are_of_the_same_clients() -> None:
    """A client whose statistics are of another form is in neither."""
    clients = scrambled(honest(grams), grams)
    odd = {name: gram.diagonal().clone() for name, gram in clients[0].statistics["gram"].items()}
    clients[0] = type(clients[0])(clients[0].update, clients[0].weight, {"gram": odd})
    guard = Guard("accuracy", evaluate=points("plain"))
    found, metrics = play(FedRot(SYMMETRY, guard=guard, aggregation=RegMean), clients)
    assert metrics["fedrot-replies-dropped"] == 1
    assert apart(found, merged(Mean(), clients[1:])) <= 1e-6


@BOTH
def test_an_aggregation_is_compared_with_the_plain_mean_without_alignment_too(
    better: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level("INFO", "flwr")
    clients = honest(grams)
    guard = Guard("accuracy", evaluate=points(better))
    found, metrics = play(FedRot(guard=guard, aggregation=RegMean, alignment=None), clients)
    assert apart(found, merged(RegMean() if better == "aligned" else Mean(), clients)) <= 1e-6
    assert metrics[KEPT] == int(better == "aligned")
    assert apart(merged(RegMean(), clients), merged(Mean(), clients)) > 1e-3
    assert f"accuracy: kept {'merged' if better == 'aligned' else 'plain'}" in caplog.text


@BOTH
def test_a_round_on_a_device(better: str) -> None:
    clients = [type(c)(c.update, c.weight, {}) for c in scrambled(honest())]

    def played(**given: Any) -> ArrayRecord:
        strategy = FedRot(SYMMETRY, **given)
        messages = ask(strategy, state(), len(clients))
        replies = [answer(m, c, i) for i, (m, c) in enumerate(zip(messages, clients, strict=True))]
        arrays, _ = strategy.aggregate_train(1, replies)
        assert arrays is not None
        return arrays

    wanted = tensors_of(played(**({"alignment": UNMOVED} if better == "plain" else {})))
    with Pretend() as device:
        guard = Guard("accuracy", evaluate=points(better))
        found = played(server=Server(device="cuda"), guard=guard)
        assert device.uploads > 0
    assert apart(found, wanted) <= 2e-6


@pytest.mark.parametrize("after", [1, 2])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, after: int) -> None:
    """The aligned mean is the better one in odd rounds."""

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        calls.append(number)
        return MetricRecord({"loss": float(-calls.count(number) if number % 2 else calls.count(number))})

    calls: list[int] = []
    whole = run(AlignedAdam, evaluate, rounds=3, guard="loss", eta=0.01)
    calls = []
    for rounds in (after, 3):
        checkpointing = Checkpointing(tmp_path)
        given: dict[str, Any] = {"guard": "loss", "eta": 0.01, "checkpoints": checkpointing}
        resumed = run(AlignedAdam, evaluate, rounds=rounds, **given)
    assert kept(whole) == kept(resumed) == [1, 0, 1]
    assert bits(resumed) == bits(whole)
    for number, metrics in whole.train_metrics_clientapp.items():
        assert metrics == resumed.train_metrics_clientapp[number]
    assert resumed.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp


def test_the_page_about_the_guard_runs() -> None:
    page = Path(__file__).parents[3] / "docs/how-to/guard.md"
    block, *_ = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    scored: list[Any] = []

    def accuracy(model: Any, data: Any) -> float:
        scored.append(data)
        return 1.0 / len(scored)

    names = {name: globals()[name] for name in ("ArrayRecord", "FedRot", "MetricRecord")}
    grid = FakeGrid({100 + i: scrambling(i) for i in range(CLIENTS)})
    scope = {**names, "accuracy": accuracy, "grid": grid, "model": build(), "validation_data": "rows"}
    exec(compile(block.replace("num_rounds=3", "num_rounds=1"), page.name, "exec"), scope)
    assert scored == ["rows"] * 3
    assert kept(scope["result"]) == [0]


@pytest.mark.parametrize(
    ("metric", "higher"),
    [("Accuracy", True), ("macro_f1", True), ("Top-1 ACC", True), ("eval/Loss", False), ("wer", False)],
)
def test_a_name_says_what_is_better_however_it_is_written(metric: str, higher: bool) -> None:
    assert Guard(metric).higher_is_better is higher


def test_from_a_plain_mean_that_is_kept_an_optimiser_goes_back_to_the_model_that_was_sent() -> None:
    """In a canonical round the aligned mean has other coordinates than the broadcast model."""
    canonical = fedrot.AlignmentOptions(chance=1e12, canonical=True)
    given: dict[str, Any] = {"eta": 0.01, "rounds": 1}
    result = run(AlignedAdam, points("plain"), guard="accuracy", alignment=canonical, **given)
    assert bits(result) == bits(unguarded("plain", AlignedAdam, **given))


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"guard": "accuracy", "alignment": None}, "alignment=None"),
        ({"guard": 0.5}, "guard is a float"),
        ({"guard": "points"}, r"'points' does not show.*higher_is_better=True"),
        ({"guard": "loss_of_accuracy"}, "'loss_of_accuracy' does not show"),
        ({"guard": ""}, "name of a metric"),
    ],
)
def test_a_wrong_guard_is_refused_when_the_strategy_is_built(given: Any, message: str) -> None:
    with pytest.raises(FedrotError, match=message):
        FedRot(SYMMETRY, **given)


def test_a_wrong_evaluation_is_refused_when_the_guard_is_built() -> None:
    with pytest.raises(FedrotError, match="evaluate is a dict"):
        Guard("accuracy", evaluate={"accuracy": 1.0})  # type: ignore[arg-type]


def _private(symmetry: Any, fraction_evaluate: float, **given: Any) -> Any:
    settings: Any = {"noise_multiplier": 0.1, "clipping_norm": 1.0, "num_sampled_clients": CLIENTS}
    return AlignedPrivacy(
        symmetry, FedAvg(), **settings, alignment=fedrot.AlignmentOptions(anchor="global"), **given
    )


@pytest.mark.parametrize("build", [AlignedMedian, _private])
def test_a_strategy_without_a_mean_is_refused_at_the_start(build: Callable[..., FedAvg]) -> None:
    evaluate = points("plain")
    with pytest.raises(FedrotError, match="needs every update"):
        run(build, evaluate, guard="accuracy")
    assert evaluate.calls == []


def test_a_run_without_an_evaluation_is_refused_at_the_start() -> None:
    with pytest.raises(FedrotError, match=r"'accuracy' at the server.*evaluate_fn="):
        run(guard="accuracy")
    strategy = FedRot(SYMMETRY, guard="accuracy")
    clients = [type(c)(c.update, c.weight, {}) for c in scrambled(honest())]
    with pytest.raises(FedrotError, match="call this strategy's start with evaluate_fn"):
        play(strategy, clients)


def test_a_metric_that_is_missing_is_refused_before_clients_train() -> None:
    evaluate = Points("macro_f1", 0.5, 0.75)
    with pytest.raises(FedrotError, match=r"round 0 has no metric 'accuracy'.*macro_f1"):
        run(evaluate=evaluate, guard="accuracy")
    assert evaluate.calls == [0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "round 1 has no metric .*it has: nothing"),
        (MetricRecord(), "has no metric 'loss'.*it has: nothing"),
        (MetricRecord({"loss": [1.0, 2.0]}), "returns a list for metric 'loss'"),
    ],
)
def test_an_evaluation_without_a_number_ends_the_run(
    returned: MetricRecord | None, message: str
) -> None:
    with pytest.raises(FedrotError, match=message):
        run(evaluate=lambda number, _: returned if number else None, guard="loss")


def test_tensors_of_a_round_are_those_that_were_received() -> None:
    """The update that the plain mean takes is the client's own, with its own statistics."""
    seen: list[Any] = []

    class Watched(FedRot):
        def on_update(self, update: Any) -> None:
            seen.append(update)

    clients = scrambled(honest(grams), grams)
    play(Watched(SYMMETRY, aggregation=RegMean, alignment=fedrot.AlignmentOptions(chance=0)), clients)
    for update, client in zip(seen, clients, strict=True):
        for name, tensor in client.update.items():
            assert torch.equal(update.update.tensors[name].to(tensor.dtype), tensor)
        for name, gram in client.statistics["gram"].items():
            torch.testing.assert_close(update.update.statistics["gram"][name], gram)
