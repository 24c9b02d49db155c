"""``play``: one round, from the replies to the filled merge."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from flwr.app import Message

from fedrot.strategies.round.aligner import Aligner
from fedrot.strategies.round.inbox import Inbox
from fedrot.strategies.round.merge import Merge
from fedrot.strategies.round.update import Moved, Update
from fedrot.strategies.round.waiting import Waiting


def play(
    replies: Iterable[Message],
    inbox: Inbox,
    aligner: Aligner,
    merge: Merge,
    *,
    waiting: Waiting | None = None,
    on_update: Callable[[Moved], None] = lambda moved: None,
) -> None:
    """Process the replies of a round one at a time, in the order of arrival.

    The inbox checks a reply, the aligner moves its update into the round's coordinates, and the merge
    adds the update. Inbox and aligner may drop it.

    Args:
        waiting: holds all updates until every reply has arrived; None holds one at a time.
        on_update: called with every update in the round's coordinates, before it is merged.
    """
    record = inbox.record

    def take(update: Update) -> None:
        moved = None
        with record.dropping(update.client):
            moved = aligner.move(update)
        if moved is not None:
            on_update(moved)
            if merge.add(moved):
                aligner.follow(moved)

    updates = filter(None, map(inbox.read, record.waited(replies)))
    if waiting is None:
        _call(take, updates)
        inbox.close()
    else:
        _call(waiting.add, updates)
        inbox.close()
        waiting.close()
        _call(take, aligner.prepare(waiting))
    aligner.close()


def _call(do: Callable[[Update], None], updates: Iterable[Update]) -> None:
    """Call a function with every update; a loop variable would hold one until the next arrives."""
    deque(map(do, updates), maxlen=0)
