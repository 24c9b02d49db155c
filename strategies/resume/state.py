"""``RunState``: the state of a run, without the model, for checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator
from logging import WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord
from flwr.common import log
from flwr.serverapp.strategy import Strategy

from fedrot.errors import FedrotError
from fedrot.strategies.resume.values import (
    NamedArrays,
    UnknownValueError,
    decode,
    encode,
)
from fedrot.strategies.wire.flower_compat import transient_attributes

#: Functions that read and set the state of an object.
Access = tuple[Callable[[], Any], Callable[[Any], Any]]

#: Values of a state, by name.
State = dict[str, Any]

#: The values of a strategy or configuration that may be state, and the function that
#: sets some.
Holder = tuple[State, Callable[[State], Any]]

#: The global random generators.
_GENERATORS: dict[str, Access] = {
    "python": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
    "torch": (torch.get_rng_state, torch.set_rng_state),
}

_NOT_SAVED = (
    "Not in the checkpoints, and lost when the run is resumed: %s Give its class the "
    "methods state_dict and load_state_dict, or the strategy the methods state and "
    "restore."
)


class RunState:
    """The state of a run, without the model.

    These are values of the strategy and of strategies in its attributes: those that its
    method ``state`` returns by name and its method ``restore`` takes back; without
    these methods, all its attributes. Of these values, a checkpoint contains

    * those that hold arrays, tensors or Flower records, alone or in lists and
      dictionaries;
    * plain values that changed since the run began; others may be set differently in a
      resumed run;
    * the state of random generators and of objects with ``state_dict`` and
      ``load_state_dict`` (modules, optimizers, privacy accountants), which is loaded
      into the existing objects.

    It also contains the changed entries of the training and evaluation configuration,
    and the global random generators of Python, NumPy and torch (CPU). Other values are
    left out, with a warning if they look like state.
    """

    def __init__(
        self,
        strategy: Strategy,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
    ) -> None:
        self._strategy = strategy
        self._configs = {
            "train_config": train_config,
            "evaluate_config": evaluate_config,
        }
        self._start = {
            key: (_plain(value), _parts(value)) for key, value in self._entries()
        }
        self._warned: set[str] = set()
        self._random: State = {}

    def encoded(self, arrays: NamedArrays) -> State:
        """Return the state as JSON values; arrays are added to ``arrays``."""
        entries: list[tuple[str, str, bool, Any]] = []
        for key, value in self._entries():
            access = _access(value)
            bulk = NamedArrays()
            plain, parts = self._start.get(key, (None, []))
            try:
                coded = encode(access[0]() if access else value, ".".join(key), bulk)
            except UnknownValueError as error:
                changed = [*map(id, parts)] != [*map(id, _parts(value))]
                # fedrot's own objects have no state beyond a round.
                ours = type(value).__module__.startswith("fedrot.")
                reason = str(error)
                stateful = changed or access or isinstance(value, Collection)
                if stateful and not ours and reason not in self._warned:
                    self._warned.add(reason)
                    log(WARNING, _NOT_SAVED, reason)
                continue
            if access or json.dumps(coded) != plain:
                entries.append((*key, access is not None, coded))
            arrays |= bulk
        generators = {name: read() for name, (read, _) in _GENERATORS.items()}
        return {
            "strategy": type(self._strategy).__qualname__,
            "entries": entries,
            "random": encode(generators, "random", arrays),
        }

    def restore(self, saved: State, arrays: NamedArrays) -> None:
        """Restore the state that ``encoded`` returned, except the random generators.

        Raises:
            FedrotError: the state is of another strategy, or of a strategy that wraps
                others.
        """
        ours = type(self._strategy).__qualname__
        if saved["strategy"] != ours:
            raise FedrotError(
                f"The checkpoint is of a {saved['strategy']}, the strategy is a "
                f"{ours}. Resume with the strategy of the checkpoint, or start a new "
                "run from its model.safetensors."
            )
        holders = self._holders()
        existing = dict(self._entries())
        restored: dict[str, State] = {where: {} for where in holders}
        for where, name, within, coded in saved["entries"]:
            access = _access(existing.get((where, name)))
            if where not in holders or (within and access is None):
                raise FedrotError(
                    f"The checkpoint has the state of '{where}.{name}', which this run "
                    "does not have. Resume with the strategy of the checkpoint."
                )
            value = decode(coded, arrays)
            if within and access is not None:
                access[1](value)
            else:
                restored[where][name] = value
        for where, values in restored.items():
            holders[where][1](values)
        self._random = decode(saved["random"], arrays)

    def restore_random(self) -> None:
        """Restore the global random generators, after ``restore``."""
        for name, (_, restore) in _GENERATORS.items():
            restore(self._random[name])

    def _holders(self) -> dict[str, Holder]:
        """Return by path the values of strategies and configurations, and setters."""
        configs = {
            path: (dict(config), config.update)
            for path, config in self._configs.items()
        }
        return {**dict(_strategies(self._strategy, "strategy", set())), **configs}

    def _entries(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for where, (values, _) in self._holders().items():
            for name, value in values.items():
                if not isinstance(value, Strategy):
                    yield (where, name), value


def _strategies(
    strategy: Any, path: str, seen: set[int]
) -> Iterator[tuple[str, Holder]]:
    """Yield what may be state of a strategy and those in its attributes, by path."""
    if id(strategy) in seen:
        return
    seen.add(id(strategy))
    attributes = vars(strategy)
    read, restore = _methods(strategy, "state", "restore") or (
        attributes.copy,
        attributes.update,
    )
    kept = dict(read())
    for name in transient_attributes(strategy):
        kept.pop(name, None)
    yield path, (kept, restore)
    for name, value in list(attributes.items()):
        if isinstance(value, Strategy):
            yield from _strategies(value, f"{path}.{name}", seen)


def _plain(value: Any) -> str | None:
    """Return a plain value as JSON; None for any other value."""
    arrays: NamedArrays = {}
    try:
        encoded = encode(value, "", arrays)
    except UnknownValueError:
        return None
    return None if arrays else json.dumps(encoded)


def _parts(value: Any) -> list[Any]:
    """Return an object and the values of its attributes."""
    return [value, *getattr(value, "__dict__", {}).values()]


def _access(value: Any) -> Access | None:
    """Return how an object's state is read and set in place, None without a state."""
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(value, random.Random):
        return _methods(value, "getstate", "setstate")
    if isinstance(value, np.random.RandomState | torch.Generator):
        return _methods(value, "get_state", "set_state")
    return _methods(value, "state_dict", "load_state_dict")


def _methods(value: Any, *names: str) -> Access | None:
    """Return an object's methods that read and set its state, None without both."""
    read, restore = (getattr(value, name, None) for name in names)
    if callable(read) and callable(restore) and not isinstance(value, type):
        return read, restore
    return None
