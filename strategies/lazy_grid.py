"""``LazyGrid``: a Flower grid that fetches ``Replies`` when they are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, overload

from flwr.app import Message, Metadata
from flwr.serverapp import Grid

from fedrot.errors import FedrotError
from fedrot.strategies.flower_compat import UNREADABLE, unavailable

#: Seconds between two looks for replies: the pause doubles up to the pause of Flower's own grids.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the wrapped grid's method of this name."""

    def call(self: LazyGrid, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.grid, name)(*args, **kwargs)

    return call


class Replies(Sequence[Message]):
    """The replies to some messages, in the order of arrival.

    As a sequence they can be read any number of times: the first access waits for all of them, and they
    are kept from then on. ``stream`` reads them once, and keeps none.

    Attributes:
        asked: the messages, by message id; empty once ``stream`` has been called.
    """

    def __init__(
        self, asked: dict[str, Message], fetch: Callable[[dict[str, Message]], Iterator[Message]]
    ) -> None:
        self.asked = asked
        self._fetch = fetch
        self._kept: list[Message] | None = None
        self._streamed = False

    def stream(self) -> Iterator[Message]:
        """Return each reply as it arrives; unless they are kept already, none can be read afterwards."""
        if self._kept is not None:
            return iter(self._kept)
        self._check_not_streamed()
        self._streamed = True
        asked, self.asked = self.asked, {}
        return self._fetch(asked)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...

    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        return self._all()[index]

    def _all(self) -> list[Message]:
        if self._kept is None:
            self._check_not_streamed()
            self._kept = list(self._fetch(self.asked))
        return self._kept

    def _check_not_streamed(self) -> None:
        if self._streamed:
            raise FedrotError(
                "The replies were averaged as they arrived, and are not kept. Read them in a method "
                "aggregate_train of your strategy, before or after it calls super().aggregate_train: "
                "with such a method they are kept until the next messages are sent."
            )


def streamed(replies: Iterable[Message]) -> Iterable[Message]:
    """Return replies to be read once: those of a ``LazyGrid`` are not kept."""
    return replies.stream() if isinstance(replies, Replies) else replies


class LazyGrid(Grid):
    """Wraps a grid: ``send_and_receive`` sends at once, and fetches replies when they are read.

    Flower's own grids fetch all replies before they return. Here replies come in the order of arrival,
    and one is in memory at a time if they are streamed, see ``Replies``. Replies that have not arrived
    at the timeout are left out, as in Flower. Of the wrapped ``grid``, ``push_messages`` and
    ``pull_messages`` are used, and not its own ``send_and_receive``.

    Attributes:
        sent: the metadata of the messages that were sent last.
        replies: the replies to them.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.sent: list[Metadata] = []
        self.replies = Replies({}, lambda asked: iter(()))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Replies:
        """Send the messages, and return their replies, which are fetched when they are read."""
        asked = list(messages)
        self.sent = [message.metadata for message in asked]
        ids = list(self.push_messages(asked))
        waiting = {one: message for one, message in zip(ids, asked, strict=False) if one is not None}
        end = None if timeout is None else time.monotonic() + timeout
        self.replies = Replies(waiting, partial(self._replies, end=end))
        return self.replies

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
