"""Nodes in the order of their partition ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedrot.simulations.federation.ordered_grid import OrderedGrid
from tests.strategies.fakes import Client, FakeGrid

#: Ids of nodes by their partition id: in no order.
NODES = (50, 10, 40, 20, 30)


def client(partition: int) -> Client:
    def answer(message: Message) -> Message:
        content = RecordDict({"client": ConfigRecord({"partition-id": partition})})
        return Message(content, reply_to=message)

    return answer


def grid(own: Callable[[int], int] = lambda n: n) -> OrderedGrid:
    clients = {node: client(own(partition)) for partition, node in enumerate(NODES)}
    return OrderedGrid(FakeGrid(dict(sorted(clients.items()))), len(NODES))


def test_nodes_are_in_the_order_of_their_partitions() -> None:
    ordered = grid()
    assert list(ordered.get_node_ids()) == list(NODES)
    assert list(ordered.of([0, 2]).get_node_ids()) == [50, 40]
    assert list(ordered.of([3, 1]).get_node_ids()) == [20, 10]
    assert list(ordered.get_node_ids()) == list(NODES)


def test_a_partition_that_nobody_holds_is_refused() -> None:
    said = r"5 nodes have the partition ids \[0, 0, 1, 2, 3\], but the configuration has 5 clients"
    with pytest.raises(RuntimeError, match=said):
        grid(own=lambda partition: max(0, partition - 1))
