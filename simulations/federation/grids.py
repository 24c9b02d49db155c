"""``LocalGrid``, clients in this process; ``OrderedGrid``, nodes by partition id."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from logging import INFO
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid

from fedrot.strategies.round.asked import CLIENT_KEY, client_id
from fedrot.strategies.wire.lazy_grid import LazyGrid


class LocalGrid(Grid):
    """A grid whose nodes are functions, by node id, of a message; None is no answer.

    A node computes its answer when it is fetched.
    """

    run: Any = None  # All messages are of one run.

    def __init__(
        self, nodes: Mapping[int, Callable[[Message], Message | None]]
    ) -> None:
        self.nodes = dict(nodes)
        self._sent: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message_id = uuid4().hex
            message.metadata.__dict__["_message_id"] = message_id
            self._sent[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, *args: Any, **kwargs: Any) -> list[Message]:
        """Return the answers to messages, by their ids."""
        # Flower's versions have different names for the only argument.
        (ids,) = (*args, *kwargs.values())
        answers = []
        for message_id in ids:
            message = self._sent.get(message_id)
            if message is None:
                continue
            answer = self.nodes[message.metadata.dst_node_id](message)
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
        """Do nothing: there is one run."""


def local_clients(app: ClientApp, count: int) -> LocalGrid:
    """Return a grid of nodes with one app and the partition ids 0 to ``count - 1``."""
    nodes = {}
    for client in range(count):
        nodes[client] = partial(
            app,
            context=Context(
                run_id=1,
                node_id=client,
                node_config={CLIENT_KEY: client},
                state=RecordDict(),
                run_config={},
            ),
        )
    return LocalGrid(nodes)


class OrderedGrid(LazyGrid):
    """A grid of ``count`` nodes by partition id; it counts messages and their bytes.

    Node ids are random. Without this order, two runs with one seed would sample
    different clients.

    Attributes:
        counted: the number of requests, and the bytes of the arrays of requests and of
            replies.

    Raises:
        RuntimeError: the nodes do not have the partition ids 0 to ``count - 1``.
    """

    def __init__(self, grid: Grid, count: int) -> None:
        super().__init__(grid)
        self.counted = Counter[str]()
        while len(nodes := [*grid.get_node_ids()]) < count:
            log(INFO, "Waiting for nodes: %d of %d are connected.", len(nodes), count)
            time.sleep(1.0)
        questions = [
            Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
            for node in nodes
        ]
        answers = filter(Message.has_content, self.send_and_receive(questions))
        replies = sorted(answers, key=client_id)
        clients = [*map(client_id, replies)]
        if clients != [*range(count)] or len(nodes) > count:
            raise RuntimeError(
                f"The {len(nodes)} nodes have the partition ids {clients}, but the "
                f"experiment has {count} clients. Start one node per partition id from "
                "0 on."
            )
        self._nodes = [reply.metadata.src_node_id for reply in replies]

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and count them."""
        requests = list(messages)
        self.counted["requests"] += len(requests)
        self.counted["bytes-sent"] += sum(map(_bytes_of, requests))
        return self.grid.push_messages(requests)

    def pull_messages(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        """Return replies that have arrived, and count their bytes."""
        replies = list(self.grid.pull_messages(*args, **kwargs))
        answers = filter(Message.has_content, replies)
        self.counted["bytes-received"] += sum(map(_bytes_of, answers))
        return replies

    def of(self, clients: Sequence[int]) -> OrderedGrid:
        """Return a grid of the nodes with these partition ids, all if none are given.

        It counts its own messages.
        """
        grid = copy.copy(self)
        grid.counted = Counter()
        if clients:
            grid._nodes = [self._nodes[client] for client in clients]
        return grid


def _bytes_of(message: Message) -> int:
    return sum(
        len(array.data)
        for record in message.content.array_records.values()
        for array in record.values()
    )
