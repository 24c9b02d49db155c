"""Replies that are taken one at a time: how many are held, in which order, and in which
precision.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    QFedAvg,
    Strategy,
)

import fedrot
from fedrot.aggregation import Mean, RegMean
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import (
    Aligned,
    FedRot,
    OtherBasis,
    Reporting,
    Server,
    from_arrays,
    to_arrays,
)
from fedrot.strategies.wire.lazy_grid import LONGEST_PAUSE, LazyGrid
from tests.models import State, config_of, near
from tests.models import largest_difference as difference
from tests.strategies.aggregating import answer, grams, honest
from tests.strategies.classifier import NAME, SYMMETRY, WHOLE, state
from tests.strategies.fakes import (
    FakeGrid,
    broadcast,
    failure,
    largest_difference,
    reply,
    tensors_of,
)

CONFIG = config_of(NAME)
GLOBAL = fedrot.AlignmentOptions(anchor="global")
COUNT = 5
ORDERS = ([0, 1, 2, 3, 4], [2, 0, 4, 1, 3])


@cache
def updates(count: int = COUNT) -> list[State]:
    """Return clients that trained a little, each in coordinates of its own."""
    clients = [near(state(), 0.05, seed) for seed in range(count)]
    return [
        fedrot.random_equivalent(client, SYMMETRY, i)
        for i, client in enumerate(clients)
    ]


def replies(
    messages: Iterable[Message], sent: Iterable[State], **metrics: Any
) -> list[Message]:
    return [
        reply(m, u, 10 + i, i, **metrics)
        for i, (m, u) in enumerate(zip(messages, sent, strict=True))
    ]


def behind(strategy: type[Strategy]) -> Any:
    return type(f"Aligned{strategy.__name__}", (Aligned, strategy), {})


# --- how many are held
# -------------------------------------------------------------------------------


class Counted:
    """Makes replies when they are asked for, and counts how many of those made are
    still alive.
    """

    def __init__(self, messages: list[Message], sent: list[State]) -> None:
        self.messages, self.sent = messages, sent
        self.most = 0
        self._alive: list[weakref.ref[ArrayRecord]] = []

    def __iter__(self) -> Iterator[Message]:
        for index, (message, update) in enumerate(
            zip(self.messages, self.sent, strict=True)
        ):
            made = reply(message, update, 10, index, train_loss=0.5)
            self._alive.append(weakref.ref(made.content.array_records["arrays"]))
            gc.collect()
            self.most = max(self.most, sum(ref() is not None for ref in self._alive))
            yield made
            del made


#: Strategies, and how many replies of a round they hold.
HELD: dict[str, tuple[Callable[[], Any], int]] = {
    "running": (lambda: FedRot(CONFIG), 1),
    "global": (lambda: FedRot(CONFIG, alignment=GLOBAL), 1),
    "not aligned": (lambda: FedRot(CONFIG, aggregation=Mean, alignment=None), 1),
    "FedAdam": (lambda: behind(FedAdam)(CONFIG), 1),
    "hashes": (lambda: FedRot(CONFIG, reporting=Reporting(os.devnull, hashes=True)), 1),
    "deterministic": (lambda: FedRot(CONFIG, server=Server(deterministic=True)), COUNT),
}


@pytest.mark.parametrize("name", HELD)
def test_one_update_is_held_at_a_time_unless_all_are_needed(name: str) -> None:
    build, most = HELD[name]
    strategy = build()
    counted = Counted(broadcast(strategy, state(), COUNT), updates())
    assert strategy.aggregate_train(1, counted)[0] is not None
    assert counted.most == most


# --- order
# ------------------------------------------------------------


@pytest.mark.parametrize("anchor", sorted(fedrot.alignment.anchors.ANCHORS))
def test_deterministic_rounds_agree_to_the_last_bit_whoever_was_fastest(
    anchor: str,
) -> None:
    options, server = fedrot.AlignmentOptions(anchor=anchor), Server(deterministic=True)
    strategy = FedRot(CONFIG, alignment=options, server=server)
    messages = broadcast(strategy, state(), COUNT)
    sent = replies(messages, updates(), loss=0.5)
    results = [
        strategy.aggregate_train(1, [sent[i] for i in order])[0] for order in ORDERS
    ]
    assert largest_difference(*results) == 0.0


class Taking(Mean):
    """Notes the weights of updates in the order in which it receives them."""

    taken: list[float] = []  # noqa: RUF012

    def add(self, update: Any, weight: float, statistics: Any = None) -> None:
        self.taken.append(weight)
        super().add(update, weight, statistics)


def order_of(
    values: Sequence[int],
    ids: Sequence[int],
    places: Sequence[int],
    by_ids: bool = False,
) -> list[int]:
    """Return the clients in the order in which they are taken, if they arrive in the
    given one.
    """
    strategy = FedRot(
        alignment=None, aggregation=Taking, server=Server(deterministic=True)
    )
    strategy.trusts_ids = by_ids
    messages = broadcast(strategy, {"w": torch.zeros(1)}, len(ids))
    messages.sort(key=lambda message: message.metadata.dst_node_id)
    Taking.taken.clear()
    sent = [
        reply(messages[i], {"w": torch.full((1,), float(values[i]))}, i + 1, ids[i])
        for i in places
    ]
    strategy.aggregate_train(1, sent)
    return [int(weight) - 1 for weight in Taking.taken]


def test_sorted_updates_have_one_order_and_no_client_chooses_its_place() -> None:
    """An id of a client's choice, the smallest, puts it first as often as anything
    else.
    """
    for values, ids in (((1, 2, 3, 4), (5, 5, 2, 5)), ((1, 1, 1, 1), (0, 1, 2, 3))):
        orders = [
            order_of(values, ids, places) for places in itertools.permutations(range(4))
        ]
        assert orders == [orders[0]] * 24
    lowest = (-(2**63), 1, 2, 3)
    first = [
        order_of((4 * i, 1 + 4 * i, 2, 3), lowest, range(4))[0] for i in range(1, 41)
    ]
    assert 2 <= first.count(0) <= 20


def test_what_others_send_decides_who_of_two_comes_first() -> None:
    """Otherwise a client could compute its own place, and choose it."""
    orders = [order_of((1, 2, 100 + i), (1, 2, 3), range(3)) for i in range(20)]
    assert {order.index(0) < order.index(1) for order in orders} == {True, False}


def test_trusted_ids_give_the_order_themselves() -> None:
    assert order_of((1, 1, 1, 1), (7, 3, 11, 5), range(4), by_ids=True) == [1, 3, 0, 2]


def elsewhere(array: Array, shift: int) -> Array:
    """Return the array with a longer header, so that its values start elsewhere in
    memory.
    """
    size = int.from_bytes(array.data[8:10], "little")
    header, values = array.data[10 : 10 + size - 1], array.data[10 + size :]
    start = array.data[:8] + (size + shift).to_bytes(2, "little")
    data = start + header + b" " * shift + b"\n" + values
    return Array(array.dtype, array.shape, array.stype, data)


def test_deterministic_rounds_do_not_depend_on_where_messages_lie_in_memory() -> None:
    server, results = Server(deterministic=True), []
    strategy = FedRot(CONFIG, alignment=GLOBAL, aggregation=RegMean, server=server)
    messages = broadcast(strategy, state(), 3)
    for shift in (0, 8, 40):
        sent = [
            answer(m, c, i)
            for i, (m, c) in enumerate(zip(messages, honest(grams), strict=True))
        ]
        for message in sent:
            for record in message.content.array_records.values():
                for name, array in record.items():
                    record[name] = elsewhere(array, shift)
        results.append(strategy.aggregate_train(1, sent)[0])
    assert [largest_difference(results[0], other) for other in results] == [0.0] * 3


# --- a grid that fetches one reply at a time
# ---------------------------------------------------------


class Slow(FakeGrid):
    """Answers a message after it was asked for a number of times, never where that is
    infinite.
    """

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
    messages = [
        Message(RecordDict(), dst_node_id=n, message_type="train") for n in clients()
    ]
    waiting = grid.send_and_receive(messages, timeout=60).stream()
    assert slow.asked == [[100, 101, 102]]
    assert slow.pulled == []
    assert [m.metadata.src_node_id for m in waiting] == [101, 102, 100]
    assert set(slow.pulled) == {1}


#: After how many looks each client has answered, the timeout, and the pauses between
#: the looks.
PAUSES: dict[str, tuple[list[float], float | None, list[float]]] = {
    "longer and longer, while there is time": ([5], 2.0, [0.2, 0.4, 0.8, 1.6]),
    "as long as Flower's": ([9], None, [0.2, 0.4, 0.8, 1.6, *[LONGEST_PAUSE] * 4]),
    "short after a reply": ([4, 7], None, [0.2, 0.4, 0.8, 0.1, 0.2, 0.4]),
}


@pytest.mark.parametrize("name", PAUSES)
def test_pauses_grow_while_nothing_arrives(name: str) -> None:
    looks, timeout, pauses = PAUSES[name]
    nodes = range(100, 100 + len(looks))
    grid = Quick(Slow(clients(len(looks)), dict(zip(nodes, looks, strict=True))))
    messages = [
        Message(RecordDict(), dst_node_id=n, message_type="train") for n in nodes
    ]
    assert len(list(grid.send_and_receive(messages, timeout=timeout))) == len(looks)
    assert grid.pauses == pytest.approx(pauses)
    assert LONGEST_PAUSE == 3.0


def test_no_pause_is_longer_than_the_time_that_is_left() -> None:
    grid = Quick(Slow(clients(1), {100: 9}))
    message = Message(RecordDict(), dst_node_id=100, message_type="train")
    assert len(list(grid.send_and_receive([message], timeout=2.0))) == 1
    assert max(grid.pauses) <= 2.0


def test_who_does_not_answer_in_time_is_left_out() -> None:
    grid = LazyGrid(Slow(clients(), {100: 1, 101: math.inf, 102: 1}))
    strategy = FedRot(CONFIG, fraction_evaluate=0.0)
    start = time.monotonic()
    result = strategy.start(grid, ArrayRecord(state()), 1, timeout=0.5)
    assert 0.5 <= time.monotonic() - start < 20
    assert result.train_metrics_clientapp[1]["fedrot-replies-accepted"] == 2


@pytest.mark.parametrize(
    ("looks", "timeout", "uses"), [((1, 1, 1), 0.2, 3), ((1, 2, 2), 0.1, 1)]
)
def test_what_arrives_in_time_while_another_reply_is_used_is_taken(
    looks: tuple[int, ...], timeout: float, uses: int
) -> None:
    """Though using that one takes until time is up: there is a last look."""
    grid = LazyGrid(Slow(clients(), dict(zip(clients(), looks, strict=True))))
    messages = [
        Message(RecordDict(), dst_node_id=n, message_type="train") for n in clients()
    ]
    found = []
    for message in grid.send_and_receive(messages, timeout=timeout).stream():
        if len(found) < uses:
            time.sleep(0.15)
        found.append(message)
    assert len(found) == 3


def test_nobody_asked_nothing_fetched() -> None:
    assert list(LazyGrid(FakeGrid({})).send_and_receive([])) == []


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
    assert (metrics["fedrot-replies-accepted"], metrics["fedrot-replies-failed"]) == (
        2,
        1,
    )


# --- what may not enter
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [1, 2, 3])
def test_a_round_with_too_few_good_replies_fails_and_the_model_stays(
    least: int, tmp_path: Path
) -> None:
    report = tmp_path / "report.jsonl"
    server, reporting = Server(min_replies=least), Reporting(rows=report)
    strategy = FedRot(CONFIG, server=server, reporting=reporting)
    messages = broadcast(strategy, state(), 3)
    sent = replies(messages, updates(3))
    sent[0] = reply(messages[0], {n: t * torch.nan for n, t in state().items()}, 5, 0)
    arrays, metrics = strategy.aggregate_train(1, sent)
    assert metrics is not None
    assert (arrays is None) == (least > 2)
    assert [row["lost"] for row in read_rows(report) if "lost" in row] == [
        "2 good replies, 3 needed."
    ] * (least > 2)


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: Server(min_replies=0), "min_replies is 0"),
        (lambda: Server(wire=torch.int8), r"wire is torch\.int8"),
        (lambda: OtherBasis(options=WHOLE, learning_passes=-1), "must not be negative"),
        (lambda: FedRot(CONFIG, server=Server(device="nowhere")), "device 'nowhere'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    build: Callable[[], Any], problem: str
) -> None:
    with pytest.raises(fedrot.FedrotError, match=problem):
        build()


def private_q_fedavg() -> Any:
    private: Any = behind(DifferentialPrivacyServerSideFixedClipping)
    return private(
        CONFIG, QFedAvg(client_learning_rate=0.5), 0.0, 1.0, 4, alignment=GLOBAL
    )


def q_fedavg() -> Any:
    return behind(QFedAvg)(CONFIG, client_learning_rate=0.5)


@pytest.mark.parametrize(
    ("build", "loss"),
    [
        (q_fedavg, math.nan),
        (q_fedavg, math.inf),
        (q_fedavg, -1.0),
        (private_q_fedavg, math.nan),
    ],
)
def test_one_clients_loss_does_not_decide_q_fedavg(
    loss: float, build: Callable[[], Any]
) -> None:
    results = []
    for first in (1, 0):
        strategy = build()
        messages = broadcast(strategy, state(), 4)
        sent = replies(messages, updates(4), train_loss=0.5)
        sent[0] = reply(messages[0], updates(4)[0], 10, 0, train_loss=loss)
        arrays, metrics = strategy.aggregate_train(1, sent[first:])
        assert (metrics or {})["fedrot-replies-dropped"] == 1 - first
        results.append(arrays)
    assert largest_difference(*results) == 0


def test_an_array_that_does_not_say_its_shape_is_checked_once_it_is_decoded() -> None:
    """Arrays of Flower's legacy workflows have an empty shape, as a number has."""
    strategy = FedRot(alignment=None)
    messages = broadcast(strategy, {"w": torch.tensor(1.0)}, 2)
    sent = [reply(m, {"w": torch.tensor(3.0)}, 1) for m in messages]
    two = Array("", (), "numpy.ndarray", to_arrays({"w": torch.ones(2)})["w"].data)
    sent[0].content["arrays"] = ArrayRecord({"w": two})
    arrays, metrics = strategy.aggregate_train(1, sent)
    assert tensors_of(arrays)["w"].tolist() == 3.0
    assert dict(metrics or {})["fedrot-replies-dropped"] == 1


