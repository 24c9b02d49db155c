"""``LazyGrid``: a Flower grid that fetches replies when they are read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from flwr.app import Message, Metadata
from flwr.serverapp import Grid

from fedrot.errors import FedrotError
from fedrot.strategies.wire.flower_compat import UNREADABLE, Messages, unavailable

#: Seconds between two polls for replies: the pause doubles up to the pause of Flower's
#: own grids.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 3.0


#: Messages by their ids.
ById = dict[str, Message]


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the wrapped grid's method of this name."""

    def call(self: LazyGrid, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.grid, name)(*args, **kwargs)

    return call


class Replies(Sequence[Message]):
    """The replies to some messages, in the order of arrival.

    As a sequence, replies can be read any number of times: the first access waits for
    all replies and stores them. ``stream`` reads them once, and stores none.

    Attributes:
        asked: the messages, by message id; empty after ``stream`` was called.
    """

    def __init__(
        self,
        asked: ById,
        fetch: Callable[[ById], Iterator[Message]],
    ) -> None:
        self.asked = asked
        self._fetch = fetch
        self._kept: list[Message] | None = None
        self._streamed = False

    def stream(self) -> Iterator[Message]:
        """Return each reply as it arrives; unless stored, none can be read again."""
        if self._kept is not None:
            return iter(self._kept)
        self._check_not_streamed()
        self._streamed = True
        asked = self.asked
        self.asked = {}
        return self._fetch(asked)

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def _all(self) -> list[Message]:
        if self._kept is None:
            self._check_not_streamed()
            self._kept = list(self._fetch(self.asked))
        return self._kept

    def _check_not_streamed(self) -> None:
        if self._streamed:
            raise FedrotError(
                "The replies were averaged as they arrived and were not stored. Read "
                "them in a method aggregate_train of your strategy, before or after it "
                "calls super().aggregate_train: with such a method, replies are stored "
                "until the next messages are sent."
            )


def streamed(replies: Messages) -> Messages:
    """Return replies to be read once: replies of a ``LazyGrid`` are not stored."""
    return replies.stream() if isinstance(replies, Replies) else replies


class LazyGrid(Grid):
    """Wraps a grid: messages are sent at once, replies fetched when they are read.

    Flower's own grids fetch all replies before they return. Here replies come in the
    order of arrival, and only one is in memory at a time if they are streamed, see
    ``Replies``. Replies that have not arrived at the timeout are left out, as in
    Flower. ``push_messages`` and ``pull_messages`` of the wrapped ``grid`` are called,
    but not its ``send_and_receive``.

    Attributes:
        sent: the metadata of the most recently sent messages.
        replies: the replies to these messages.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.sent: list[Metadata] = []
        self.replies = Replies({}, lambda asked: iter(()))

    def send_and_receive(
        self, messages: Messages, *, timeout: float | None = None
    ) -> Replies:
        """Send messages, and return their replies, which are fetched when read."""
        asked = list(messages)
        self.sent = [message.metadata for message in asked]
        ids = self.push_messages(asked)
        waiting = {
            message_id: message
            for message_id, message in zip(ids, asked, strict=False)
            if message_id is not None
        }
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        self.replies = Replies(waiting, partial(self._replies, end=end))
        return self.replies

    def _replies(self, waiting: ById, end: float) -> Iterator[Message]:
        pause = FIRST_PAUSE
        arrived = set[str]()
        while waiting:
            # After the timeout, one last poll finds replies that arrived before it.
            last = time.monotonic() >= end
            arrived.clear()
            for message_id, asked in waiting.items():
                # A loop variable would hold the reply until the next one arrives.
                yield from self._pulled(message_id, asked, arrived)
            waiting = {
                message_id: asked
                for message_id, asked in waiting.items()
                if message_id not in arrived
            }
            if last or not waiting:
                return
            pause = FIRST_PAUSE if arrived else min(2 * pause, LONGEST_PAUSE)
            self.pause(min(pause, max(end - time.monotonic(), 0.0)))

    def _pulled(
        self, message_id: str, asked: Message, arrived: set[str]
    ) -> Iterator[Message]:
        """Return the reply if it has arrived, or an error reply if it is unreadable."""
        try:
            replies = [*self.pull_messages([message_id])]
        except UNREADABLE as error:
            reason = f"The reply cannot be read, {type(error).__name__}: {error}"
            replies = [unavailable(asked, reason)]
        # A grid may return the reply to another request.
        arrived.update(reply.metadata.reply_to_message_id for reply in replies)
        return iter(replies)

    def pause(self, seconds: float) -> None:
        """Wait between two polls for replies."""
        time.sleep(seconds)

    get_node_ids = _forwarded("get_node_ids")
    set_run = _forwarded("set_run")
    create_message = _forwarded("create_message")
    push_messages = _forwarded("push_messages")
    pull_messages = _forwarded("pull_messages")

    run = property(lambda self: self.grid.run)
