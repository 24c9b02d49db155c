"""``play``: one round, from the replies to the filled merge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from operator import attrgetter

from flwr.app import Message

from fedrot.strategies.round.aligner import Aligner
from fedrot.strategies.round.inbox import Inbox
from fedrot.strategies.round.merge import Merge
from fedrot.strategies.round.update import Update

#: Returns all updates of a round in the order in which they are merged.
Order = Callable[[list[Update]], list[Update]]


def by_client(updates: list[Update]) -> list[Update]:
    """Sort by the ids that clients send, so that a client chooses its place."""
    return sorted(updates, key=attrgetter("client"))


def by_contents(updates: list[Update]) -> list[Update]:
    """Sort by a hash of each update's checksum and the checksums of all updates.

    A client cannot choose its place, because it does not know the updates of the
    others.
    """
    numbers = [update.checksum for update in updates]
    every = sorted(numbers)
    keys = [sha256(repr((every, number)).encode()).digest() for number in numbers]
    places = sorted(range(len(updates)), key=keys.__getitem__)
    return [updates[place] for place in places]


def play(
    replies: Iterable[Message],
    inbox: Inbox,
    aligner: Aligner,
    merge: Merge,
    *,
    order: Order | None = None,
) -> None:
    """Process the replies of a round one at a time, in the order of arrival.

    The inbox checks a reply, the aligner moves its update into the round's coordinates,
    and the merge adds the update. Each of them may drop it.

    Args:
        order: sorts all updates after every reply has arrived; None holds one update at
            a time.
    """
    record = inbox.record

    def take(update: Update) -> None:
        moved = None
        with record.dropping(update.client):
            moved = aligner.move(update)
        if moved is None:
            return
        added = merge.add(moved)
        if added is not None:
            aligner.follow(update, added)

    updates = filter(None, map(inbox.read, replies))
    if order is None:
        for update in updates:
            take(update)
            # The variable would hold this update until the next one has arrived.
            del update
        inbox.close()
    else:
        held = order(list(updates))
        inbox.close()
        for update in aligner.prepare(held):
            take(update)
    aligner.close()