def test_an_error_is_counted_once_not_after_a_reply_and_for_the_node_asked(
    tmp_path: Path,
) -> None:
    """If a node has left, the SuperLink answers under its own node id."""
    strategy = FedRot(CONFIG, reporting=Reporting(rows=tmp_path / "rows.jsonl"))
    messages = broadcast(strategy, state(), 3)
    for i, message in enumerate(messages):  # What a grid does.
        message.metadata.__dict__["_message_id"] = f"message {i}"
    gone = failure(messages[2])
    gone.metadata.__dict__["_src_node_id"] = 1
    sent = [*replies(messages[:2], updates(2)), failure(messages[0]), gone, gone]
    _, metrics = strategy.aggregate_train(1, sent)
    assert metrics is not None
    assert (metrics["fedrot-replies-accepted"], metrics["fedrot-replies-failed"]) == (
        2,
        1,
    )
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if "failed" in row]
    node = messages[2].metadata.dst_node_id
    assert [(row["client"], row["failed"]) for row in rows] == [(node, "crashed")]


def test_without_alignment_integers_are_what_the_strategy_makes_of_them() -> None:
    base = {"w": torch.ones(3), "steps": torch.tensor(100)}
    strategy = behind(FedMedian)(CONFIG, alignment=None)
    messages = broadcast(strategy, base, 3)
    sent = [{"w": torch.ones(3), "steps": torch.tensor(n)} for n in (104, 107, 190)]
    found, _ = strategy.aggregate_train(1, replies(messages, sent))
    assert tensors_of(found)["steps"].tolist() == 107


