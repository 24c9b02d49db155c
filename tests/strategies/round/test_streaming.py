"""Replies that are taken one at a time: how many are held, in which order, and what may not enter."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedYogi,
    Krum,
    QFedAvg,
    Strategy,
)

import fedrot
from fedrot.aggregation import Mean, RegMean
from fedrot.strategies import Aligned, FedRot, from_arrays, to_arrays
from fedrot.strategies.lazy_grid import LONGEST_PAUSE, LazyGrid
from fedrot.strategies.round.aligner import ToAnchor
from fedrot.strategies.round.merge import Averaged
from fedrot.strategies.round.outbox import as_sent, common_model
from fedrot.strategies.round.play import by_client, by_contents
from fedrot.strategies.round.update import Update
from fedrot.strategies.settings import Reporting, Server
from tests.models import EAGER, State, config_of, near
from tests.models import largest_difference as difference
from tests.strategies.aggregating import answer, grams, honest
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import (
    FakeGrid,
    broadcast,
    failure,
    largest_difference,
    reply,
    tensors_of,
)
from tests.strategies.grouped import grouped

CONFIG = config_of(NAME)
COUNT = 5


def updates(count: int = COUNT, scramble: bool = True) -> list[State]:
    """Return clients that trained a little, each in coordinates of its own."""
    honest = [near(state(), 0.05, seed) for seed in range(count)]
    return [fedrot.random_equivalent(u, SYMMETRY, i) if scramble else u for i, u in enumerate(honest)]


def replies(messages: Iterable[Message], sent: Iterable[State], **metrics: Any) -> list[Message]:
    return [
        reply(m, u, 10 + i, i, **metrics) for i, (m, u) in enumerate(zip(messages, sent, strict=True))
    ]


def behind(strategy: type[Strategy]) -> Any:
    return type(f"Aligned{strategy.__name__}", (Aligned, strategy), {})


# --- how many are held -------------------------------------------------------------------------------


class Counted:
    """Makes replies when they are asked for, and counts how many of those made are still alive."""

    def __init__(self, messages: list[Message], sent: list[State]) -> None:
        self.messages, self.sent = messages, sent
        self.most = 0
        self._alive: list[weakref.ref[ArrayRecord]] = []

    def __iter__(self) -> Iterator[Message]:
        for index, (message, update) in enumerate(zip(self.messages, self.sent, strict=True)):
            made = reply(message, update, 10, index, train_loss=0.5)
            self._alive.append(weakref.ref(made.content.array_records["arrays"]))
            gc.collect()
            self.most = max(self.most, sum(ref() is not None for ref in self._alive))
            yield made
            del made


STREAMING: dict[str, Callable[..., Any]] = {
    "FedRot": FedRot,
    "FedRot, global": lambda *a, **k: FedRot(
        *a, alignment=fedrot.AlignmentOptions(anchor="global"), **k
    ),
    "FedRot, Mean, not aligned": lambda *a, **k: FedRot(*a, aggregation=Mean, alignment=None, **k),
    "FedAvg": behind(FedAvg),
    "FedAvgM": behind(FedAvgM),
    "FedAdam": behind(FedAdam),
    "FedYogi": behind(FedYogi),
}
WAITING: dict[str, Callable[..., Any]] = {
    "deterministic": lambda *a, **k: FedRot(*a, server=Server(deterministic=True), **k),
}
HOLDING: dict[str, Callable[..., Any]] = {
    **WAITING,
    "FedMedian": behind(FedMedian),
    "QFedAvg": lambda *a, **k: behind(QFedAvg)(*a, client_learning_rate=0.5, **k),
    "Krum": lambda *a, **k: behind(Krum)(*a, num_malicious_nodes=1, **k),
}


def most_alive(strategy: FedAvg) -> int:
    """Play a round, and return how many of its replies were held at once."""
    counted = Counted(broadcast(strategy, state(), COUNT), updates())
    arrays, _ = strategy.aggregate_train(1, counted)
    assert arrays is not None
    return counted.most


@pytest.mark.parametrize("name", sorted(STREAMING))
def test_one_update_is_held_at_a_time(name: str) -> None:
    assert most_alive(STREAMING[name](CONFIG)) == 1


@pytest.mark.parametrize("name", sorted(WAITING))
def test_what_needs_all_updates_holds_them(name: str) -> None:
    assert most_alive(WAITING[name](CONFIG)) == COUNT


# --- order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", sorted(fedrot.anchors.ANCHORS))
def test_deterministic_rounds_agree_to_the_last_bit_whoever_was_fastest(anchor: str) -> None:
    strategy = FedRot(
        CONFIG, alignment=fedrot.AlignmentOptions(anchor=anchor), server=Server(deterministic=True)
    )
    messages = broadcast(strategy, state(), COUNT)
    sent = replies(messages, updates(), loss=0.5)
    results = [strategy.aggregate_train(1, [sent[i] for i in order])[0] for order in ORDERS]
    assert {largest_difference(results[0], other) for other in results} == {0.0}


ORDERS = ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3])


def test_sorted_updates_have_one_order_and_no_client_chooses_its_place() -> None:
    """Ids of a client's choice, the smallest among them, put it first as often as anything else."""
    messages = broadcast(FedRot(CONFIG), state(), 4)

    def order(ids: Sequence[int], places: Sequence[int], seed: int) -> list[int]:
        """Return the clients, 0 to 3, in the order in which they are taken."""
        sent = [near(state(), 0.01, 10 * seed + client) for client in range(4)]
        given = [
            Update(ids[client], reply(messages[client], {}, 1, ids[client]), "arrays", sent[client], 1.0)
            for client in places
        ]
        known = {id(update.tensors): client for client, update in zip(places, given, strict=True)}
        return [known[id(update.tensors)] for update in by_contents(given)]

    for ids in ((5, 5, 2, 5), (0, 1, 2, 3)):
        orders = {tuple(order(ids, places, 0)) for places in itertools.permutations(range(4))}
        assert len(orders) == 1
    first = [order((-(2**63), 1, 2, 3), range(4), seed)[0] for seed in range(40)]
    assert 2 <= first.count(0) <= 20


