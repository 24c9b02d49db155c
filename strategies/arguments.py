"""Checks of what a strategy is given: mistakes that are known before any client trains."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fedrot.errors import FedrotError, SymmetryError
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.symmetry import Symmetry, check_family, symmetry_of
from fedrot.symmetry.resolve import settings_of

#: Said when Flower's legacy server takes one of our strategies.
LEGACY = (
    "Flower's legacy server (ServerAppComponents, ServerApp(server_fn=...)) cannot run {name}: write "
    "app = ServerApp(), and in a function main(grid, context) under @app.main() "
    "strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=...)."
)


def check_described(name: str, given: object, align: bool) -> None:
    """Check the description of the model.

    Args:
        name: the strategy's class.
        given: a symmetry, or a transformers configuration or its dictionary; None if ``align`` is False.
        align: whether the description is needed.

    Raises:
        FedrotError: it is something else; the error says what to write instead.
        SymmetryError: the architecture that is described is not supported.
    """
    if isinstance(given, Symmetry) or (given is None and not align):
        return
    mistake = _mistake(name, given)
    if mistake:
        raise FedrotError(mistake)
    settings = settings_of(given)
    if align:
        check_family(settings)


def _mistake(name: str, given: object) -> str:
    """Return what was given in place of a configuration, and what to write; nothing if it may be one."""
    kind, call = type(given).__name__, f"{name}(model.config, ...)"
    if given is None:
        return (
            f"{name} needs the model's configuration: write {call}, with the transformers "
            f"configuration, or {name}(symmetry, ...) for a model of your own (docs/own-model.md)."
        )
    if isinstance(given, nn.Module):
        config = getattr(given, "config", None)
        if isinstance(config, Mapping) or callable(getattr(config, "to_dict", None)):
            return f"{name} was given a model, a {kind}: write {call}, with its configuration."
        return (
            f"{name} was given a model, a {kind}, that has no transformers configuration: describe its "
            f"architecture (docs/own-model.md), and write {name}(symmetry, ...)."
        )
    if isinstance(given, str):
        return (
            f"{name} was given the name '{given:.60}': write "
            f"{name}(transformers.AutoConfig.from_pretrained('{given:.60}'), ...)."
        )
    if isinstance(given, (bool, int, float)):
        return (
            f"{name} was given the number {given} where the model's configuration stands: write "
            f"{name}(model.config, fraction_train={given}), other strategies' arguments by their names."
        )
    if _holds_tensors(given):
        return (
            f"{name} was given a model's tensors: write {call}, and give the tensors to "
            "strategy.start(grid, ArrayRecord(model.state_dict()))."
        )
    strategy = given if isinstance(given, type) else type(given)
    if issubclass(strategy, Strategy):
        other = strategy.__name__
        return (
            f"{name} was given the strategy {other}: write class Aligned{other}(Aligned, {other}): pass "
            f"and Aligned{other}(model.config, ...)."
        )
    if callable(given):
        return (
            f"{name} was given a class or function: write {call} with the configuration of a model; "
            "what builds one is the argument model=."
        )
    return ""


def _holds_tensors(given: object) -> bool:
    values = list(given.values()) if isinstance(given, Mapping) else given
    if isinstance(values, (list, tuple)):
        return any(isinstance(value, (Tensor, np.ndarray, Array)) for value in values)
    return isinstance(values, (Tensor, np.ndarray))


def symmetry_for(described: object, arrays: ArrayRecord) -> Symmetry:
    """Return the symmetry of a model: built from its configuration, or the given one, checked.

    Raises:
        SymmetryError: the symmetry is of another model.
    """
    if not isinstance(described, Symmetry):
        return symmetry_of(described, from_arrays(arrays))
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    different = sorted(dict(shapes.items() ^ described.shapes.items()))
    if different:
        raise SymmetryError(
            f"The symmetry was built for another model: '{different[0]}' differs from what is "
            "broadcast. Pass the configuration, or the symmetry, of this model."
        )
    return described


def check_initial_arrays(arrays: object, described: object, align: bool) -> None:
    """Make sure that the first model is a record of tensors by name.

    Args:
        arrays: what ``start`` was given.
        described: the symmetry, or the configuration.
        align: whether names are needed.

    Raises:
        FedrotError: it is no ``ArrayRecord``; it was made from a list, whose arrays have numbers for
            names, and the symmetry does not call them so; or it is not finite.
    """
    if not isinstance(arrays, ArrayRecord):
        raise FedrotError(
            f"initial_arrays is a {type(arrays).__name__}: write ArrayRecord(model.state_dict())."
        )
    known = isinstance(described, Symmetry) and described.shapes.keys() == arrays.keys()
    if align and arrays and not known and all(name.isdigit() for name in arrays):
        raise FedrotError(
            "The arrays of initial_arrays have numbers in place of names ('0', '1', ...), as if they "
            "were made from a list: write ArrayRecord(model.state_dict()); names tell what can move."
        )
    for name, tensor in from_arrays(arrays).items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FedrotError(f"'{name}' in initial_arrays holds NaN or Inf: nothing can train from it.")
