"""The registry of aggregations, read by strategies, arms and the documentation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, TypeVar

from torch import Tensor

from fedrot.collect.statistics import Statistics, kind_named
from fedrot.errors import FedrotError
from fedrot.tensors import Tensors


class Aggregator(Protocol):
    """Averages updates in common coordinates. Subclass it for the defaults.

    Attributes:
        needs: the kinds of statistics that every update must have.
        streams: True if ``fold_parts`` adds an update layer by layer, as in ``Mean``.
        sentence: about the last result, for the log; empty without one.
        measured: metrics of the last result.
        notes: remarks about the last result, by tensor.
    """

    needs: tuple[str, ...] = ()
    streams: bool = False
    sentence: str = ""
    measured: Mapping[str, float] = {}
    notes: Mapping[str, str] = {}

    def add(
        self, update: Tensors, weight: float, statistics: Statistics | None = None
    ) -> None:
        """Add one update; raises ``UpdateError``, after which nothing has been
        added.
        """

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors so far."""

    def release(self) -> dict[str, Tensor]:
        """Return the last result, on the CPU; nothing is added afterwards."""
        return {name: tensor.cpu() for name, tensor in self.result().items()}


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
        module, name = self.build.__module__, self.build.__name__
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
        """Whether rotations of heads can be applied to the statistics that this
        aggregation needs.
        """
        return all(kind_named(kind).follows_rotations for kind in self.needs)


_ENTRIES: dict[str, AggregationEntry] = {}


def _entries() -> Mapping[str, AggregationEntry]:
    import_module("fedrot.aggregation")  # registers fedrot's aggregations
    return _ENTRIES


def register_aggregation(
    name: str, meaning: str
) -> Callable[[type[Built]], type[Built]]:
    """Return a class decorator that registers an aggregation; see
    ``AggregationEntry``.
    """

    def register(build: type[Built]) -> type[Built]:
        _ENTRIES[name] = AggregationEntry(name, build, build.needs, meaning)
        return build

    return register


def aggregations(given: Collection[str] | None = None) -> tuple[AggregationEntry, ...]:
    """Return the registered aggregations that need no other inputs than ``given``; all
    if None.
    """
    return tuple(
        e for e in _entries().values() if given is None or set(e.inputs) <= set(given)
    )


def aggregation_named(
    name: str, **given: Callable[[], object]
) -> Callable[[], Aggregator]:
    """Return a function that builds a new aggregator.

    >>> aggregation_named("regmean", alpha=lambda: 0.5)().alpha
    0.5

    Args:
        name: of a registered aggregation.
        **given: functions that return the constructor's arguments, by name; other names
            are ignored.

    Raises:
        FedrotError: the name is unknown, or an argument without a default is not given.
    """
    entries = _entries()
    if name not in entries:
        raise FedrotError(
            f"Unknown aggregation '{name}'; choose from {', '.join(entries)}."
        )
    entry = entries[name]
    missing = [argument for argument in entry.inputs if argument not in given]
    if missing:
        raise FedrotError(
            f"Aggregation '{name}' needs the argument '{missing[0]}': write "
            f"aggregation=lambda: {entry.path}({', '.join(entry.inputs)})."
        )
    used = given.keys() & inspect.signature(entry.build).parameters.keys()
    return lambda: entry.build(**{argument: given[argument]() for argument in used})
