"""Orders of a round's updates that do not depend on their arrival."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from operator import attrgetter

from fedrot.strategies.round.update import Update

#: Returns all updates of a round in the order in which they are merged.
Order = Callable[[list[Update]], list[Update]]


def by_client(updates: list[Update]) -> list[Update]:
    """Sort by the ids that clients send, so that a client chooses its place."""
    return sorted(updates, key=attrgetter("client"))


def by_contents(updates: list[Update]) -> list[Update]:
    """Sort by a hash of each update's checksum and the checksums of all updates.

    A client cannot choose its place, because it does not know the updates of the others.
    """
    numbers = [update.checksum for update in updates]
    every = sorted(numbers)
    keys = [sha256(repr((every, number)).encode()).digest() for number in numbers]
    return [updates[place] for place in sorted(range(len(updates)), key=keys.__getitem__)]