# --- precision and names on the wire
# -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "wire"),
    [(FedAvg, torch.float16), (FedAdam, torch.bfloat16), (FedMedian, torch.bfloat16)],
)
def test_half_precision_travels_and_the_server_keeps_its_own(
    base: Any, wire: torch.dtype
) -> None:
    received: set[torch.dtype] = set()

    def client(message: Message) -> Message:
        tensors = from_arrays(message.content.array_records["arrays"])
        received.update(tensor.dtype for tensor in tensors.values())
        answered = reply(message, {}, 10, message.metadata.dst_node_id)
        answered.content["arrays"] = to_arrays(
            {n: t + 0.25 for n, t in tensors.items()}, wire
        )
        return answered

    settings: dict[str, Any] = {"server": Server(wire=wire), "fraction_evaluate": 0.0}
    strategy = behind(base)(CONFIG, alignment=GLOBAL, **settings)
    grid = FakeGrid(dict.fromkeys((100, 101), client))
    new = tensors_of(strategy.start(grid, ArrayRecord(state()), 1).arrays)
    assert received == {wire}
    assert {tensor.dtype for tensor in new.values()} == {torch.float32}
    if base is not FedAdam:
        rounded = {n: (t.to(wire) + 0.25).float() for n, t in state().items()}
        assert (
            difference(new, fedrot.align(rounded, state(), SYMMETRY).apply(rounded))
            < 1e-2
        )


