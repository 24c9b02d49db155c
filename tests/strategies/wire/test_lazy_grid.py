"""A grid that sends for replies at once, and fetches one at a time."""

import json
import math
import time

import pytest
from flwr.app import ArrayRecord, Message, RecordDict

from fedrot.strategies import FedRot
from fedrot.strategies.wire.lazy_grid import LONGEST_PAUSE, LazyGrid
from tests.models import near
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import FakeGrid, failure, reply


class Slow(FakeGrid):
    """Nodes 100, 101, ... answer after they were asked for so many times, never where
    that is infinite.
    """

    def __init__(self, *looks):
        self.looks = dict(enumerate(looks, start=100))
        super().__init__(dict.fromkeys(self.looks, self.answer))
        self.pulled = []

    def answer(self, message):
        node = message.metadata.dst_node_id
        return reply(message, near(state(), 0.05, node), 10, node)

    def pull_messages(self, message_ids):
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
    """Notes its pauses instead of making them."""

    pauses = ()

    def pause(self, seconds):
        self.pauses += (seconds,)


def asked(grid):
    return [Message(RecordDict(), node, "train") for node in grid.nodes]


def test_replies_are_sent_for_at_once_and_fetched_one_by_one_as_they_arrive():
    slow = Slow(3, 1, 2)
    waiting = Quick(slow).send_and_receive(asked(slow), timeout=60).stream()
    assert slow.asked == [[100, 101, 102]]
    assert slow.pulled == []
    assert [m.metadata.src_node_id for m in waiting] == [101, 102, 100]
    assert {*slow.pulled} == {1}


#: After how many looks each client has answered, the timeout, and the pauses between
#: the looks.
PAUSES = {
    "longer and longer, while there is time": ([5], 2.0, [0.2, 0.4, 0.8, 1.6]),
    "no longer than the time that is left": ([7], 2.0, [0.2, 0.4, 0.8, 1.6, 2, 2]),
    "as long as Flower's": ([9], None, [0.2, 0.4, 0.8, 1.6, *[LONGEST_PAUSE] * 4]),
    "short after a reply": ([4, 7], None, [0.2, 0.4, 0.8, 0.1, 0.2, 0.4]),
}


@pytest.mark.parametrize("name", PAUSES)
def test_pauses_grow_while_nothing_arrives(name):
    looks, timeout, pauses = PAUSES[name]
    slow = Slow(*looks)
    grid = Quick(slow)
    assert len(grid.send_and_receive(asked(slow), timeout=timeout)) == len(looks)
    assert grid.pauses == pytest.approx(pauses, abs=0.1 if timeout else 1e-9)
    assert max(grid.pauses) <= (timeout or LONGEST_PAUSE) == (timeout or 3.0)


def test_who_does_not_answer_in_time_is_left_out():
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0)
    start = time.monotonic()
    grid = LazyGrid(Slow(1, math.inf, 1))
    result = strategy.start(grid, ArrayRecord(state()), 1, timeout=0.5)
    assert 0.5 <= time.monotonic() - start < 20
    assert result.train_metrics_clientapp[1]["fedrot-replies-accepted"] == 2


@pytest.mark.parametrize(
    ("looks", "timeout", "uses"), [((1, 1, 1), 0.2, 3), ((1, 2, 2), 0.1, 1)]
)
def test_what_arrives_in_time_while_another_reply_is_used_is_taken(
    looks, timeout, uses
):
    """Though using that one takes until time is up: there is a last look."""
    slow = Slow(*looks)
    taken = 0
    for _ in LazyGrid(slow).send_and_receive(asked(slow), timeout=timeout).stream():
        if taken < uses:
            time.sleep(0.15)
        taken += 1
    assert taken == 3


def test_nobody_asked_nothing_fetched():
    assert list(LazyGrid(FakeGrid({})).send_and_receive([])) == []


def test_a_reply_that_flower_cannot_read_does_not_end_the_run():
    class Garbage(Slow):
        def pull_messages(self, message_ids):
            (message_id,) = message_ids
            if self._sent[message_id].metadata.dst_node_id == 101:
                raise json.JSONDecodeError("no object", "", 0)
            return super().pull_messages([message_id])

    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0)
    result = strategy.start(Garbage(1, 1, 1), ArrayRecord(state()), 1, timeout=5)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["fedrot-replies-accepted"] == 2
    assert metrics["fedrot-replies-failed"] == 1


def test_replies_are_a_sequence_that_is_fetched_once():
    grid = FakeGrid({7: failure, 8: failure})
    replies = LazyGrid(grid).send_and_receive(asked(grid))
    assert [r.metadata.src_node_id for r in replies] == [7, 8]
    assert len(replies) == 2
    assert replies[1] is list(replies)[1]
    assert replies[:1] == [replies[0]]
    assert replies[0] in replies
    assert list(replies.stream()) == list(replies)
