"""``Waiting``, the updates of a round in a common order, and ``Store``, their memory or files."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fedrot._io import write_tensors
from fedrot.errors import FedrotError
from fedrot.strategies.round.update import Question, Update
from fedrot.strategies.wire.records import without_arrays

#: The separator of kind and name of a stored tensor, and the kind of the update's own tensors.
_SLASH, _UPDATE = "/", "update"

#: Returns tensors that were stored.
Stored = Callable[[], dict[str, Tensor]]


class Store:
    """Keeps tensors until the ``with`` block ends.

    Args:
        folder: the parent of a temporary folder of safetensors files; None keeps tensors in memory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else None
        self._open = ExitStack()
        self._own: Path | None = None
        self._count = 0

    def __enter__(self) -> Store:
        """Make the folder.

        Raises:
            FedrotError: the folder cannot be made or written to.
        """
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                temporary = tempfile.TemporaryDirectory(prefix="fedrot-", dir=self.folder)
            except OSError as error:
                raise FedrotError(f"The folder '{self.folder}' cannot be written to: {error}") from error
            self._own = Path(self._open.enter_context(temporary))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def put(self, tensors: Mapping[str, Tensor]) -> Stored:
        """Store tensors; return a function that returns the tensors, or memory maps of their file.

        Raises:
            FedrotError: the file cannot be written.
        """
        if self._own is None:
            kept = dict(tensors)
            return lambda: kept
        # safetensors refuses views and tensors that share memory; Flower shares equal arrays.
        keys = {id(tensor): str(index) for index, tensor in enumerate(tensors.values())}
        unique, taken = dict[str, Tensor](), set[int]()
        for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
            value = tensor.cpu().contiguous()
            memory = value.untyped_storage().data_ptr()
            unique[keys[id(tensor)]] = value.clone() if memory in taken else value
            taken.add(memory)
        path = self._own / f"{self._count}.safetensors"
        self._count += 1
        try:
            write_tensors(path, unique)
        except OSError as error:
            raise FedrotError(f"Updates cannot be written to '{self._own.parent}': {error}") from error
        names = {name: keys[id(tensor)] for name, tensor in tensors.items()}
        return lambda: _mapped(path, names)


def _mapped(path: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in dict.fromkeys(names.values())}
    return {name: tensors[key] for name, key in names.items()}


class Waiting(Sequence[Update]):
    """All updates of a round, in the order of arrival until ``close`` sorts them.

    With a store on disk, an update is read as memory maps at each access.

    Args:
        store: keeps the updates.
        order: returns the number that an update is sorted by; None keeps the order of arrival.
        mixes: sort by a hash of the number and the numbers of all updates. A client can then not choose
            its place, because it does not know the updates of the others.
    """

    def __init__(
        self, store: Store, order: Callable[[Update], int] | None = None, mixes: bool = True
    ) -> None:
        self._store, self._order, self._mixes = store, order, mixes
        self._updates: list[_Held] = []

    def add(self, update: Update) -> None:
        """Store an update."""
        number = self._order(update) if self._order is not None else 0
        self._updates.append(_Held(number, update.question, _kept(update, self._store)))

    def close(self) -> None:
        """Sort the updates; call this after all have arrived."""
        if self._order is None:
            return
        if not self._mixes:
            self._updates.sort(key=attrgetter("number"))
            return
        every = sorted(held.number for held in self._updates)
        self._updates.sort(key=lambda held: sha256(repr((every, held.number)).encode()).digest())

    def __len__(self) -> int:
        return len(self._updates)

    def __getitem__(self, index: int) -> Update:  # type: ignore[override]
        return self._updates[index].read()

    @property
    def questions(self) -> list[Question]:
        """The message that each update answers."""
        return [held.question for held in self._updates]

    def at(self, places: Iterable[int]) -> Waiting:
        """Return the updates at some places, in this order."""
        found = Waiting(self._store)
        found._updates = [self._updates[place] for place in places]
        return found


class _Held(NamedTuple):
    """A waiting update: the number that it is sorted by, its question, and a function to read it."""

    number: int
    question: Question
    read: Callable[[], Update]


def _kept(update: Update, store: Store) -> Callable[[], Update]:
    if store.folder is None:
        return lambda: update
    tensors = {f"{_UPDATE}{_SLASH}{name}": tensor for name, tensor in update.tensors.items()}
    for kind, by_name in update.statistics.items():
        tensors |= {f"{kind}{_SLASH}{name}": value for name, value in by_name.items()}
    message = copy.copy(update.message)
    message.content = without_arrays(message.content)
    about = replace(update, tensors={}, statistics={}, message=message)
    return partial(_read, about, store.put(tensors))


def _read(update: Update, stored: Stored) -> Update:
    found: dict[str, dict[str, Tensor]] = {_UPDATE: {}}
    for key, tensor in stored().items():
        kind, _, name = key.partition(_SLASH)
        found.setdefault(kind, {})[name] = tensor
    tensors = found.pop(_UPDATE)
    return replace(update, tensors=tensors, statistics=found)
