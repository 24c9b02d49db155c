"""The registry of aggregations, read by strategies, arms and the documentation."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from fedrot.collect.statistics import Statistics, kind_named
from fedrot.errors import FedrotError
from fedrot.tensors import TensorDict, Tensors


class Aggregator(ABC):
    """Averages updates in common coordinates; base class of a user's own.

    Attributes:
        needs: kinds of statistics that every update must have.
        streams: whether an update may be added while its parts are computed, by
            ``fold_parts``; ``current`` is then the mean so far.
        notes: remarks about the last result, by tensor.
        sentence, measured: a sentence and metrics about the last result.
    """

    needs: tuple[str, ...] = ()
    streams: bool = False
    notes: Mapping[str, str] = {}
    sentence: str = ""
    measured: Mapping[str, float] = {}

    @property
    def current(self) -> Tensors:
        """The mean so far of an aggregator that streams; empty otherwise."""
        return {}

    @abstractmethod
    def add(
        self,
        update: Tensors,
        weight: float,
        statistics: Statistics | None = None,
    ) -> None:
        """Add one update; after an ``UpdateError`` nothing has been added."""

    def fold_parts(
        self,
        parts: Iterable[Tensors],
        weight: float,
        statistics: Statistics | None = None,
    ) -> None:
        """Add one update that comes in parts; all are held unless it streams."""
        whole: TensorDict = {}
        for part in parts:
            whole |= part
        self.add(whole, weight, statistics)

    @abstractmethod
    def result(self) -> TensorDict:
        """Return the merged tensors so far."""

    def release(self) -> TensorDict:
        """Return the result for the last time; what is held may be freed."""
        return self.result()


Built = TypeVar("Built", bound=Aggregator)


@dataclass(frozen=True)
class AggregationEntry:
    """One registered aggregation, the class ``build``.

    Attributes:
        name: in ``FedRot(aggregation=NAME)`` and in arms.
        needs: kinds of statistics that every update must have.
        meaning: one line for the documentation.
    """

    name: str
    build: Callable[..., Aggregator]
    needs: tuple[str, ...]
    meaning: str

    @property
    def path(self) -> str:
        """The name to import the class by, such as ``fedrot.aggregation.RegMean``."""
        module = self.build.__module__
        name = self.build.__name__
        package = module.rpartition(".")[0]
        exported = getattr(sys.modules.get(package), name, None) is self.build
        return f"{package if exported else module}.{name}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Arguments of the constructor that have no default, such as a symmetry."""
        parameters = inspect.signature(self.build).parameters
        return tuple(name for name, p in parameters.items() if p.default is p.empty)

    @property
    def follows_rotations(self) -> bool:
        """Whether the statistics that are needed can be moved by rotations of heads."""
        return all(kind_named(kind).follows_rotations for kind in self.needs)


_ENTRIES: dict[str, AggregationEntry] = {}


def _entries() -> Mapping[str, AggregationEntry]:
    import_module("fedrot.aggregation")  # registers fedrot's aggregations
    return _ENTRIES


def register_aggregation(
    name: str,
    meaning: str,
) -> Callable[[type[Built]], type[Built]]:
    """Return a class decorator that registers an aggregation, an ``Aggregator``.

    Raises:
        FedrotError: the decorated class is no subclass of ``Aggregator``.
    """

    def register(build: type[Built]) -> type[Built]:
        cls: object = build
        if not (isinstance(cls, type) and issubclass(cls, Aggregator)):
            raise FedrotError(
                f"{cls!r} cannot be registered as the aggregation '{name}'; subclass "
                "fedrot.aggregation.Aggregator."
            )
        _ENTRIES[name] = AggregationEntry(name, build, build.needs, meaning)
        return build

    return register


def aggregations(inputs: Collection[str] | None = None) -> tuple[AggregationEntry, ...]:
    """Return the aggregations that need no other inputs than these; all if None."""
    entries = tuple(_entries().values())
    if inputs is None:
        return entries
    return tuple(entry for entry in entries if set(entry.inputs) <= set(inputs))


def aggregation_named(
    name: str,
    **arguments: Callable[[], object],
) -> Callable[[], Aggregator]:
    """Return a function that builds a new aggregator.

    >>> aggregation_named("regmean", alpha=lambda: 0.5)().alpha
    0.5

    Args:
        name: of a registered aggregation.
        **arguments: functions that return the constructor's arguments, by name; other
            names are ignored.

    Raises:
        FedrotError: the name is unknown, or an argument without a default is not given.
    """
    entries = _entries()
    if name not in entries:
        raise FedrotError(
            f"Unknown aggregation '{name}'; choose from {', '.join(entries)}."
        )
    entry = entries[name]
    missing = [argument for argument in entry.inputs if argument not in arguments]
    if missing:
        raise FedrotError(
            f"Aggregation '{name}' needs the argument '{missing[0]}': write "
            f"aggregation=lambda: {entry.path}({', '.join(entry.inputs)})."
        )
    used = arguments.keys() & inspect.signature(entry.build).parameters.keys()
    return lambda: entry.build(**{name: arguments[name]() for name in used})
