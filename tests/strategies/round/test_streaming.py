"""Replies that are taken one at a time: how many are held, in which order, and in which
precision.
"""

import gc
import itertools
import math
import os
import weakref
from functools import cache

import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    RecordDict,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    QFedAvg,
)

import fedrot
from fedrot.aggregation import Mean, RegMean
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import (
    FedRot,
    Reporting,
    Server,
    from_arrays,
    to_arrays,
)
from tests.models import config_of, near
from tests.models import largest_difference as difference
from tests.strategies.aggregating import answer, grams, honest
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import (
    aggregated,
    broadcast,
    failure,
    grid_of,
    in_front_of,
    largest_difference,
    replies,
    reply,
    tensors_of,
)

CONFIG = config_of(NAME)
GLOBAL = fedrot.AlignmentOptions(anchor="global")
COUNT = 5
ORDERS = ([0, 1, 2, 3, 4], [2, 0, 4, 1, 3])


@cache
def updates(count=COUNT):
    """Return clients that trained a little, each in coordinates of its own."""
    clients = [near(state(), 0.05, seed) for seed in range(count)]
    return [
        fedrot.random_equivalent(client, SYMMETRY, i)
        for i, client in enumerate(clients)
    ]


# --- how many are held
# -------------------------------------------------------------------------------


class Counted:
    """Makes replies when they are asked for, and counts how many of those made are
    still alive.
    """

    def __init__(self, messages, sent):
        self.messages = messages
        self.sent = sent
        self.most = 0
        self._alive = []

    def __iter__(self):
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
HELD = {
    "running": (lambda: FedRot(CONFIG), 1),
    "global": (lambda: FedRot(CONFIG, alignment=GLOBAL), 1),
    "not aligned": (lambda: FedRot(CONFIG, aggregation=Mean, alignment=None), 1),
    "FedAdam": (lambda: in_front_of(FedAdam)(CONFIG), 1),
    "hashes": (lambda: FedRot(CONFIG, reporting=Reporting(os.devnull, hashes=True)), 1),
    "deterministic": (lambda: FedRot(CONFIG, server=Server(deterministic=True)), COUNT),
}


@pytest.mark.parametrize("name", HELD)
def test_one_update_is_held_at_a_time_unless_all_are_needed(name):
    build, most = HELD[name]
    strategy = build()
    counted = Counted(broadcast(strategy, state(), COUNT), updates())
    assert strategy.aggregate_train(1, counted)[0] is not None
    assert counted.most == most


# --- order
# ------------------------------------------------------------


@pytest.mark.parametrize("anchor", sorted(fedrot.alignment.anchors.ANCHORS))
def test_deterministic_rounds_agree_to_the_last_bit_whoever_was_fastest(
    anchor,
):
    options = fedrot.AlignmentOptions(anchor=anchor)
    strategy = FedRot(CONFIG, alignment=options, server=Server(deterministic=True))
    sent = replies(broadcast(strategy, state(), COUNT), updates(), loss=0.5)
    results = [
        strategy.aggregate_train(1, [sent[i] for i in order])[0] for order in ORDERS
    ]
    assert largest_difference(*results) == 0.0


class Taking(Mean):
    """Notes the weights of updates in the order in which it receives them."""

    taken = []  # noqa: RUF012

    def add(self, update, weight, statistics=None):
        self.taken.append(weight)
        super().add(update, weight, statistics)


def order_of(
    values,
    ids,
    places,
    by_ids=False,
):
    """Return the clients in the order in which they are taken, if they arrive in the
    given one.
    """
    strategy = FedRot(
        alignment=None, aggregation=Taking, server=Server(deterministic=True)
    )
    strategy.trusts_ids = by_ids
    messages = broadcast(strategy, {"w": torch.zeros(1)}, len(ids))
    Taking.taken.clear()
    sent = [
        reply(messages[i], {"w": torch.full((1,), float(values[i]))}, i + 1, ids[i])
        for i in places
    ]
    strategy.aggregate_train(1, sent)
    return [int(weight) - 1 for weight in Taking.taken]


def test_sorted_updates_have_one_order_and_no_client_chooses_its_place():
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


def test_what_others_send_decides_who_of_two_comes_first():
    """Otherwise a client could compute its own place, and choose it."""
    orders = [order_of((1, 2, 100 + i), (1, 2, 3), range(3)) for i in range(20)]
    assert {order.index(0) < order.index(1) for order in orders} == {True, False}


