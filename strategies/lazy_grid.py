"""``LazyGrid``: a Flower grid whose replies are an iterator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flwr.app import Message, Metadata
from flwr.serverapp import Grid

from fedrot.strategies.flower_compat import UNREADABLE, unavailable

#: Seconds between two looks for replies: the pause doubles up to the pause of Flower's own grids.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the wrapped grid's method of this name."""

    def call(self: LazyGrid, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.grid, name)(*args, **kwargs)

    return call


class LazyGrid(Grid):
    """Wraps a grid: ``send_and_receive`` sends at once, and fetches each reply when it is asked for.

    Flower's own grids fetch all replies before they return. Here replies come in the order of arrival,
    and one is in memory at a time. Replies that have not arrived at the timeout are left out, as in
    Flower. Of the wrapped ``grid``, ``push_messages`` and ``pull_messages`` are used, and not its own
    ``send_and_receive``. ``sent`` is the metadata of the messages that were sent last.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.sent: list[Metadata] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send the messages, and return an iterator that waits for their replies."""
        asked = list(messages)
        self.sent = [message.metadata for message in asked]
        ids = list(self.push_messages(asked))
        waiting = {one: message for one, message in zip(ids, asked, strict=False) if one is not None}
        end = None if timeout is None else time.monotonic() + timeout
        return self._replies(waiting, end) if waiting else []

    def _replies(self, waiting: dict[str, Message], end: float | None) -> Iterator[Message]:
        pause, arrived = FIRST_PAUSE, set[str]()

        def noted(message: Message) -> Message:
            # The reply may be to another request than to the one that was asked for.
            arrived.add(message.metadata.reply_to_message_id)
            return message

        while waiting:
            # After the timeout there is one last look for replies that arrived before it.
            last = end is not None and time.monotonic() >= end
            arrived.clear()
            for message_id, asked in waiting.items():
                # A loop variable would keep the reply until the next one has come.
                yield from map(noted, self._pulled(message_id, asked))
            waiting = {one: asked for one, asked in waiting.items() if one not in arrived}
            if last or not waiting:
                return
            pause = FIRST_PAUSE if arrived else min(2 * pause, LONGEST_PAUSE)
            self.pause(pause if end is None else min(pause, max(end - time.monotonic(), 0.0)))

    def _pulled(self, message_id: str, asked: Message) -> Iterable[Message]:
        """Return the reply if it has arrived, or an error reply if Flower cannot read it."""
        try:
            return self.pull_messages([message_id])
        except UNREADABLE as error:
            return [unavailable(asked, f"The reply cannot be read, {type(error).__name__}: {error}")]

    def pause(self, seconds: float) -> None:
        """Wait between two looks for replies."""
        time.sleep(seconds)

    get_node_ids = _forwarded("get_node_ids")
    set_run = _forwarded("set_run")
    create_message = _forwarded("create_message")
    push_messages = _forwarded("push_messages")
    pull_messages = _forwarded("pull_messages")

    @property
    def run(self) -> Any:
        """The run."""
        return self.grid.run
