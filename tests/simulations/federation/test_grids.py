"""Nodes in this process, nodes in the order of their partition ids, and what messages
cost.
"""

import time

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedrot.simulations.federation.grids import LocalGrid, OrderedGrid
from tests.strategies.fakes import FakeGrid, failure, grid_of

#: Ids of nodes by their partition id: in no order.
NODES = (50, 10, 40, 20, 30)


def client(partition, answers=0):
    """Return a node that answers with so many numbers."""

    def answer(message):
        content = RecordDict({"client": ConfigRecord({"partition-id": partition})})
        if answers:
            content["arrays"] = ArrayRecord({"a": torch.zeros(answers)})
        return Message(content, reply_to=message)

    return answer


def to(node, content=None):
    return Message(content or RecordDict(), dst_node_id=node, message_type="query")


def test_nodes_are_in_the_order_of_their_partitions():
    clients = {node: client(partition) for partition, node in enumerate(NODES)}
    ordered = OrderedGrid(FakeGrid(dict(sorted(clients.items()))), len(NODES))
    for chosen, nodes in (
        ([0, 2], [50, 40]),
        ([3, 1], [20, 10]),
        ([], [*NODES]),
    ):
        assert list(ordered.of(chosen).get_node_ids()) == nodes
        assert list(ordered.get_node_ids()) == [*NODES]


def test_a_partition_that_no_node_has_is_refused():
    repeated = [client(number) for number in (0, 0, 1, 2, 3)]
    for nodes, clients, said in (
        (
            repeated,
            5,
            r"5 nodes have the partition ids \[0, 0, 1, 2, 3\], but .* has 5",
        ),
        ([client(0), failure], 2, r"The 2 nodes have the partition ids \[0\], "),
        ([client(0), client(1)], 1, r"The 2 nodes .* 1 clients"),
    ):
        with pytest.raises(RuntimeError, match=said):
            OrderedGrid(grid_of(nodes), clients)


def test_nodes_are_awaited(monkeypatch):
    slow = FakeGrid({node: client(partition) for partition, node in enumerate(NODES)})
    there = [*slow.nodes.items()]
    slow.nodes.clear()
    monkeypatch.setattr(time, "sleep", lambda _: slow.nodes.update([there.pop()]))
    assert list(OrderedGrid(slow, len(NODES)).get_node_ids()) == list(NODES)
    assert there == []


def test_messages_are_counted_with_the_bytes_of_their_arrays():
    ordered = OrderedGrid(FakeGrid({7: client(0, 5), 8: client(1, 9)}), 2).of([])
    ordered.grid.nodes[9] = failure  # type: ignore[attr-defined]
    assert not ordered.counted  # questions about partitions are not counted
    sent = ArrayRecord({"b": torch.zeros(3, 4)})
    record = ConfigRecord({"long": "x" * 999})
    asked = [
        to(node, RecordDict({"arrays": sent, "config": record})) for node in (7, 8, 9)
    ]
    assert len([*ordered.send_and_receive(asked[:1])]) == 1
    assert len([*ordered.send_and_receive(asked[1:])]) == 2
    sizes = [len(ArrayRecord({"x": torch.ones(n)})["x"].data) for n in (5, 9)]
    expected = {
        "requests": 3,
        "bytes-sent": 3 * len(sent["b"].data),
        "bytes-received": sum(sizes),
    }
    assert ordered.counted == expected
    assert not ordered.of([0]).counted


def test_a_local_node_answers_when_it_is_asked_and_once():
    asked = []

    def node(number):
        def answer(message):
            asked.append(number)
            return None if number == 2 else client(number)(message)

        return answer

    local = LocalGrid({number: node(number) for number in (1, 2, 3)})
    ids = [*local.push_messages(to(n) for n in (3, 2, 1))]
    assert (len({*ids}), asked) == (3, [])
    (first,) = local.pull_messages([ids[2], "unknown"])
    assert (first.metadata.src_node_id, asked) == (1, [1])
    assert [
        m.metadata.reply_to_message_id for m in local.pull_messages(message_ids=ids)
    ] == ids[:1]
    # A node without an answer is asked again.
    assert local.pull_messages(ids) == []
    assert asked == [1, 3, 2, 2]