def test_trusted_ids_give_the_order_themselves() -> None:
    (message, *_) = broadcast(FedRot(CONFIG), state(), 2)
    given = [Update(client, message, "arrays", {}, 1.0) for client in (7, 3, 11, 5)]
    assert [update.client for update in by_client(given)] == [3, 5, 7, 11]


def elsewhere(array: Array, shift: int) -> Array:
    """Return the array with a longer header, so that its values start elsewhere in memory."""
    size = int.from_bytes(array.data[8:10], "little")
    header, values = array.data[10 : 10 + size - 1], array.data[10 + size :]
    start = array.data[:8] + (size + shift).to_bytes(2, "little")
    data = start + header + b" " * shift + b"\n" + values
    return Array(array.dtype, array.shape, array.stype, data)


def test_deterministic_rounds_do_not_depend_on_where_messages_lie_in_memory() -> None:
    def results(**settings: Any) -> Iterator[ArrayRecord | None]:
        strategy = FedRot(
            CONFIG, alignment=fedrot.AlignmentOptions(anchor="global"), aggregation=RegMean, **settings
        )
        messages = broadcast(strategy, state(), 3)
        for shift in range(0, 64, 8):
            sent = [
                answer(m, c, i) for i, (m, c) in enumerate(zip(messages, honest(grams), strict=True))
            ]
            for message in sent:
                for record in message.content.array_records.values():
                    for name, array in record.items():
                        record[name] = elsewhere(array, shift)
            yield strategy.aggregate_train(1, sent)[0]

    first, *others = results(server=Server(deterministic=True))
    assert {largest_difference(first, other) for other in others} == {0.0}
    first, *others = results()
    assert max(largest_difference(first, other) for other in others) < 1e-4


def test_in_order_of_arrival_the_mean_is_the_same_to_rounding() -> None:
    strategy = FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor="global"))
    messages = broadcast(strategy, state(), COUNT)
    sent = replies(messages, updates())
    results = [strategy.aggregate_train(1, [sent[i] for i in order])[0] for order in ORDERS]
    apart = [largest_difference(results[0], other) for other in results]
    assert max(apart) < 1e-6
    aligned = [fedrot.align(u, state(), SYMMETRY).apply(u) for u in updates()]
    weights = [10 + i for i in range(COUNT)]
    expected = {
        name: sum(w * a[name].double() for w, a in zip(weights, aligned, strict=True)) / sum(weights)
        for name in state()
    }
    assert difference(tensors_of(results[0]), expected) < 1e-6