def test_a_model_in_bfloat16_and_tied_stays_so_while_tensors_are_equal() -> None:
    shared = torch.randn(6, 4)
    base = {"one": shared, "two": shared, "three": shared, "steps": torch.tensor(3)}
    sent = to_arrays(base, torch.bfloat16)
    strategy = FedRot(alignment=None, aggregation=Mean)
    grid = FakeGrid(dict.fromkeys((100, 101), failure))
    messages = list(strategy.configure_train(1, sent, ConfigRecord(), grid))
    answers = [reply(m, {}, 10, i) for i, m in enumerate(messages)]
    for i, message in enumerate(answers):
        moved = {name: from_arrays(sent)["one"] + i for name in ("one", "two")}
        message.content["arrays"] = to_arrays({**from_arrays(sent), **moved})
    arrays, _ = strategy.aggregate_train(1, answers)
    assert arrays is not None
    stypes = [array.stype == sent[name].stype for name, array in arrays.items()]
    assert stypes == [True, True, False, True]
    assert [array.dtype for array in arrays.values()] == [
        array.dtype for array in sent.values()
    ]
    new = from_arrays(arrays)
    assert new["one"] is new["two"]
    assert (new["one"].float() - (shared + 0.5)).abs().max() < 0.03
    assert torch.equal(new["three"], shared.bfloat16())
    assert int(new["steps"]) == 3


