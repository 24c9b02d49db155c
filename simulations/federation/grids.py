"""``LocalGrid``, client apps in this process, and ``OrderedGrid``, nodes by partition
id.
"""

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
            ids.append(uuid4().hex)
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._sent[ids[-1]] = message
        return ids

    def pull_messages(self, *args: Any, **kwargs: Any) -> list[Message]:
        """Return the answers to messages, by their ids: Flower renames the only
        argument.
        """
        (ids,) = (*args, *kwargs.values())
        answers = []
        for message_id in ids:
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
        """Do nothing: there is one run."""


def local_clients(app: ClientApp, count: int) -> LocalGrid:
    """Return a grid of ``count`` nodes with one app and the partition ids 0 to ``count
    - 1``.
    """
    contexts = (
        Context(1, own, {CLIENT_KEY: own}, RecordDict(), {}) for own in range(count)
    )
    return LocalGrid({one.node_id: partial(app, context=one) for one in contexts})


class OrderedGrid(LazyGrid):
    """A grid of ``count`` nodes, ordered by partition id; it counts messages and their
    bytes.

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
        while len(found := list(grid.get_node_ids())) < count:
            log(INFO, "Waiting for nodes: %d of %d are connected.", len(found), count)
            time.sleep(1.0)
        kind = MessageType.QUERY
        asked = [
            Message(RecordDict(), dst_node_id=node, message_type=kind) for node in found
        ]
        answers = [
            reply for reply in self.send_and_receive(asked) if reply.has_content()
        ]
        own = {client_id(reply): reply.metadata.src_node_id for reply in answers}
        if [*range(count)] != sorted(own) or len(found) > count:
            raise RuntimeError(
                f"The {len(found)} nodes have the partition ids "
                f"{sorted(map(client_id, answers))}, but the experiment has {count} "
                "clients. Start one node per partition id from 0 on."
            )
        self._nodes = [own[client] for client in range(count)]

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
        self.counted["bytes-received"] += sum(
            _bytes_of(m) for m in replies if m.has_content()
        )
        return replies

    def of(self, clients: Sequence[int]) -> OrderedGrid:
        """Return the grid of the nodes with these partition ids, all if there are none,
        uncounted.
        """
        grid = copy.copy(self)
        grid.counted = Counter()
        grid._nodes = [self._nodes[client] for client in clients] or self._nodes
        return grid


def _bytes_of(message: Message) -> int:
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())
