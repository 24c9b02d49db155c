"""What a run has learned besides its model: the strategy's own state, changed settings, randomness."""

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

#: A class attribute of strategies: the names of their attributes that checkpoints leave out.
LEFT_OUT = "not_in_checkpoints"


class RunState:
    """The state of one run outside its model, found by walking over the strategy's attributes.

    Saved are, of the strategy and of strategies that it wraps in attributes,

    * attributes that hold arrays, tensors or Flower records, alone or in lists and dictionaries;
    * attributes of plain values, if they changed since the run started, so that what did not change
      can be set otherwise when the run is resumed;
    * the state of random generators and of whatever else has ``state_dict`` and ``load_state_dict``
      (modules, optimizers, privacy accountants); these objects stay, and their state is set;

    then the entries of the training and evaluation configuration that changed, and the state of the
    global random generators of Python, NumPy and torch (CPU). Attributes named in the class attribute
    ``not_in_checkpoints`` of any class of the strategy are left out. So is every other object, with a
    warning if it is seen to be state.
    """

    def __init__(
        self, strategy: Strategy, train_config: ConfigRecord, evaluate_config: ConfigRecord
    ) -> None:
        self._strategy = strategy
        self._configs: dict[str, MutableMapping[str, Any]] = {
            "train_config": train_config,
            "evaluate_config": evaluate_config,
        }
        self._start = {key: (value, _plain(value)) for key, value in self._entries()}
        self._warned: set[tuple[str, str]] = set()

    def encoded(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the state as JSON; its numbers in bulk go into ``arrays``."""
        found: list[tuple[str, str, dict[str, Any]]] = []
        for (where, name), value in self._entries():
            access, path, known = _access(value), f"{where}.{name}", len(arrays)
            try:
                if access is not None:
                    found.append((where, name, {"within": encode(access[0](), path, arrays)}))
                elif (plain := _plain(value)) is None or plain != self._at_start(where, name):
                    found.append((where, name, {"value": encode(value, path, arrays)}))
            except UnknownValueError as error:
                for half in list(arrays)[known:]:
                    del arrays[half]
                self._warn_of((where, name), value, error)
        return {
            "strategy": type(self._strategy).__qualname__,
            "entries": found,
            "random": encode(_global_random(), "random", arrays),
        }

    def restore(self, saved: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Set everything but the global random generators to what ``encoded`` returned.

        Raises:
            FedrotError: another strategy was saved, or one that wraps others.
        """
        ours = type(self._strategy).__qualname__
        if saved["strategy"] != ours:
            raise FedrotError(
                f"The checkpoint is of a {saved['strategy']}, the strategy is a {ours}. Resume with the "
                "strategy that was running; to go on with another one, start it from the "
                "checkpoint's model.safetensors."
            )
        holders = self._holders()
        for where, name, entry in saved["entries"]:
            holder = holders.get(where)
            access = _access(holder.get(name)) if holder is not None else None
            if holder is None or ("within" in entry and access is None):
                raise FedrotError(
                    f"The checkpoint has the state of '{where}.{name}', which this run does not have. "
                    "Resume with the strategy that was running."
                )
            if access is not None and "within" in entry:
                access[1](decode(entry["within"], arrays))
            else:
                holder[name] = decode(entry["value"], arrays)

    def _holders(self) -> dict[str, MutableMapping[str, Any]]:
        """Return what holds state, by path: attributes of strategies, entries of configurations."""
        strategies = _strategies(self._strategy, "strategy", set())
        return {path: vars(strategy) for path, strategy in strategies} | self._configs

    def _entries(self) -> Iterator[tuple[tuple[str, str], Any]]:
        out = {
            path: _left_out(strategy)
            for path, strategy in _strategies(self._strategy, "strategy", set())
        }
        for where, holder in self._holders().items():
            for name, value in list(holder.items()):
                if name not in out.get(where, ()) and not isinstance(value, Strategy):
                    yield (where, name), value

    def _at_start(self, where: str, name: str) -> str | None:
        return self._start.get((where, name), (None, None))[1]

    def _warn_of(self, key: tuple[str, str], value: Any, error: UnknownValueError) -> None:
        """Warn once of what is not saved but looks like state."""
        replaced = key not in self._start or self._start[key][0] is not value
        looks_like_state = replaced or isinstance(value, Collection) or _access(value) is not None
        if looks_like_state and key not in self._warned:
            log(WARNING, "Not in the checkpoints, and lost when the run is resumed: %s", error)
            self._warned.add(key)


def restore_random(saved: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Set the global random generators to what ``RunState.encoded`` found."""
    states = decode(saved["random"], arrays)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


def _global_random() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }


def _strategies(strategy: Strategy, path: str, seen: set[int]) -> Iterator[tuple[str, Strategy]]:
    """Yield a strategy and those that it holds in attributes, each with its path."""
    if id(strategy) in seen:
        return
    seen.add(id(strategy))
    yield path, strategy
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _strategies(value, f"{path}.{name}", seen)


def _left_out(strategy: Strategy) -> frozenset[str]:
    names = {name for kind in type(strategy).__mro__ for name in vars(kind).get(LEFT_OUT, ())}
    return transient_attributes(strategy) | names


def _plain(value: Any) -> str | None:
    """Return a plain value as JSON; None for what is not plain."""
    arrays: dict[str, np.ndarray] = {}
    try:
        encoded = json.dumps(encode(value, "", arrays))
    except UnknownValueError:
        return None
    return None if arrays else encoded


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return how the state inside an object is read and set, None if it has none of its own."""
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
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return lambda: _plain_dicts(value.state_dict()), value.load_state_dict
    return None


def _plain_dicts(state: Any) -> Any:
    """Return a state without the subclasses of dict and Tensor that modules use."""
    if isinstance(state, dict):
        return {name: _plain_dicts(value) for name, value in state.items()}
    return state.detach() if isinstance(state, torch.Tensor) else state
