"""A grid that hands replies out one at a time, as they are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

#: Seconds between two looks for replies: soon at first, then as rarely as Flower itself looks.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0

#: What Flower raises where a client's objects are not what they say; errors of transport are others.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, DecodeError)


class LazyGrid(Grid):
    """Another grid whose ``send_and_receive`` sends at once and fetches each reply when asked for it.

    Flower's own grids fetch all replies before the first one is looked at. Replies come in the order of
    arrival; those that are not there when time is up are left out, as Flower does. Of the other grid,
    ``push_messages`` and ``pull_messages`` are used, its own ``send_and_receive`` is not.

    Attributes:
        sent: metadata of the messages that were sent last.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.sent: list[Metadata] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send the messages, and return their replies as an iterator that waits for them."""
        asked = list(messages)
        self.sent = [message.metadata for message in asked]
        ids = list(self.push_messages(asked))
        waiting = {one: message for one, message in zip(ids, asked, strict=False) if one is not None}
        end = None if timeout is None else time.monotonic() + timeout
        return self._replies(waiting, end) if waiting else []

    def _replies(self, waiting: dict[str, Message], end: float | None) -> Iterator[Message]:
        pause = FIRST_PAUSE
        while waiting:
            # What has arrived by the end is taken, however long those before it took to be used.
            last = end is not None and time.monotonic() >= end
            arrived = set()
            for message_id, asked in waiting.items():
                for message in self._pulled(message_id, asked):
                    # An answer to another question leaves this one open.
                    arrived.add(message.metadata.reply_to_message_id)
                    yield message
                    del message
            waiting = {one: asked for one, asked in waiting.items() if one not in arrived}
            if last or not waiting:
                return
            pause = FIRST_PAUSE if arrived else min(2 * pause, LONGEST_PAUSE)
            self.pause(pause if end is None else min(pause, max(end - time.monotonic(), 0.0)))

    def _pulled(self, message_id: str, asked: Message) -> Iterable[Message]:
        """Return a reply if it is there; an error in its place if it is none that Flower can read."""
        try:
            return self.pull_messages([message_id])
        except _UNREADABLE as error:
            reason = f"The reply cannot be read, {type(error).__name__}: {error}"
            return [Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, reason), reply_to=asked)]

    def pause(self, seconds: float) -> None:
        """Wait between two looks for replies."""
        time.sleep(seconds)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self.grid.get_node_ids()

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run."""
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Create a message, as Flower did before it had a constructor."""
        return self.grid.create_message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages that have arrived."""
        return self.grid.pull_messages(message_ids)