def test_a_long_running_mean_stays_near_the_float64_one() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(200, generator=generator)
    mean, total, weights = Mean(), torch.zeros(200, dtype=torch.float64), 0.0
    for index in range(2000):
        value, weight = base + 0.01 * torch.randn(200, generator=generator), 1.0 + index % 7
        mean.add({"w": value}, weight)
        total, weights = total + weight * value.double(), weights + weight
    apart = (mean.result()["w"] - total / weights).abs() / (total / weights).abs()
    assert float(apart.median()) < 1e-6


# --- a grid that fetches one reply at a time ---------------------------------------------------------


class Slow(FakeGrid):
    """Answers a message after it was asked for a number of times, never where that is infinite."""

    def __init__(self, clients: Any, looks: dict[int, float]) -> None:
        super().__init__(clients)
        self.looks = dict(looks)
        self.pulled: list[int] = []

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ids = list(message_ids)
        self.pulled.append(len(ids))
        ready = []
        for message_id in ids:
            node = self._sent[message_id].metadata.dst_node_id
            self.looks[node] -= 1
            if self.looks[node] <= 0:
                ready.append(message_id)
        return super().pull_messages(ready)


class Quick(LazyGrid):
    """Notes its pauses instead of making them, while a clock of its own goes on."""

    def __init__(self, grid: FakeGrid) -> None:
        super().__init__(grid)
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def clients(count: int = 3) -> dict[int, Any]:
    sent = updates(count)
    return {100 + i: lambda m, i=i: reply(m, sent[i], 10, i) for i in range(count)}


def test_replies_are_sent_for_at_once_and_fetched_one_by_one_as_they_arrive() -> None:
    slow = Slow(clients(), {100: 3, 101: 1, 102: 2})
    grid = Quick(slow)
    messages = [Message(RecordDict(), dst_node_id=n, message_type="train") for n in clients()]
    waiting = grid.send_and_receive(messages, timeout=60).stream()
    assert slow.asked == [[100, 101, 102]]
    assert slow.pulled == []
    assert [m.metadata.src_node_id for m in waiting] == [101, 102, 100]
    assert set(slow.pulled) == {1}