def test_trusted_ids_give_the_order_themselves():
    assert order_of((1, 1, 1, 1), (7, 3, 11, 5), range(4), by_ids=True) == [1, 3, 0, 2]


def elsewhere(array, shift):
    """Return the array with a longer header, so that its values start elsewhere in
    memory.
    """
    size = int.from_bytes(array.data[8:10], "little")
    header = array.data[10 : 10 + size - 1]
    values = array.data[10 + size :]
    start = array.data[:8] + (size + shift).to_bytes(2, "little")
    data = start + header + b" " * shift + b"\n" + values
    return Array(array.dtype, array.shape, array.stype, data)


def test_deterministic_rounds_do_not_depend_on_where_messages_lie_in_memory():
    server = Server(deterministic=True)
    results = []
    strategy = FedRot(CONFIG, alignment=GLOBAL, aggregation=RegMean, server=server)
    messages = broadcast(strategy, state(), 3)
    for shift in (0, 8, 40):
        clients = zip(messages, honest(grams), strict=True)
        sent = [answer(m, client, i) for i, (m, client) in enumerate(clients)]
        for message in sent:
            for record in message.content.array_records.values():
                for name, array in record.items():
                    record[name] = elsewhere(array, shift)
        results.append(strategy.aggregate_train(1, sent)[0])
    assert [largest_difference(results[0], other) for other in results] == [0.0] * 3


# --- what may not enter
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["in the tensors", "in the metrics"])
@pytest.mark.parametrize("least", [1, 2, 3])
def test_a_round_with_too_few_good_replies_fails_and_the_model_stays(
    least, fault, tmp_path
):
    """Metrics that the others do not have are seen when all have arrived."""
    server = Server(min_replies=least)
    reporting = Reporting(rows=tmp_path / "report.jsonl")
    aligned = fault == "in the tensors"
    given = {} if aligned else {"alignment": None}
    strategy = FedRot(CONFIG, server=server, reporting=reporting, **given)
    asked = broadcast(strategy, state())
    sent = replies(asked, updates(3))
    sent[0] = reply(asked[0], updates(3)[0], 5, 0, extra=1.0)
    if aligned:
        sent[0] = reply(asked[0], {n: t * torch.nan for n, t in state().items()}, 5, 0)
    arrays, _ = strategy.aggregate_train(1, sent)
    assert (arrays is None) == (least > 2)
    lost = [row["lost"] for row in read_rows(reporting.rows) if "lost" in row]
    assert lost == ["2 good replies, 3 needed."] * (least > 2)


def q_fedavg():
    return in_front_of(QFedAvg)(CONFIG, client_learning_rate=0.5)


def private_q_fedavg():
    private = in_front_of(DifferentialPrivacyServerSideFixedClipping)
    behind = QFedAvg(client_learning_rate=0.5)
    return private(CONFIG, behind, 0.0, 1.0, 4, alignment=GLOBAL)


@pytest.mark.parametrize(
    ("build", "loss"),
    [
        (q_fedavg, math.nan),
        (q_fedavg, math.inf),
        (q_fedavg, -1.0),
        (private_q_fedavg, math.nan),
    ],
)
def test_one_clients_loss_does_not_decide_q_fedavg(loss, build):
    results = []
    for first in (1, 0):
        strategy = build()
        asked = broadcast(strategy, state(), 4)
        sent = replies(asked, updates(4), train_loss=0.5)
        sent[0] = reply(asked[0], updates(4)[0], 10, 0, train_loss=loss)
        arrays, metrics = strategy.aggregate_train(1, sent[first:])
        assert metrics["fedrot-replies-dropped"] == 1 - first
        results.append(arrays)
    assert largest_difference(*results) == 0


def test_an_error_is_counted_once_not_after_a_reply_and_for_the_node_asked(
    tmp_path,
):
    """If a node has left, the SuperLink answers under its own node id."""
    strategy = FedRot(CONFIG, reporting=Reporting(rows=tmp_path / "rows.jsonl"))
    asked = broadcast(strategy, state())
    for i, message in enumerate(asked):  # What a grid does.
        message.metadata.__dict__["_message_id"] = f"message {i}"
    gone = failure(asked[2])
    gone.metadata.__dict__["_src_node_id"] = 1
    sent = [*replies(asked[:2], updates(2)), failure(asked[0]), gone, gone]
    _, metrics = strategy.aggregate_train(1, sent)
    assert metrics["fedrot-replies-accepted"] == 2
    assert metrics["fedrot-replies-failed"] == 1
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if "failed" in row]
    assert [(row["client"], row["failed"]) for row in rows] == [(102, "crashed")]


