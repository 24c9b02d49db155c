"""Checks of a strategy's arguments and privacy wrappers, before a client trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from torch import nn

from fedrot.errors import FedrotError, SymmetryError
from fedrot.strategies.wire.arrays import from_arrays, shapes_of
from fedrot.strategies.wire.flower_compat import Evaluate, StageMetrics, callers
from fedrot.symmetry import Symmetry, check_family, symmetry_of
from fedrot.symmetry.resolve import equal_tables
from fedrot.tensors import Shapes

#: A model's symmetry, or the configuration from which it is built.
Described = object

_UNQUOTED = ". (In pyproject.toml and --run-config, write numbers without quotes.)"

_CLIENT_SIDE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
)
_SERVER_SIDE = (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


def check_functions(owner: object, *names: str) -> None:
    """Check that settings are functions, and not what the functions return.

    A setting with a default may be None.
    """
    for name in names:
        function = getattr(owner, name)
        if function is None and hasattr(type(owner), name):
            continue
        if isinstance(function, nn.Module) or not callable(function):
            raise FedrotError(
                f"{name} of {type(owner).__name__} is a {type(function).__name__}; "
                f"give a function, like {name}=lambda: ..."
            )


def read_evaluate(evaluate: Callable[[int, ArrayRecord], Any]) -> Evaluate:
    """Return a server's evaluation function whose results are metrics, or None.

    A dictionary becomes a record, and so does the pair of Flower's legacy interface, a
    loss and a dictionary. Other results raise ``FedrotError``.
    """

    def evaluated(number: int, arrays: ArrayRecord) -> StageMetrics:
        result = evaluate(number, arrays)
        if result is None or isinstance(result, MetricRecord):
            return result
        metrics = result
        try:
            if isinstance(result, tuple):
                loss, others = result
                metrics = {"loss": loss, **others}
            # Numbers of NumPy and tensors are no numbers to Flower.
            plain = {
                name: value.item() if hasattr(value, "item") else value
                for name, value in metrics.items()
            }
            return MetricRecord(plain)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise FedrotError(
                f"The server's evaluation of round {number} returned {result!r:.80}. "
                "Return MetricRecord({'loss': 0.5}) with numbers, a dictionary of "
                "numbers, or None."
            ) from error

    return evaluated


def check_described(name: str, described: object, align: bool) -> None:
    """Check that a supported model is described; without ``align`` None is allowed."""
    if isinstance(described, Symmetry) or (described is None and not align):
        return
    to_dict = getattr(described, "to_dict", None)
    config = (
        to_dict()
        if callable(to_dict) and not isinstance(described, type)
        else described
    )
    if isinstance(config, Mapping) and "model_type" in config:
        if align:
            check_family(config)
        return
    what = (
        "nothing"
        if described is None
        else f"an object of type {type(described).__name__}"
    )
    instead = (
        f"{name}(model.config, ...), with the transformers configuration, or "
        f"{name}(symmetry, ...) for your own architecture (docs/how-to/own-model.md)"
    )
    if isinstance(
        described, bool | int | float
    ):  # FedAvg's first argument is fraction_train.
        what = f"the number {described}"
        instead = (
            f"{name}(model.config, fraction_train={described}), and name other "
            "arguments too"
        )
    raise FedrotError(
        f"{name} needs the model's configuration, and was given {what}: write "
        f"{instead}."
    )


def symmetry_for(described: object, arrays: ArrayRecord) -> Symmetry:
    """Return the symmetry of the broadcast model: the given or the configuration's."""
    if not isinstance(described, Symmetry):
        tensors = from_arrays(arrays)
        symmetry = symmetry_of(described, tensors)
        return replace(symmetry, tied=symmetry.tied or equal_tables(symmetry, tensors))
    check_shapes(described, shapes_of(arrays))
    return described