def test_pauses_grow_while_nothing_arrives_and_no_longer_than_time_is_left() -> None:
    grid = Quick(Slow(clients(1), {100: 9}))
    message = Message(RecordDict(), dst_node_id=100, message_type="train")
    assert len(list(grid.send_and_receive([message], timeout=2.0))) == 1
    assert grid.pauses[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert max(grid.pauses) <= 2.0


def test_without_a_timeout_pauses_are_no_longer_than_flowers() -> None:
    grid = Quick(Slow(clients(1), {100: 20}))
    message = Message(RecordDict(), dst_node_id=100, message_type="train")
    assert len(list(grid.send_and_receive([message]))) == 1
    assert len(grid.pauses) == 19
    assert max(grid.pauses) == grid.pauses[-1] == LONGEST_PAUSE == 3.0


def test_after_a_reply_pauses_are_short_again_and_then_grow() -> None:
    grid = Quick(Slow(clients(2), {100: 4, 101: 7}))
    messages = [Message(RecordDict(), dst_node_id=n, message_type="train") for n in (100, 101)]
    assert len(list(grid.send_and_receive(messages))) == 2
    assert grid.pauses == pytest.approx([0.2, 0.4, 0.8, 0.1, 0.2, 0.4])


def test_who_does_not_answer_in_time_is_left_out() -> None:
    grid = LazyGrid(Slow(clients(), {100: 1, 101: math.inf, 102: 1}))
    strategy = FedRot(CONFIG, fraction_evaluate=0.0)
    start = time.monotonic()
    result = strategy.start(grid, ArrayRecord(state()), 1, timeout=0.5)
    assert 0.5 <= time.monotonic() - start < 20
    assert result.train_metrics_clientapp[1]["fedrot-replies-accepted"] == 2


def test_what_has_arrived_when_time_is_up_is_taken_however_long_the_others_took() -> None:
    grid = LazyGrid(Slow(clients(), {100: 1, 101: 1, 102: 1}))
    messages = [Message(RecordDict(), dst_node_id=n, message_type="train") for n in clients()]
    found = []
    for message in grid.send_and_receive(messages, timeout=0.2).stream():
        time.sleep(0.15)
        found.append(message)
    assert len(found) == 3


def test_what_arrives_in_time_while_another_reply_is_used_is_taken() -> None:
    """Though using that one takes until time is up: there is a last look."""
    grid = LazyGrid(Slow(clients(), {100: 1, 101: 2, 102: 2}))
    messages = [Message(RecordDict(), dst_node_id=n, message_type="train") for n in clients()]
    found = []
    for message in grid.send_and_receive(messages, timeout=0.1).stream():
        if not found:
            time.sleep(0.15)
        found.append(message)
    assert len(found) == 3


def test_nobody_asked_nothing_fetched() -> None:
    assert list(LazyGrid(FakeGrid({})).send_and_receive([])) == []


# --- what may not enter ------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [1, 2, 3])
def test_a_round_with_too_few_good_replies_fails_and_the_model_stays(least: int, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    strategy = FedRot(
        CONFIG,
        server=Server(min_replies=least),
        reporting=Reporting(rows=report),
    )
    messages = broadcast(strategy, state(), 3)
    sent = replies(messages, updates(3))
    sent[0] = reply(messages[0], {n: t * torch.nan for n, t in state().items()}, 5, 0)
    arrays, metrics = strategy.aggregate_train(1, sent)
    assert metrics is not None
    assert (arrays is None) == (least > 2)
    lost = [row for row in map(json.loads, report.read_text().splitlines()) if "lost" in row]
    assert [row["lost"] for row in lost] == ["2 good replies, 3 needed."] * (least > 2)


def test_after_a_failed_round_the_next_one_starts_from_the_same_model() -> None:
    seen = []

    def broken(message: Message) -> Message:
        seen.append(tensors_of(message.content.array_records["arrays"]))
        # Each in a tensor of its own: one fault of all would end the run.
        spoilt = {**state(), list(state())[len(seen)]: torch.tensor(torch.nan)}
        spoilt = {n: t.expand_as(state()[n]) for n, t in spoilt.items()}
        return reply(message, spoilt if len(seen) <= 2 else updates(1)[0], 10, 0)

    strategy = FedRot(CONFIG, min_available_nodes=1, min_train_nodes=1, fraction_evaluate=0.0)
    grid = FakeGrid({100: broken})
    grid.nodes = {100: broken, 101: broken}
    result = strategy.start(grid, ArrayRecord(state()), 2)
    assert all(difference(model, state()) == 0 for model in seen)
    assert [m["fedrot-replies-accepted"] for m in result.train_metrics_clientapp.values()] == [0, 2]


def test_a_server_step_that_overflows_fails_one_round(caplog: pytest.LogCaptureFixture) -> None:
    """FedAvgM keeps the model of its last step, from which the next one goes."""
    logging.getLogger("flwr").propagate = True
    base = {name: t.half() if t.is_floating_point() else t for name, t in state().items()}

    def client(message: Message) -> Message:
        number: Any = message.content.config_records["config"]["server-round"]
        sent = tensors_of(message.content.array_records["arrays"])
        if number == 2:
            sent["classifier.bias"] = torch.full_like(sent["classifier.bias"], 6e4)
        return reply(message, sent, 10)

    strategy = behind(FedAvgM)(
        SYMMETRY,
        server_learning_rate=2.0,
        server_momentum=0.0,
        fraction_evaluate=0.0,
    )
    result = strategy.start(FakeGrid(dict.fromkeys((1, 2), client)), ArrayRecord(base), num_rounds=4)
    assert len(result.train_metrics_clientapp) == 4
    assert "No new model in 1 of 4 rounds, the first is round 2" in caplog.text


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"min_replies": 0}, "min_replies is 0"),
        ({"wire": torch.int8}, r"wire is torch\.int8"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(fedrot.FedrotError, match=problem):
        FedRot(CONFIG, **grouped(**settings))


def private_q_fedavg() -> Any:
    private: Any = behind(DifferentialPrivacyServerSideFixedClipping)
    return private(
        CONFIG,
        QFedAvg(client_learning_rate=0.5),
        0.0,
        1.0,
        4,
        alignment=fedrot.AlignmentOptions(anchor="global"),
    )


@pytest.mark.parametrize("build", [lambda: HOLDING["QFedAvg"](CONFIG), private_q_fedavg])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -1.0])
def test_one_clients_loss_does_not_decide_q_fedavg(loss: float, build: Callable[[], Any]) -> None:
    strategy = build()
    messages = broadcast(strategy, state(), 4)
    sent = replies(messages, updates(4), train_loss=0.5)
    sent[0] = reply(messages[0], updates(4)[0], 10, 0, train_loss=loss)
    arrays, metrics = strategy.aggregate_train(1, sent)
    assert all(bool(t.isfinite().all()) for t in tensors_of(arrays).values())
    assert (metrics or {})["fedrot-replies-dropped"] == 1


