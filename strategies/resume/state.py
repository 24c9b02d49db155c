"""``RunState``: the state of a run, without the model, for checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator, MutableMapping
from logging import WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord
from flwr.common import log
from flwr.serverapp.strategy import Strategy

from fedrot.errors import FedrotError
from fedrot.strategies.flower_compat import transient_attributes
from fedrot.strategies.resume.values import UnknownValueError, decode, encode


class RunState:
    """The state of a run, without the model, read from the strategy's attributes.

    For the strategy, and for strategies in its attributes, the state contains:

    * attributes that hold arrays, tensors or Flower records, alone or in lists and dictionaries;
    * attributes with plain values that changed since the run started; unchanged values may be set
      differently when the run is resumed;
    * the state of random generators and of objects with ``state_dict`` and ``load_state_dict``
      (modules, optimizers, privacy accountants), which is loaded into the existing objects.

    It also contains the changed entries of the training and evaluation configuration, and the global
    random generators of Python, NumPy and torch (CPU). Attributes named in ``not_in_checkpoints`` of
    any class of the strategy are left out. Other objects are left out, with a warning if they look like
    state. Strategies of Flower and their subclasses therefore need no list of their state.
    """

    def __init__(
        self, strategy: Strategy, train_config: ConfigRecord, evaluate_config: ConfigRecord
    ) -> None:
        self._strategy = strategy
        self._configs = {"train_config": train_config, "evaluate_config": evaluate_config}
        self._start = {key: (_plain(value), _parts(value)) for key, value in self._entries()}
        self._warned: set[tuple[str, str]] = set()
        self._random: dict[str, Any] = {}

    def encoded(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the state as JSON values; arrays are added to ``arrays``."""
        found: list[tuple[str, str, dict[str, Any]]] = []
        for key, value in self._entries():
            access, own = _access(value), dict[str, np.ndarray]()
            try:
                coded = encode(value if access is None else access[0](), ".".join(key), own)
            except UnknownValueError as error:
                self._warn_of(key, value, error)
                continue
            if access is not None:
                found.append((*key, {"within": coded}))
            elif own or json.dumps(coded) != self._start.get(key, (None,))[0]:
                found.append((*key, {"value": coded}))
            arrays |= own
        generators = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        return {
            "strategy": type(self._strategy).__qualname__,
            "entries": found,
            "random": encode(generators, "random", arrays),
        }

    def restore(self, saved: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Restore the state that ``encoded`` returned, except the random generators.

        Raises:
            FedrotError: the state is of another strategy, or of a strategy that wraps others.
        """
        ours = type(self._strategy).__qualname__
        if saved["strategy"] != ours:
            raise FedrotError(
                f"The checkpoint is of a {saved['strategy']}, the strategy is a {ours}. Resume with the "
                "strategy of the checkpoint, or start a new run from its model.safetensors."
            )
        holders = self._holders()
        for where, name, entry in saved["entries"]:
            holder, _ = holders.get(where, (None, None))
            access = _access(holder.get(name)) if holder is not None else None
            if holder is None or ("within" in entry and access is None):
                raise FedrotError(
                    f"The checkpoint has the state of '{where}.{name}', which this run does not have. "
                    "Resume with the strategy of the checkpoint."
                )
            if access is not None and "within" in entry:
                access[1](decode(entry["within"], arrays))
            else:
                holder[name] = decode(entry["value"], arrays)
        self._random = decode(saved["random"], arrays)

    def restore_random(self) -> None:
        """Restore the global random generators, after ``restore``."""
        random.setstate(self._random["python"])
        np.random.set_state(self._random["numpy"])
        torch.set_rng_state(self._random["torch"])

    def _holders(self) -> dict[str, tuple[MutableMapping[str, Any], frozenset[str]]]:
        """Return the mappings that hold state, by path, each with the names to leave out."""
        strategies = _strategies(self._strategy, "strategy", set())
        attributes = {path: (vars(strategy), _left_out(strategy)) for path, strategy in strategies}
        return attributes | {path: (config, frozenset()) for path, config in self._configs.items()}

    def _entries(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for where, (holder, left_out) in self._holders().items():
            for name, value in list(holder.items()):
                if name not in left_out and not isinstance(value, Strategy):
                    yield (where, name), value

    def _warn_of(self, key: tuple[str, str], value: Any, error: UnknownValueError) -> None:
        """Warn once about an attribute that looks like state but is not saved."""
        _, before = self._start.get(key, (None, []))
        changed = [*map(id, before)] != [*map(id, _parts(value))]
        looks_like_state = changed or isinstance(value, Collection) or _access(value) is not None
        if looks_like_state and key not in self._warned:
            log(
                WARNING,
                "Not in the checkpoints, and lost when the run is resumed: %s Add the methods "
                "state_dict and load_state_dict to its class, or name it in not_in_checkpoints.",
                error,
            )
            self._warned.add(key)


def _strategies(strategy: Strategy, path: str, seen: set[int]) -> Iterator[tuple[str, Strategy]]:
    """Yield a strategy and the strategies in its attributes, each with its path."""
    if id(strategy) in seen:
        return
    seen.add(id(strategy))
    yield path, strategy
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _strategies(value, f"{path}.{name}", seen)


def _left_out(strategy: Strategy) -> frozenset[str]:
    named = (vars(kind).get("not_in_checkpoints", ()) for kind in type(strategy).__mro__)
    return transient_attributes(strategy).union(*named)


def _plain(value: Any) -> str | None:
    """Return a plain value as JSON; None for any other value."""
    arrays: dict[str, np.ndarray] = {}
    try:
        encoded = json.dumps(encode(value, "", arrays))
    except UnknownValueError:
        return None
    return None if arrays else encoded


def _parts(value: Any) -> list[Any]:
    """Return an object and the values of its attributes."""
    return [value, *getattr(value, "__dict__", {}).values()]


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return the functions that read and set an object's state; None if it has no state."""
    if isinstance(value, type):
        return None
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        return lambda: value.get_state(legacy=False), value.set_state
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        return lambda: _plain_dicts(value.state_dict()), value.load_state_dict
    return None


def _plain_dicts(state: Any) -> Any:
    """Return a state with subclasses of dict and tensor replaced by plain ones."""
    if isinstance(state, dict):
        return {name: _plain_dicts(value) for name, value in state.items()}
    return state.detach() if isinstance(state, torch.Tensor) else state