def test_without_alignment_integers_are_what_the_strategy_makes_of_them():
    base = {"w": torch.ones(3), "steps": torch.tensor(100)}
    strategy = in_front_of(FedMedian)(CONFIG, alignment=None)
    sent = [{**base, "steps": torch.tensor(number)} for number in (104, 107, 190)]
    result, _ = aggregated(strategy, base, sent)
    assert tensors_of(result)["steps"].tolist() == 107


# --- precision and names on the wire
# -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "wire"),
    [(FedAvg, torch.float16), (FedAdam, torch.bfloat16), (FedMedian, torch.bfloat16)],
)
def test_half_precision_travels_and_the_server_keeps_its_own(base, wire):
    received = set()

    def client(message):
        tensors = from_arrays(message.content.array_records["arrays"])
        received.update(tensor.dtype for tensor in tensors.values())
        answered = reply(message, {}, 10, message.metadata.dst_node_id)
        answered.content["arrays"] = to_arrays(
            {n: t + 0.25 for n, t in tensors.items()}, wire
        )
        return answered

    strategy = in_front_of(base)(
        CONFIG, alignment=GLOBAL, server=Server(wire=wire), fraction_evaluate=0.0
    )
    grid = grid_of([client] * 2)
    new = tensors_of(strategy.start(grid, ArrayRecord(state()), 1).arrays)
    assert received == {wire}
    assert {tensor.dtype for tensor in new.values()} == {torch.float32}
    if base is not FedAdam:
        rounded = {n: (t.to(wire) + 0.25).float() for n, t in state().items()}
        assert (
            difference(new, fedrot.align(rounded, state(), SYMMETRY).apply(rounded))
            < 1e-2
        )


def test_a_model_in_bfloat16_and_tied_stays_so_while_tensors_are_equal():
    shared = torch.randn(6, 4)
    base = {"one": shared, "two": shared, "three": shared, "steps": torch.tensor(3)}
    sent = to_arrays(base, torch.bfloat16)
    strategy = FedRot(alignment=None, aggregation=Mean)
    answers = replies(broadcast(strategy, sent, 2), [{}, {}], [10, 10])
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
def test_a_model_in_bfloat16_is_sent_with_its_ties(wire):
    """The base strategy reads Flower's own arrays; clients receive the model's, or
    those of the wire.
    """
    shared = torch.randn(6, 4)
    model = to_arrays({**state(), "one": shared, "two": shared}, torch.bfloat16)
    strategy = FedRot(CONFIG, server=Server(wire=wire))
    grid = grid_of([failure] * 2)
    messages = broadcast(strategy, model, grid)
    messages += strategy.configure_evaluate(1, model, ConfigRecord(), grid)
    assert len(messages) == 4
    for message in messages:
        received = from_arrays(message.content.array_records["arrays"])
        assert {t.dtype for t in received.values()} == {wire or torch.bfloat16}
        assert received["one"] is received["two"]


class OwnMessages(FedRot):
    """Makes its messages itself, from records that a test gives."""

    given = ()

    def configure_train(self, *args, **kwargs):
        return [
            Message(RecordDict(dict(records)), node, "train")
            for node, records in enumerate(self.given, start=100)
        ]


MODEL = ArrayRecord({"w": torch.ones(2)})
CONTROL = ArrayRecord({"w": torch.zeros(3)})
BOTH = {"arrays": MODEL, "control": CONTROL}
ALONE = {"mine": MODEL}


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
    given, key, known
):
    strategy = OwnMessages(
        arrayrecord_key=key, alignment=None, aggregation=Mean, fraction_evaluate=0.0
    )
    strategy.given = given
    grid = grid_of([lambda m: reply(m, {"w": torch.full((2,), 4.0)}, 10)] * 2)
    if not known:
        with pytest.raises(fedrot.FedrotError, match="known"):
            strategy.start(grid, MODEL, 1)
        return
    assert tensors_of(strategy.start(grid, MODEL, 1).arrays)["w"].tolist() == [4.0, 4.0]