@pytest.mark.parametrize("wire", [None, torch.float16])
def test_a_model_in_bfloat16_is_sent_with_its_ties(wire: torch.dtype | None) -> None:
    """The base strategy reads Flower's own arrays; clients receive the model's, or
    those of the wire.
    """
    shared = torch.randn(6, 4)
    model = to_arrays({**state(), "one": shared, "two": shared}, torch.bfloat16)
    strategy = FedRot(CONFIG, server=Server(wire=wire))
    grid = FakeGrid(dict.fromkeys((100, 101), failure))
    messages = list(strategy.configure_train(1, model, ConfigRecord(), grid))
    messages += strategy.configure_evaluate(1, model, ConfigRecord(), grid)
    assert len(messages) == 4
    for message in messages:
        received = from_arrays(message.content.array_records["arrays"])
        assert {t.dtype for t in received.values()} == {wire or torch.bfloat16}
        assert received["one"] is received["two"]


class OwnMessages(FedRot):
    """Makes its messages itself, from records that a test gives."""

    given: tuple[dict[str, ArrayRecord], ...] = ()

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        return [
            Message(RecordDict(dict(records)), node, "train")
            for node, records in enumerate(self.given, start=100)
        ]


MODEL, CONTROL = ArrayRecord({"w": torch.ones(2)}), ArrayRecord({"w": torch.zeros(3)})
BOTH, ALONE = {"arrays": MODEL, "control": CONTROL}, {"mine": MODEL}


@pytest.mark.parametrize(
    ("given", "key", "known"),
    [
        ((BOTH, BOTH), "arrays", True),
        ((BOTH, BOTH), "weights", False),
        ((BOTH, ALONE), "arrays", True),
        ((ALONE, ALONE), "weights", True),
        ((ALONE, {"mine": CONTROL}), "arrays", False),
        (
            ({"arrays": MODEL}, {"arrays": ArrayRecord({"w": torch.ones(2)})}),
            "arrays",
            True,
        ),
    ],
)
def test_of_several_records_the_model_is_the_one_that_the_strategy_names(
    given: Any, key: str, known: bool
) -> None:
    settings: dict[str, Any] = {
        "alignment": None,
        "aggregation": Mean,
        "fraction_evaluate": 0.0,
    }
    strategy = OwnMessages(arrayrecord_key=key, **settings)
    strategy.given = given
    grid = FakeGrid(
        dict.fromkeys((100, 101), lambda m: reply(m, {"w": torch.full((2,), 4.0)}, 10))
    )
    if not known:
        with pytest.raises(fedrot.FedrotError, match="is not known"):
            strategy.start(grid, MODEL, 1)
        return
    assert tensors_of(strategy.start(grid, MODEL, 1).arrays)["w"].tolist() == [4.0, 4.0]


