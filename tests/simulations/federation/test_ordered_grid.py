"""``OrderedGrid``: nodes in the order of their partition ids."""

from __future__ import annotations

import threading

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedrot.simulations.federation.local_grid import LocalGrid, Node
from fedrot.simulations.federation.ordered_grid import Interrupted, OrderedGrid
from tests.strategies import fakes as _made_outside_of_the_engine  # noqa: F401

#: Partition ids by node id, in no order.
PARTITIONS = {71: 2, 12: 3, 50: 0, 33: 1}


def node(partition: int) -> Node:
    def answer(message: Message) -> Message:
        own = ConfigRecord({"partition-id": partition})
        return Message(RecordDict({"client": own}), reply_to=message)

    return answer


def grid(partitions: dict[int, int]) -> LocalGrid:
    return LocalGrid({name: node(partition) for name, partition in partitions.items()})


def test_nodes_are_in_the_order_of_their_partitions() -> None:
    ordered = OrderedGrid(grid(PARTITIONS), threading.Event(), 4)
    assert list(ordered.get_node_ids()) == [50, 33, 71, 12]
    assert list(ordered.of((3, 0)).get_node_ids()) == [12, 50]
    assert list(ordered.get_node_ids()) == [50, 33, 71, 12]


def test_partitions_that_are_missing_or_held_twice_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"hold the partitions \[0, 1, 2, 2\].*has 4 clients"):
        OrderedGrid(grid({**PARTITIONS, 12: 2}), threading.Event(), 4)


def test_waiting_for_nodes_can_be_stopped() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        OrderedGrid(grid({50: 0}), stop, 2)
