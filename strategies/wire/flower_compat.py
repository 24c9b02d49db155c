"""Flower's internals that fedrot uses, and why.

Tested with Flower 1.41 to 1.43 and protobuf 6.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
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

#: Requests, or replies.
Messages = Iterable[Message]

#: Metrics of a stage; None if there are none.
StageMetrics = MetricRecord | None

#: Aggregates the clients' metrics, given the name of the weight.
MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]

#: Evaluates a round's model at the server: Flower's ``evaluate_fn``.
Evaluate = Callable[[int, ArrayRecord], StageMetrics]

#: The result of a round: the new model, None if the old one stays, and metrics.
Aggregated = tuple[ArrayRecord | None, StageMetrics]

#: The legacy workflows' record of the model, without names, shapes and dtypes.
UNNAMED_MODEL = "fitins.parameters"

#: The record that marks a message of secure aggregation, whose tensors will be masked.
SECURE_AGGREGATION = "secaggplus_configs"

#: The ``stype`` of Flower's own arrays, which has no public name.
NUMPY = SType.NUMPY

#: Errors of ``Grid.pull_messages`` for a malformed reply; transport errors have other
#: classes.
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    DecodeError,
)

_NO_ACTION = "function registered with name"

_REMEMBER_THE_BROADCAST = (
    FedAdagrad,
    FedAdam,
    FedYogi,
    QFedAvg,
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)


def metrics_function(strategy: Strategy) -> MetricsFunction:
    """Return the function that aggregates training metrics; it has no public name."""
    return vars(strategy)["train_metrics_aggr_fn"]


@contextmanager
def _replaced(holder: object, **values: object) -> Iterator[None]:
    """Replace attributes inside the ``with`` block."""
    before = {name: getattr(holder, name) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


def without_metrics(strategy: Strategy) -> AbstractContextManager[None]:
    """Aggregate no training metrics inside the ``with`` block."""
    return _replaced(strategy, train_metrics_aggr_fn=lambda *_: MetricRecord())


def with_metrics_of(
    strategy: Strategy, choose: Callable[[list[RecordDict]], list[RecordDict]]
) -> AbstractContextManager[None]:
    """Aggregate the training metrics of chosen replies inside the ``with`` block.

    The function that aggregates belongs to the strategy, or to the one that it wraps.
    """
    holder = getattr(strategy, "strategy", strategy)
    aggregate: MetricsFunction | None = getattr(holder, "train_metrics_aggr_fn", None)
    if aggregate is None:
        return nullcontext()
    return _replaced(
        holder,
        train_metrics_aggr_fn=lambda contents, key: aggregate(choose(contents), key),
    )


def transient_attributes(strategy: Strategy) -> frozenset[str]:
    """Return the attributes with the broadcast model, which checkpoints leave out."""
    return frozenset(
        {"current_arrays"} if isinstance(strategy, _REMEMBER_THE_BROADCAST) else ()
    )


def set_broadcast(strategy: Strategy, make: Callable[[], ArrayRecord]) -> None:
    """Replace the broadcast model that a strategy, or its wrapped one, subtracts."""
    made = cache(make)
    for holder in (strategy, getattr(strategy, "strategy", None)):
        current = getattr(holder, "current_arrays", None)
        if isinstance(current, ArrayRecord):
            vars(holder)["current_arrays"] = made().copy()
        elif current is not None:
            vars(holder)["current_arrays"] = {
                name: array.numpy() for name, array in made().items()
            }


def clips_zero() -> AbstractContextManager[None]:
    """Let privacy wrappers clip an update without a change.

    They divide by the norm of the change.
    """
    norm = differential_privacy.get_norm
    # Positive, but below every norm of float32 entries: such an update is not clipped.
    return _replaced(
        differential_privacy,
        get_norm=lambda input_arrays: norm(input_arrays) or sys.float_info.min,
    )


def equal_weights(strategy: Strategy) -> bool:
    """Return whether a strategy's privacy accountant needs clients of equal weight."""
    return getattr(strategy, "accountant", None) is not None


def figures_of(strategy: object) -> dict[str, float]:
    """Return the metrics that a strategy needs, each with its largest valid value."""
    loss = getattr(strategy, "train_loss_key", None)
    clipped = isinstance(strategy, DifferentialPrivacyClientSideAdaptiveClipping)
    return ({loss: LARGEST_WEIGHT} if loss else {}) | (
        {KEY_NORM_BIT: 1.0} if clipped else {}
    )


def callers() -> Iterator[object]:
    """Yield the objects whose methods are on the call stack.

    A wrapped strategy can find its wrapper.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def inner_mods(call_next: Any) -> Iterator[Any]:
    """Yield the mods between a mod and the client, unwrapped.

    The iterator ends at the first callable that ``make_ffn`` has not built, from
    ``call_next`` on.
    """
    link = call_next
    while inspect.isfunction(link) and {"_mod", "_ffn"} <= {*link.__code__.co_freevars}:
        free = inspect.getclosurevars(link).nonlocals
        mod = free["_mod"]
        link = free["_ffn"]
        while isinstance(mod, partial) or hasattr(mod, "__wrapped__"):
            mod = mod.func if isinstance(mod, partial) else mod.__wrapped__
        yield mod


def outside_of_the_engine() -> AbstractContextManager[None]:
    """Allow messages to be made in a process without Flower's engine."""
    return _replaced(TaskIdentity, _task_id=1, _run_id=1, _node_id=1)


def failure_of(reply: Message, call: str) -> str:
    """Return why a client failed, and the ``call`` that its app may lack."""
    reason = reply.error.reason or "no reason given"
    return f"it failed: {reason}" + (
        f" Call {call} with its ClientApp." if _NO_ACTION in reason else ""
    )


def unavailable(asked: Message, reason: str) -> Message:
    """Return Flower's error reply for a reply that cannot be fetched."""
    return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, reason), reply_to=asked)