class Exploding(FedAvg):
    """Makes a model that is none."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        return ArrayRecord({n: t * torch.inf for n, t in tensors_of(arrays).items()}), metrics


def test_a_model_that_is_not_finite_is_not_taken_from_any_strategy() -> None:
    strategy = behind(Exploding)(CONFIG)
    messages = broadcast(strategy, state(), 3)
    arrays, _ = strategy.aggregate_train(1, replies(messages, updates(3)))
    assert arrays is None


def test_a_reply_that_flower_cannot_read_does_not_end_the_run() -> None:
    class Garbage(FakeGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            (message_id,) = message_ids
            if self._sent[message_id].metadata.dst_node_id == 101:
                raise json.JSONDecodeError("no object", "", 0)
            return super().pull_messages([message_id])

    strategy = FedRot(CONFIG, fraction_evaluate=0.0)
    result = strategy.start(Garbage(clients()), ArrayRecord(state()), 1, timeout=5)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["fedrot-replies-accepted"], metrics["fedrot-replies-failed"]) == (2, 1)


class PerClient(FedRot):
    """Sends a message of its own to every node."""

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        return [
            Message(message.content, dst_node_id=message.metadata.dst_node_id, message_type="train")
            for message in super().configure_train(*args, **kwargs)
        ]


def test_a_subclass_may_make_its_own_messages() -> None:
    result = PerClient(CONFIG, fraction_evaluate=0.0).start(FakeGrid(clients()), ArrayRecord(state()), 2)
    found = [m["fedrot-replies-accepted"] for m in result.train_metrics_clientapp.values()]
    assert found == [3, 3]


def test_large_configurations_of_clients_are_not_kept() -> None:
    seen: list[RecordDict] = []

    def note(contents: list[RecordDict], key: str) -> MetricRecord:
        seen.extend(contents)
        return MetricRecord({"x": 1})

    strategy = FedRot(CONFIG, train_metrics_aggr_fn=note)
    messages = broadcast(strategy, state(), 2)
    sent = replies(messages, updates(2))
    sent[0].content["huge"] = ConfigRecord({"text": "x" * 10**6})
    strategy.aggregate_train(1, sent)
    assert [set(content) for content in seen] == [{"metrics", "client"}] * 2


def test_without_alignment_replies_keep_their_order() -> None:
    ours, stock = FedRot(CONFIG, alignment=None), FedAvg()
    results = []
    for strategy in (ours, stock):
        messages = broadcast(strategy, state(), COUNT)
        ids = (3, 1, 4, 0, 2)
        sent = [reply(m, u, 10 + i, i) for m, u, i in zip(messages, updates(), ids, strict=True)]
        results.append(strategy.aggregate_train(1, sent)[0])
    assert largest_difference(*results) == 0.0


def test_nobody_asked_is_no_failed_round() -> None:
    strategy = FedRot(CONFIG, fraction_train=0.0, fraction_evaluate=0.0)
    result = strategy.start(FakeGrid(clients()), ArrayRecord(state()), 1)
    assert dict(result.train_metrics_clientapp) == {}


def test_an_error_is_counted_once_and_not_after_a_reply() -> None:
    strategy = FedRot(CONFIG)
    messages = broadcast(strategy, state(), 3)
    sent = replies(messages[:2], updates(2))
    _, metrics = strategy.aggregate_train(1, [*sent, failure(messages[0]), *[failure(messages[2])] * 5])
    assert metrics is not None
    assert (metrics["fedrot-replies-accepted"], metrics["fedrot-replies-failed"]) == (2, 1)


def test_an_error_under_the_id_of_the_superlink_is_of_the_node_that_was_asked(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    strategy = FedRot(CONFIG, reporting=Reporting(rows=report))
    grid = FakeGrid(dict.fromkeys(range(100, 103), failure))
    messages = list(strategy.configure_train(1, ArrayRecord(state()), ConfigRecord(), grid))
    grid.push_messages(messages)
    gone = failure(messages[2])
    gone.metadata.__dict__["_src_node_id"] = 1
    strategy.aggregate_train(1, [*replies(messages[:2], updates(2)), gone])
    rows = [row for row in map(json.loads, report.read_text().splitlines()) if "failed" in row]
    node = messages[2].metadata.dst_node_id
    assert [(row["client"], row["failed"]) for row in rows] == [(node, "crashed")]


# --- precision on the wire ---------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [FedRot, behind(FedAdam), behind(FedMedian)])
def test_half_precision_travels_and_the_server_keeps_its_own(kind: Any, wire: torch.dtype) -> None:
    received: list[State] = []

    def client(message: Message) -> Message:
        arrays = message.content.array_records["arrays"]
        tensors = from_arrays(arrays)
        received.append(tensors)
        trained = {n: t + torch.full_like(t, 0.25) for n, t in tensors.items()}
        answered = reply(message, state(), 10, message.metadata.dst_node_id)
        answered.content["arrays"] = to_arrays(trained, wire)
        return answered

    strategy = kind(
        CONFIG,
        alignment=fedrot.AlignmentOptions(anchor="global"),
        server=Server(wire=wire),
        fraction_evaluate=0.0,
    )
    grid = FakeGrid(dict.fromkeys((100, 101), client))
    result = strategy.start(grid, ArrayRecord(state()), 1)
    assert {t.dtype for tensors in received for t in tensors.values()} == {wire}
    new = tensors_of(result.arrays)
    assert {t.dtype for t in new.values()} == {torch.float32}
    if kind.__name__ != "AlignedFedAdam":
        rounded = {n: (t.to(wire) + 0.25).float() for n, t in state().items()}
        symmetric = fedrot.align({**state(), **rounded}, state(), SYMMETRY).apply({**state(), **rounded})
        assert difference(new, {n: symmetric[n] for n in new}) < 1e-2


def test_a_model_that_is_broadcast_in_bfloat16_and_tied_stays_so() -> None:
    shared = torch.randn(6, 4)
    base = {**state(), "steps": torch.tensor(3), "one": shared, "two": shared}
    sent = to_arrays(base, torch.bfloat16)
    strategy = FedRot(CONFIG, alignment=None, aggregation=Mean)
    grid = FakeGrid(dict.fromkeys((100, 101), failure))
    messages = list(strategy.configure_train(1, sent, ConfigRecord(), grid))
    answers = [reply(m, state(), 10, i) for i, m in enumerate(messages)]
    for i, message in enumerate(answers):
        shifted = from_arrays(sent)
        shifted = {n: t + i if t.is_floating_point() else t for n, t in shifted.items()}
        shifted["two"] = shifted["one"]
        message.content["arrays"] = to_arrays(shifted)
    arrays, _ = strategy.aggregate_train(1, answers)
    assert arrays is not None
    assert {n: (a.dtype, a.stype) for n, a in arrays.items()} == {
        n: (a.dtype, a.stype) for n, a in sent.items()
    }
    new = from_arrays(arrays)
    assert new["one"] is new["two"]
    assert (new["one"].float() - (shared + 0.5)).abs().max() < 0.03
    assert int(new["steps"]) == 3


@pytest.mark.parametrize("wire", [None, torch.float16])
def test_a_model_in_bfloat16_is_sent_with_its_ties(wire: torch.dtype | None) -> None:
    """The base strategy reads Flower's own arrays; clients receive the model's, or those of the wire."""
    shared = torch.randn(6, 4)
    model = to_arrays({**state(), "one": shared, "two": shared}, torch.bfloat16)
    strategy = FedRot(CONFIG, server=Server(wire=wire))
    grid = FakeGrid(dict.fromkeys((100, 101), failure))
    messages = list(strategy.configure_train(1, model, ConfigRecord(), grid))
    assert len(messages) == 2
    for message in messages:
        received = from_arrays(message.content.array_records["arrays"])
        assert {t.dtype for t in received.values()} == {wire or torch.bfloat16}
        assert received["one"] is received["two"]


def test_tensors_that_are_no_longer_equal_are_no_longer_sent_as_one() -> None:
    shared = torch.ones(3)
    sent = to_arrays({"one": shared, "two": shared, "three": shared})
    found = as_sent({"one": shared, "two": shared + 1, "three": shared.clone()}, sent)
    assert [array.stype == sent[name].stype for name, array in found.items()] == [True, False, True]
    assert from_arrays(found)["two"].tolist() == [2.0] * 3


def test_of_several_records_the_model_is_the_one_that_the_strategy_names() -> None:
    model, control = ArrayRecord({"w": torch.ones(2)}), ArrayRecord({"w": torch.zeros(2)})
    messages = [
        Message(RecordDict({"arrays": model, "control": control}), node, "train") for node in (1, 2)
    ]
    assert common_model(messages, "arrays") is model
    assert common_model(messages, "control") is control
    assert common_model(messages, None) is common_model(messages, "weights") is None
    alone = [Message(RecordDict({"mine": model}), 3, "train")]
    assert common_model([*messages, *alone], "arrays") is model
    assert common_model(alone, None) is model


# --- evaluation --------------------------------------------------------------------------------------


def evaluation(to: Message, **metrics: Any) -> Message:
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=to)


def test_a_malformed_evaluation_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    strategy = FedRot(CONFIG)
    grid = FakeGrid(dict.fromkeys(range(100, 107), failure))
    messages = list(strategy.configure_evaluate(1, ArrayRecord(state()), ConfigRecord(), grid))
    good = [
        evaluation(m, **{"num-examples": 1 + i, "loss": float(i)}) for i, m in enumerate(messages[:2])
    ]
    bad = [
        Message(RecordDict(), reply_to=messages[2]),
        evaluation(messages[3], **{"num-examples": -1, "loss": 9.0}),
        evaluation(messages[4], **{"num-examples": 1, "loss": [9.0, 9.0]}),
        evaluation(messages[0], **{"num-examples": 100, "loss": 9.0}),
        failure(messages[5]),
    ]
    found = strategy.aggregate_evaluate(1, iter([*good, *bad]))
    assert dict(found or {}) == pytest.approx({"loss": (1 * 0.0 + 2 * 1.0) / 3})
    assert caplog.text.count("Evaluation of client") == 4


def test_evaluations_without_examples_average_to_nothing() -> None:
    strategy = FedRot(CONFIG)
    grid = FakeGrid(dict.fromkeys((100, 101), failure))
    messages = list(strategy.configure_evaluate(1, ArrayRecord(state()), ConfigRecord(), grid))
    empty = [evaluation(m, **{"num-examples": 0, "loss": 1.0}) for m in messages]
    assert strategy.aggregate_evaluate(1, empty) is None
    assert strategy.aggregate_evaluate(1, []) is None


def test_evaluations_are_weighted_by_the_metric_that_the_strategy_names() -> None:
    strategy = FedRot(CONFIG, weighted_by_key="rows")
    grid = FakeGrid(dict.fromkeys((100, 101), failure))
    messages = list(strategy.configure_evaluate(1, ArrayRecord(state()), ConfigRecord(), grid))
    sent = [evaluation(m, rows=n, loss=x) for m, n, x in zip(messages, (1, 3), (0.0, 1.0), strict=True)]
    assert dict(strategy.aggregate_evaluate(1, sent) or {})["loss"] == 0.75


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_models_to_evaluate_travel_in_the_precision_of_the_wire(wire: torch.dtype) -> None:
    strategy = FedRot(CONFIG, server=Server(wire=wire))
    grid = FakeGrid(dict.fromkeys((100, 101), failure))
    messages = list(strategy.configure_evaluate(1, ArrayRecord(state()), ConfigRecord(), grid))
    for message in messages:
        received = from_arrays(message.content.array_records["arrays"])
        assert {t.dtype for t in received.values()} == {wire}


@pytest.mark.parametrize(
    ("key", "zero", "shown"),
    [("num-examples", 0, "0"), ("num-examples", 0.0, "0.0"), ("rows", 0, "0")],
)
def test_an_evaluation_of_no_examples_whose_loss_is_nan_is_left_out_and_named(
    key: str, zero: float, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The mean over no rows is NaN, and 0 times NaN would be the mean over all clients."""
    logging.getLogger("flwr").propagate = True
    strategy = FedRot(CONFIG, weighted_by_key=key)
    grid = FakeGrid(dict.fromkeys((100, 101, 102), failure))
    messages = list(strategy.configure_evaluate(1, ArrayRecord(state()), ConfigRecord(), grid))
    given = zip(messages, (10, zero, 30), (1.0, math.nan, 3.0), strict=True)
    sent = [evaluation(m, **{key: n, "loss": loss}) for m, n, loss in given]
    found = strategy.aggregate_evaluate(1, sent)
    assert dict(found or {}) == pytest.approx({"loss": 2.5})
    node = messages[1].metadata.dst_node_id
    reason = f"The metric '{key}' is {shown}: there are no examples, and the metric 'loss' is nan"
    assert f"Evaluation of client {node} dropped: {reason}" in caplog.text
    messages = list(strategy.configure_evaluate(2, ArrayRecord(state()), ConfigRecord(), grid))
    nothing = [evaluation(m, **{key: zero, "loss": math.nan}) for m in messages]
    assert strategy.aggregate_evaluate(2, nothing) is None