# --- evaluation
# ------------------------------------------------------------


def evaluation(**metrics: Any) -> Callable[[Message], Message]:
    return lambda to: Message(
        RecordDict({"metrics": MetricRecord(metrics)}), reply_to=to
    )


def without_content(to: Message) -> Message:
    message = evaluation(rows=1, loss=9.0)(to)
    message.__dict__["_content"] = None
    return message


def evaluated(
    strategy: Any, answers: Sequence[Callable[[Message], Message]], twice: bool = False
) -> Any:
    grid = FakeGrid(dict.fromkeys(range(100, 100 + len(answers)), failure))
    messages = list(
        strategy.configure_evaluate(1, ArrayRecord(state()), ConfigRecord(), grid)
    )
    sent = [one(message) for one, message in zip(answers, messages, strict=True)]
    if twice:
        sent += [evaluation(rows=100, loss=9.0)(messages[0]), failure(messages[0])]
    found = strategy.aggregate_evaluate(1, iter(sent))
    return None if found is None else dict(found)


FORGED = "crashed\n\x1b[31msecond " * 50_000
#: Evaluations that are left out, and a word of the line of the log.
LEFT_OUT: dict[str, tuple[Callable[[Message], Message], str]] = {
    "nothing": (lambda m: Message(RecordDict(), reply_to=m), "0 MetricRecords"),
    "no content": (without_content, "Unusable"),
    "negative": (evaluation(rows=-1, loss=9.0), "'rows' is -1"),
    "infinite": (evaluation(rows=math.inf, loss=9.0), "'rows' is inf"),
    "no weight": (evaluation(loss=9.0), "no 'rows'"),
    "a list": (evaluation(rows=1, loss=[9.0, 9.0], accuracy=1.0), "loss (list of 2)"),
    "another metric": (evaluation(rows=1, loss=9.0, f1=1.0), "f1"),
    "NaN of no rows": (
        evaluation(rows=0, loss=math.nan, accuracy=1.0),
        "'rows' is 0: there",
    ),
    "Inf of no rows": (
        evaluation(rows=0.0, loss=1.0, accuracy=math.inf),
        "'rows' is 0.0: there",
    ),
    "failed": (lambda m: Message(Error(1, FORGED), reply_to=m), "crashed"),
}


def test_evaluations_that_cannot_be_averaged_are_left_out_and_named_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others are weighted by the metric that the strategy names, in whatever order
    theirs are.
    """
    good = [
        evaluation(rows=1, loss=0.0, accuracy=1.0),
        evaluation(accuracy=0.0, loss=1.0, rows=3),
        evaluation(rows=0, loss=7.0, accuracy=7.0),
    ]
    strategy = FedRot(CONFIG, weighted_by_key="rows")
    with caplog.at_level("INFO", logger="flwr"):
        found = evaluated(
            strategy, [*good, *(bad for bad, _ in LEFT_OUT.values())], twice=True
        )
    assert found == pytest.approx({"loss": 0.75, "accuracy": 0.25})
    lines = [record.getMessage().strip() for record in caplog.records]
    assert all(line.isprintable() and len(line) < 1000 for line in lines)
    named = [
        line for line in lines if "Evaluation of client" in line or "crashed" in line
    ]
    assert len(named) == len(LEFT_OUT) + 1
    assert [
        word
        for _, word in [*LEFT_OUT.values(), (None, "already answered")]
        if word not in " ".join(named)
    ] == []


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_evaluations_without_examples_average_to_nothing(loss: float) -> None:
    strategy = FedRot(CONFIG)
    assert (
        evaluated(strategy, [evaluation(**{"num-examples": 0, "loss": loss})] * 2)
        is None
    )
    assert strategy.aggregate_evaluate(1, []) is None