def check_shapes(symmetry: Symmetry, shapes: Shapes) -> None:
    """Raise ``SymmetryError`` if the shapes of a model differ from a symmetry's."""
    different = sorted(dict(shapes.items() ^ symmetry.shapes.items()))
    if different:
        raise SymmetryError(
            f"The symmetry was built for another model: '{different[0]}' differs from "
            "the model that clients receive. Give the configuration, or the symmetry, "
            "of this model."
        )


def check_initial_arrays(arrays: object, described: object, align: bool) -> None:
    """Check that the first model is a record of finite tensors by name.

    If ``align`` is set, numbers instead of names are refused, unless the symmetry has
    the same names.
    """
    if not isinstance(arrays, ArrayRecord):
        raise FedrotError(
            f"initial_arrays is a {type(arrays).__name__}: write "
            "ArrayRecord(model.state_dict())."
        )
    known = isinstance(described, Symmetry) and described.shapes.keys() == arrays.keys()
    if align and arrays and not known and all(name.isdigit() for name in arrays):
        raise FedrotError(
            "The arrays of initial_arrays have numbers in place of names ('0', '1', "
            "...), as in a record made from a list. Alignment needs names: write "
            "ArrayRecord(model.state_dict())."
        )
    for name, tensor in from_arrays(arrays).items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise FedrotError(
                f"'{name}' in initial_arrays holds NaN or Inf. Give a finite model."
            )


def check_numbers(strategy: object, num_rounds: object) -> None:
    """Check numbers of a run; with wrong ones Flower fails late, or waits for ever."""
    wholes = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
    numbers = {
        "num_rounds": num_rounds,
        **{name: getattr(strategy, name, 0) for name in wholes},
    }
    for name, value in numbers.items():
        if not isinstance(value, Integral) or int(value) < 0:
            raise FedrotError(
                f"{name} is {value!r:.60}; it must be a whole number{_UNQUOTED}"
            )
    for name in ("fraction_train", "fraction_evaluate"):
        value = getattr(strategy, name, 0)
        if not isinstance(value, Real) or not 0 <= float(value) <= 1:
            raise FedrotError(
                f"{name} is {value!r:.60}; it must be a number from 0 to 1{_UNQUOTED}"
            )


def check_in_front(strategy: Strategy, anchor: str, other_basis: bool) -> None:
    """Refuse alignment that would break a privacy wrapper's guarantee.

    The guarantee breaks if clients clip before the server aligns, or if one client's
    reply changes how the updates of others are moved: through the ``anchor`` or
    ``other_basis``.
    """
    if isinstance(strategy, _CLIENT_SIDE):
        raise FedrotError(
            "Clients clip their updates before the server can align them. Align at the "
            "clients, mods=[fixedclipping_mod, align_mod(...)], and give "
            "alignment=None here."
        )
    if isinstance(strategy, _SERVER_SIDE) and (anchor != "global" or other_basis):
        raise FedrotError(
            "With differential privacy every update must be aligned to the broadcast "
            "model: otherwise one client's reply moves the updates of others, and "
            "clipping the reply does not bound its influence. Give "
            "alignment=AlignmentOptions(anchor='global'), and no other_basis."
        )


def check_not_behind(strategy: Strategy) -> None:
    """Refuse to run inside a privacy wrapper.

    The wrapper clips updates before the strategy aligns them, and does not see the sums
    that a task head is fitted to.
    """
    for caller in callers():
        if (
            isinstance(caller, _SERVER_SIDE + _CLIENT_SIDE)
            and caller.strategy is strategy
        ):
            name = type(caller).__name__
            if getattr(strategy, "fit_head", False):
                raise FedrotError(
                    f"{name} bounds what updates tell, and the task head is fitted to "
                    "other sums of the clients. Omit fit_head."
                )
            raise FedrotError(
                f"{name} clips updates before {type(strategy).__name__} aligns them. "
                f"Write class Private(Aligned, {name}): pass and Private(config, "
                "FedAvg(), ..., alignment=AlignmentOptions(anchor='global'))."
            )
