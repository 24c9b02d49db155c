"""``LocalGrid``, client apps in this process, and ``OrderedGrid``, nodes by partition id."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import INFO
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid

from fedrot.strategies.lazy_grid import LazyGrid
from fedrot.strategies.round.inbox import client_id

#: Returns the answer to a message, or None for no answer.
Node = Callable[[Message], Message | None]

#: Seconds between two requests for replies; Flower's default of seconds is too long for short rounds.
PAUSE = 0.02


class LocalGrid(Grid):
    """A grid whose nodes are functions, ``nodes`` by node id.

    A node computes its answer when it is fetched.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        self.nodes = dict(nodes)
        self._sent: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(uuid4().hex)
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._sent[ids[-1]] = message
        return ids

    def pull_messages(  # type: ignore[override]  # As in Flower 1.43, and for older ones.
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> list[Message]:
        ids = message_ids if reply_to_message_ids is None else reply_to_message_ids
        answers = []
        for message_id in list(self._sent if ids is None else ids):
            message = self._sent.get(message_id)
            answer = message and self.nodes[message.metadata.dst_node_id](message)
            if answer is not None:
                del self._sent[message_id]
                answers.append(answer)
        return answers

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return Message(*args, **kwargs)

    def set_run(self, run: Any) -> None:
        """Do nothing: all messages are of one run."""

    @property
    def run(self) -> Any:
        """None: all messages are of one run."""
        return None


def local_clients(app: ClientApp, count: int) -> LocalGrid:
    """Return a grid of ``count`` nodes with one app and the partition ids 0 to ``count - 1``."""

    def node(partition: int) -> Node:
        config: dict[str, Any] = {"partition-id": partition, "num-partitions": count}
        context = Context(1, partition, config, RecordDict(), {})

        def answer(message: Message) -> Message:
            with _own_random_numbers():
                return app(message, context)

        return answer

    return LocalGrid({partition: node(partition) for partition in range(count)})


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Restore the random generators' states afterwards, as if the client had its own process."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class OrderedGrid(LazyGrid):
    """A grid of ``nodes`` nodes, ordered by partition id; it counts messages and their bytes.

    Node ids are random. Without this order, two runs with one seed would sample different clients.

    Attributes:
        counted: the number of requests, and the bytes of the arrays of requests and of replies.

    Raises:
        RuntimeError: the nodes do not have the partition ids 0 to ``nodes - 1``.
    """

    def __init__(self, grid: Grid, nodes: int) -> None:
        super().__init__(grid)
        self.counted = Counter[str]()
        while len(found := list(grid.get_node_ids())) < nodes:
            log(INFO, "Waiting for nodes: %d of %d are connected.", len(found), nodes)
            time.sleep(1.0)
        self._nodes, query = found, MessageType.QUERY
        answers = self.send_and_receive(
            Message(RecordDict(), dst_node_id=node, message_type=query) for node in found
        )
        own = {m.metadata.src_node_id: client_id(m) for m in answers if m.has_content()}
        if sorted(own.values()) != list(range(nodes)):
            raise RuntimeError(
                f"The {len(self._nodes)} nodes have the partition ids {sorted(own.values())}, but the "
                f"experiment has {nodes} clients. Start one node per partition id 0 to {nodes - 1}."
            )
        self._nodes.sort(key=own.__getitem__)

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, PAUSE))

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and count them."""
        asked = list(messages)
        self.counted["requests"] += len(asked)
        self.counted["bytes-sent"] += sum(map(_bytes_of, asked))
        return self.grid.push_messages(asked)

    def pull_messages(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        """Return replies that have arrived, and count their bytes."""
        replies = list(self.grid.pull_messages(*args, **kwargs))
        self.counted["bytes-received"] += sum(_bytes_of(m) for m in replies if m.has_content())
        return replies

    def of(self, clients: Sequence[int]) -> OrderedGrid:
        """Return the grid of the nodes with these partition ids, all if there are none, uncounted."""
        grid = copy.copy(self)
        grid.counted = Counter()
        grid._nodes = [self._nodes[client] for client in clients] or self._nodes
        return grid


def _bytes_of(message: Message) -> int:
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())
