"""Updates that wait until every reply has arrived, sorted by client."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import overload

from torch import Tensor

from fedrot.strategies.round.spill import Store, Stored
from fedrot.strategies.round.update import Update
from fedrot.strategies.wire.records import without_arrays

#: Between kind and name of what is stored, and the kind of the update itself.
_SLASH, _UPDATE = "/", "update"


class Waiting(Sequence[Update]):
    """The updates of a round, sorted by the clients' own ids.

    With a store on disk, each update is read anew, as memory maps, whenever it is asked for.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._updates: list[tuple[tuple[int, int], Callable[[], Update]]] = []

    def add(self, update: Update | None) -> None:
        """Keep an update; None is left out."""
        if update is not None:
            self._updates.append((update.order, _held(update, self._store)))
            self._updates.sort(key=lambda item: item[0])

    def __len__(self) -> int:
        return len(self._updates)

    @overload
    def __getitem__(self, index: int) -> Update: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Update]: ...

    def __getitem__(self, index: int | slice) -> Update | Sequence[Update]:
        if isinstance(index, slice):
            return [read() for _, read in self._updates[index]]
        return self._updates[index][1]()

    def remove(self, places: Collection[int]) -> None:
        """Forget the updates at some places."""
        self._updates = [held for i, held in enumerate(self._updates) if i not in places]


def _held(update: Update, store: Store) -> Callable[[], Update]:
    if store.folder is None:
        return lambda: update
    tensors = {f"{_UPDATE}{_SLASH}{name}": tensor for name, tensor in update.tensors.items()}
    for kind, by_name in update.statistics.items():
        tensors |= {f"{kind}{_SLASH}{name}": value for name, value in by_name.items()}
    message = copy.copy(update.message)
    message.content = without_arrays(message.content)
    kept = replace(update, message=message, tensors={}, statistics={}, received={})
    return partial(_read, kept, store.put(tensors))


def _read(update: Update, stored: Stored) -> Update:
    found: dict[str, dict[str, Tensor]] = {_UPDATE: {}}
    for key, tensor in stored().items():
        kind, _, name = key.partition(_SLASH)
        found.setdefault(kind, {})[name] = tensor
    tensors = found.pop(_UPDATE)
    return replace(update, tensors=tensors, statistics=found, received=tensors)


def beyond(distances: Sequence[float], bound: float) -> dict[int, str]:
    """Return the places of distances above ``bound`` times their median, each with the reason.

    The result is empty with fewer than three distances, and where the median is 0.
    """
    median = statistics.median(distances) if len(distances) > 2 else 0.0
    reason = "Its distance from the broadcast model is {:.3g} times the median, above the bound of {:g}."
    return {
        index: reason.format(distance / median, bound)
        for index, distance in enumerate(distances)
        if median > 0 and distance > bound * median
    }