def test_the_order_of_a_clients_metrics_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    strategy = FedRot(CONFIG)
    grid = FakeGrid(dict.fromkeys((100, 101, 102), failure))
    messages = list(strategy.configure_evaluate(1, ArrayRecord(state()), ConfigRecord(), grid))
    metrics = {"num-examples": 10, "loss": 1.0, "accuracy": 0.5}
    orders = (metrics, metrics, dict(reversed(metrics.items())))
    sent = [evaluation(m, **given) for m, given in zip(messages, orders, strict=True)]
    assert dict(strategy.aggregate_evaluate(1, sent) or {}) == {"loss": 1.0, "accuracy": 0.5}
    assert "dropped" not in caplog.text


def test_an_anchor_follows_only_what_is_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another aggregator takes does not move it."""
    add, accepted = Averaged.add, []
    monkeypatch.setattr(Averaged, "add", lambda self, one: add(self, one) and one.update.client != 1)
    monkeypatch.setattr(ToAnchor, "follow", lambda self, one: accepted.append(one.update.client))
    strategy = FedRot(CONFIG)
    messages = broadcast(strategy, state(), 3)
    sent = [reply(m, near(state(), 0.01, i), 10, i) for i, m in enumerate(messages)]
    strategy.aggregate_train(1, sent)
    assert accepted == [0, 2]


def test_what_others_send_decides_who_of_two_comes_first() -> None:
    """Otherwise a client could compute its own place, and choose it."""
    first = set()
    for other in range(20):
        given: list[Any] = [SimpleNamespace(checksum=number) for number in (1, 2, 100 + other)]
        order = [update.checksum for update in by_contents(given)]
        first.add(order.index(1) < order.index(2))
    assert first == {True, False}


def test_an_update_that_overflows_once_it_is_aligned_is_in_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []

    def first_overflows(tensors: Any) -> None:
        looked.append(1)
        if len(looked) == 1:
            raise fedrot.UpdateError("it holds Inf")

    def moved(clients: range, overflow: bool) -> Any:
        strategy = FedRot(CONFIG, alignment=replace(EAGER, anchor="global"))
        messages = broadcast(strategy, state(), 3)
        with monkeypatch.context() as patch:
            if overflow:
                patch.setattr("fedrot.strategies.round.aligner.check_finite", first_overflows)
            sent = replies(messages, updates(3), train_loss=0.5)
            _, metrics = strategy.aggregate_train(1, [sent[i] for i in clients])
        assert metrics is not None
        return metrics["fedrot-groups-moved"]

    assert moved(range(3), overflow=True) == moved(range(1, 3), overflow=False) > 0


def test_without_alignment_integers_are_what_the_strategy_makes_of_them() -> None:
    base = {"w": torch.ones(3), "steps": torch.tensor(100)}
    strategy = behind(FedMedian)(CONFIG, alignment=None)
    messages = broadcast(strategy, base, 3)
    sent = [{"w": torch.ones(3), "steps": torch.tensor(n)} for n in (104, 107, 190)]
    found, _ = strategy.aggregate_train(1, replies(messages, sent))
    assert tensors_of(found)["steps"].tolist() == 107
