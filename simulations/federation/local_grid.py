"""``LocalGrid``: client apps in this process, without Flower's engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

#: Returns the answer to a message, or None for no answer.
Node = Callable[[Message], Message | None]


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
