"""Replies that wait until all have come, in an order that does not depend on who was fastest."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import overload

from torch import Tensor

from fedrot.strategies.round.inbox import Reply
from fedrot.strategies.round.spill import Store, Stored
from fedrot.strategies.wire.records import without_arrays

#: Between kind and name of what is stored, and the kind of the update itself.
_SLASH, _UPDATE = "/", "update"


class Waiting(Sequence[Reply]):
    """The replies of a round, in the order of the clients' own ids.

    Those in files are read anew, as memory maps, whenever they are asked for.
    """

    def __init__(self, replies: Iterable[Reply], store: Store) -> None:
        held: list[tuple[tuple[int, int], Callable[[], Reply]]] = []
        for reply in replies:
            held.append((reply.order, _held(reply, store)))
            del reply  # or it would stay until the next one has come
        self._replies = [reply for _, reply in sorted(held, key=lambda item: item[0])]

    def __len__(self) -> int:
        return len(self._replies)

    @overload
    def __getitem__(self, index: int) -> Reply: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Reply]: ...

    def __getitem__(self, index: int | slice) -> Reply | Sequence[Reply]:
        if isinstance(index, slice):
            return [reply() for reply in self._replies[index]]
        return self._replies[index]()

    def remove(self, indices: Iterable[int]) -> None:
        """Forget the replies at some places."""
        gone = set(indices)
        self._replies = [reply for i, reply in enumerate(self._replies) if i not in gone]


def _held(reply: Reply, store: Store) -> Callable[[], Reply]:
    if store.folder is None:
        return lambda: reply
    tensors = {f"{_UPDATE}{_SLASH}{name}": tensor for name, tensor in reply.tensors.items()}
    for kind, by_name in reply.statistics.items():
        tensors |= {f"{kind}{_SLASH}{name}": value for name, value in by_name.items()}
    message = copy.copy(reply.message)
    message.content = without_arrays(message.content)
    return partial(_read, replace(reply, message=message, tensors={}, statistics={}), store.put(tensors))


def _read(reply: Reply, stored: Stored) -> Reply:
    found: dict[str, dict[str, Tensor]] = {_UPDATE: {}}
    for key, tensor in stored().items():
        kind, _, name = key.partition(_SLASH)
        found.setdefault(kind, {})[name] = tensor
    return replace(reply, tensors=found.pop(_UPDATE), statistics=found)


def beyond(distances: Sequence[float], bound: float) -> dict[int, str]:
    """Return the places of distances above ``bound`` times their median, each with the reason.

    A median says who is odd only among three or more, and nothing where most did not move.
    """
    median = statistics.median(distances) if len(distances) > 2 else 0.0
    reason = "Its distance from the broadcast model is {:.3g} times the median, above the bound of {:g}."
    return {
        index: reason.format(distance / median, bound)
        for index, distance in enumerate(distances)
        if median > 0 and distance > bound * median
    }
