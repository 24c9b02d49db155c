"""Flower's internals that fedrot uses, with the reason and the tested versions of Flower.

=========================  =======================================================  =============
function or constant       internal, and why it is used                             tested with
=========================  =======================================================  =============
``metrics_function``,      ``FedAvg.train_metrics_aggr_fn``: the function that      1.41 to 1.43
``without_metrics``        aggregates training metrics has no public accessor.
``transient_attributes``   ``current_arrays``: some strategies store the broadcast  1.41 to 1.43
                           model, which a checkpoint need not repeat.
``callers``                The call stack: no public API tells a strategy which     1.41 to 1.43
                           strategy wraps and calls it.
``inner_mods``             Closure cells of ``make_ffn``: no public API tells a     1.41 to 1.43
                           mod which mods run between it and the client.
``UNNAMED_MODEL``,         Record names of the legacy workflows: tensors in these   1.41 to 1.43
``SECURE_AGGREGATION``     messages have no names, or will be masked.
``NUMPY``                  ``SType``: the ``stype`` of Flower's own arrays has no   1.41 to 1.43
                           public name.
``UNREADABLE``,            Errors of ``Grid.pull_messages`` for a malformed         1.41 to 1.43,
``unavailable``            reply, and the error reply that replaces the reply.      protobuf 6
``failure_of``              "function registered", in the error of an app without the    1.41 to 1.43
                           action that a message asks for.
``clips_zero``             ``get_norm`` of the privacy wrappers, which divide by    1.41 to 1.43
                           the norm of the change; without a change it is 0.
``equal_weights``          ``accountant``: a privacy wrapper with an accountant     1.41 to 1.43
                           raises if clients have different weights.
``set_broadcast``          ``current_arrays``: strategies subtract the broadcast    1.41 to 1.43
                           model, which must be in the mean's coordinates.
``figures_of``             ``train_loss_key``, ``KEY_NORM_BIT``: a strategy ends    1.41 to 1.43
                           the run if a reply lacks such a metric.
``outside_of_the_engine``  ``TaskIdentity``: messages cannot be made in a process   1.41 to 1.43
                           without a run of Flower's engine.
=========================  =======================================================  =============
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode, SType
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedYogi,
    QFedAvg,
    Strategy,
)
from flwr.supercore import differential_privacy
from flwr.supercore.differential_privacy import KEY_NORM_BIT
from flwr.supercore.task_identity import TaskIdentity
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedrot.tensors import LARGEST_WEIGHT

MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]

#: The legacy workflows' record of the model, without names, shapes and dtypes.
UNNAMED_MODEL = "fitins.parameters"

#: The record that marks a message of secure aggregation (``secaggplus_constants``).
SECURE_AGGREGATION = "secaggplus_configs"

#: The ``stype`` of Flower's own arrays.
NUMPY = SType.NUMPY

#: Errors for a malformed reply; transport errors have other classes.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, DecodeError)

_NO_ACTION = "function registered with name"

_METRICS_FUNCTION = "train_metrics_aggr_fn"

_REMEMBER_THE_BROADCAST = (
    FedAdagrad,
    FedAdam,
    FedYogi,
    QFedAvg,
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)


def metrics_function(strategy: Strategy) -> MetricsFunction:
    """Return the function by which a strategy aggregates the clients' training metrics."""
    return vars(strategy)[_METRICS_FUNCTION]


@contextmanager
def without_metrics(strategy: Strategy) -> Iterator[None]:
    """Turn off a strategy's aggregation of training metrics inside the ``with`` block."""
    before = metrics_function(strategy)
    vars(strategy)[_METRICS_FUNCTION] = lambda *_: MetricRecord()
    try:
        yield
    finally:
        vars(strategy)[_METRICS_FUNCTION] = before


def transient_attributes(strategy: Strategy) -> frozenset[str]:
    """Return the attributes that Flower's strategy sets in every round."""
    return frozenset({"current_arrays"} if isinstance(strategy, _REMEMBER_THE_BROADCAST) else ())


def set_broadcast(strategy: Strategy, make: Callable[[], ArrayRecord]) -> None:
    """Replace the stored broadcast model in a strategy and its wrapped strategy, if they store one."""
    both = (strategy, getattr(strategy, "strategy", None))
    comparing = [one for one in both if getattr(one, "current_arrays", None) is not None]
    if not comparing:
        return
    arrays = make()
    for one in comparing:
        if isinstance(getattr(one, "current_arrays", None), ArrayRecord):
            vars(one)["current_arrays"] = arrays.copy()
        else:
            vars(one)["current_arrays"] = {name: array.numpy() for name, array in arrays.items()}


@contextmanager
def clips_zero() -> Iterator[None]:
    """Let privacy wrappers clip an update that equals the broadcast model inside the ``with`` block."""
    before = differential_privacy.get_norm
    # Positive, but below every norm of float32 entries: such an update is not clipped.
    differential_privacy.get_norm = lambda input_arrays: before(input_arrays) or sys.float_info.min
    try:
        yield
    finally:
        differential_privacy.get_norm = before


def equal_weights(strategy: Strategy) -> bool:
    """Return whether a strategy accepts only clients of equal weight."""
    return getattr(strategy, "accountant", None) is not None


def figures_of(strategy: object) -> dict[str, float]:
    """Return the metrics of replies that a strategy uses, each with its largest accepted value."""
    loss = getattr(strategy, "train_loss_key", None)
    clipped = isinstance(strategy, DifferentialPrivacyClientSideAdaptiveClipping)
    return ({loss: LARGEST_WEIGHT} if loss else {}) | ({KEY_NORM_BIT: 1.0} if clipped else {})


def callers() -> Iterator[object]:
    """Yield the objects whose methods are on the call stack, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def inner_mods(call_next: Any) -> Iterator[Any]:
    """Yield the mods between a mod and the client, without ``partial`` and ``functools.wraps``.

    The iterator ends at the first callable that ``make_ffn`` has not built.

    Args:
        call_next: the callable that the mod was given.
    """
    link = call_next
    while True:
        code, cells = getattr(link, "__code__", None), getattr(link, "__closure__", None)
        free = dict(zip(code.co_freevars, cells, strict=True)) if code and cells else {}
        if not {"_mod", "_ffn"} <= free.keys():
            return
        mod, link = free["_mod"].cell_contents, free["_ffn"].cell_contents
        while isinstance(mod, partial) or hasattr(mod, "__wrapped__"):
            mod = mod.func if isinstance(mod, partial) else mod.__wrapped__
        yield mod


@contextmanager
def outside_of_the_engine() -> Iterator[None]:
    """Allow messages to be made inside the ``with`` block, in a process without Flower's engine."""
    names = ("_task_id", "_run_id", "_node_id")
    before = {name: getattr(TaskIdentity, name) for name in names}
    try:
        for name in names:
            setattr(TaskIdentity, name, 1)
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def failure_of(reply: Message, call: str) -> str:
    """Return why a client failed, and the ``call`` that its app lacks if it does not know the action."""
    reason = reply.error.reason or "no reason given"
    return f"it failed: {reason}" + (f" Call {call} with its ClientApp." if _NO_ACTION in reason else "")


def unavailable(asked: Message, reason: str) -> Message:
    """Return Flower's error reply for a reply that cannot be fetched."""
    return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, reason), reply_to=asked)
