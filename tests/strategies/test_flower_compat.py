"""Flower's internals are as ``flower_compat`` expects them in the installed version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.client.mod.utils import make_ffn
from flwr.common import FitIns, Parameters
from flwr.common.constant import ErrorCode
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import (
    fitins_to_recorddict,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedYogi,
    QFedAvg,
    Strategy,
)
from flwr.supercore import differential_privacy
from flwr.supercore.task_identity import TaskIdentity
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedrot.strategies.flower_compat import (
    SECURE_AGGREGATION,
    UNNAMED_MODEL,
    callers,
    clips_zero,
    inner_mods,
    metrics_function,
    outside_of_the_engine,
    set_broadcast,
    transient_attributes,
    without_metrics,
)
from fedrot.strategies.lazy_grid import LazyGrid
from tests.strategies.fakes import FakeGrid, failure


def test_records_of_the_legacy_workflows_have_these_names() -> None:
    content = fitins_to_recorddict(FitIns(Parameters([], ""), {}), keep_input=True)
    assert UNNAMED_MODEL in content.array_records
    assert SECURE_AGGREGATION == RECORD_KEY_CONFIGS


def test_metrics_are_aggregated_by_the_given_function_but_inside_the_block() -> None:
    def given(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        return MetricRecord({"one": 1})

    strategy = FedAvg(train_metrics_aggr_fn=given)
    assert metrics_function(strategy) is given
    with without_metrics(strategy):
        assert dict(metrics_function(strategy)([RecordDict()], "")) == {}
    assert metrics_function(strategy) is given
    with pytest.raises(KeyError), without_metrics(strategy):
        raise KeyError
    assert metrics_function(strategy) is given


def test_the_norm_of_no_change_is_flowers_again_behind_the_block() -> None:
    flowers = differential_privacy.get_norm
    with clips_zero():
        assert 0 < differential_privacy.get_norm([np.zeros(2)]) < 1e-300
        assert differential_privacy.get_norm([np.array([3.0, 4.0])]) == 5
    assert differential_privacy.get_norm is flowers
    with pytest.raises(KeyError), clips_zero():
        raise KeyError
    assert differential_privacy.get_norm is flowers


def test_the_process_has_its_own_identity_behind_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_task_id", "_run_id", "_node_id")
    for value, name in enumerate(names, start=5):
        monkeypatch.setattr(TaskIdentity, name, value)
    with outside_of_the_engine():
        assert [getattr(TaskIdentity, name) for name in names] == [1, 1, 1]
    assert [getattr(TaskIdentity, name) for name in names] == [5, 6, 7]
    with pytest.raises(KeyError), outside_of_the_engine():
        raise KeyError
    assert [getattr(TaskIdentity, name) for name in names] == [5, 6, 7]


NOISE = {"noise_multiplier": 0.1, "num_sampled_clients": 2}


@pytest.mark.parametrize(
    "build",
    [
        *(FedAdagrad, FedAdam, FedYogi, partial(QFedAvg, 0.1)),
        lambda: DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), **NOISE),
        lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), clipping_norm=1.0, **NOISE),
    ],
)
def test_attributes_that_are_set_anew_are_there(build: Callable[[], Strategy]) -> None:
    strategy = build()
    assert transient_attributes(strategy) == {"current_arrays"}
    assert "current_arrays" in vars(strategy)
    assert transient_attributes(FedAvg()) == frozenset()


def test_callers_come_from_the_inside_out() -> None:
    class Outer:
        def __init__(self, inner: Inner) -> None:
            self.inner = inner

        def call(self) -> list[object]:
            return self.inner.call()

    class Inner:
        def call(self) -> list[object]:
            return list(callers())

    inner = Inner()
    outer = Outer(inner)
    assert outer.call()[:2] == [inner, outer]


def test_mods_are_seen_through_partial_and_wraps() -> None:
    def first(message: Message, context: Any, call_next: Any) -> Message:
        raise AssertionError

    @wraps(first)
    def wrapped(*given: Any) -> Message:
        raise AssertionError

    chain = make_ffn(lambda message, context: message, [first, partial(wrapped)])
    assert list(inner_mods(chain)) == [first, first]
    assert list(inner_mods(print)) == []


class Malformed(FakeGrid):
    """Its replies cannot be decoded."""

    error: type[Exception] = ValueError

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        raise self.error("torn")


@pytest.mark.parametrize("error", [ValueError, KeyError, AssertionError, DecodeError])
def test_a_reply_that_cannot_be_decoded_is_an_error_reply_of_its_node(error: type[Exception]) -> None:
    grid = Malformed({7: failure})
    grid.error = error
    asked = Message(RecordDict(), dst_node_id=7, message_type="train")
    (reply,) = LazyGrid(grid).send_and_receive([asked])
    assert reply.has_error()
    assert reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert "torn" in (reply.error.reason or "")
    assert reply.metadata.src_node_id == 7


def test_an_error_of_transport_is_raised() -> None:
    grid = Malformed({7: failure})
    grid.error = OSError
    asked = Message(RecordDict(), dst_node_id=7, message_type="train")
    with pytest.raises(OSError, match="torn"):
        list(LazyGrid(grid).send_and_receive([asked]))


def test_a_strategy_inside_a_wrapper_compares_with_the_same_model_too() -> None:
    inside, moved = FedAdam(), ArrayRecord({"w": torch.tensor([1.0, 2.0])})
    wrapper = DifferentialPrivacyServerSideFixedClipping(inside, 0.0, 1.0, 2)
    vars(inside)["current_arrays"] = {"w": np.zeros(2, np.float32)}
    vars(wrapper)["current_arrays"] = ArrayRecord({"w": torch.zeros(2)})
    set_broadcast(wrapper, lambda: moved)
    assert wrapper.current_arrays["w"].numpy().tolist() == [1.0, 2.0]
    assert vars(inside)["current_arrays"]["w"].tolist() == [1.0, 2.0]
