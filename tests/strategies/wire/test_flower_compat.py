"""Flower's internals are as ``flower_compat`` expects them in the installed version."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import FitIns, Parameters
from flwr.common.constant import ErrorCode
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitins_to_recorddict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedYogi,
    QFedAvg,
)
from flwr.supercore import differential_privacy
from flwr.supercore.task_identity import TaskIdentity
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedrot.errors import LONGEST_REASON, legible
from fedrot.strategies import FedRot
from fedrot.strategies.resume.state import RunState
from fedrot.strategies.wire.flower_compat import (
    SECURE_AGGREGATION,
    UNNAMED_MODEL,
    clips_zero,
    failure_of,
    metrics_function,
    outside_of_the_engine,
    set_broadcast,
    transient_attributes,
    without_metrics,
)
from fedrot.strategies.wire.lazy_grid import LazyGrid
from tests.strategies.fakes import FakeGrid, failure, reply


def test_records_of_the_legacy_workflows_have_these_names():
    content = fitins_to_recorddict(FitIns(Parameters([], ""), {}), keep_input=True)
    assert UNNAMED_MODEL in content.array_records
    assert SECURE_AGGREGATION == RECORD_KEY_CONFIGS


def _one(contents, weighted_by):
    return MetricRecord({"one": 1})


AVERAGE = FedAvg(train_metrics_aggr_fn=_one)
IDENTITY = ("_task_id", "_run_id", "_node_id")


def identity():
    return [getattr(TaskIdentity, name) for name in IDENTITY]


#: The block, what it changes, and whether that is as it must be inside.
BLOCKS = {
    "metrics": (
        lambda: without_metrics(AVERAGE),
        lambda: metrics_function(AVERAGE),
        lambda function: dict(function([RecordDict()], "")) == {},
    ),
    "norms": (
        clips_zero,
        lambda: differential_privacy.get_norm,
        lambda norm: (
            0 < norm([np.zeros(2)]) < 1e-300 and norm([np.array([3.0, 4.0])]) == 5
        ),
    ),
    "identity": (outside_of_the_engine, identity, lambda found: found == [1, 1, 1]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_changed_inside_a_block_is_flowers_again_behind_it(name, monkeypatch):
    block, read, right = BLOCKS[name]
    for value, attribute in enumerate(IDENTITY, start=5):
        monkeypatch.setattr(TaskIdentity, attribute, value)
    before = read()
    with block():
        assert right(read())
    assert read() == before
    with pytest.raises(KeyError), block():
        raise KeyError
    assert read() == before
    assert metrics_function(AVERAGE) is _one


NOISE = {"noise_multiplier": 0.1, "num_sampled_clients": 2}


@pytest.mark.parametrize(
    "build",
    [
        FedAdagrad,
        FedAdam,
        FedYogi,
        partial(QFedAvg, 0.1),
        lambda: DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), **NOISE),
        lambda: DifferentialPrivacyServerSideFixedClipping(
            FedAvg(), clipping_norm=1.0, **NOISE
        ),
    ],
)
def test_attributes_that_are_set_anew_are_there(build):
    strategy = build()
    assert transient_attributes(strategy) == {"current_arrays"}
    assert "current_arrays" in vars(strategy)
    assert transient_attributes(FedAvg()) == frozenset()


def test_a_strategy_inside_a_wrapper_compares_with_the_same_model_too():
    inside = FedAdam()
    moved = ArrayRecord({"w": torch.tensor([1.0, 2.0])})
    wrapper = DifferentialPrivacyServerSideFixedClipping(inside, 0.0, 1.0, 2)
    vars(inside)["current_arrays"] = {"w": np.zeros(2, np.float32)}
    vars(wrapper)["current_arrays"] = ArrayRecord({"w": torch.zeros(2)})
    set_broadcast(wrapper, lambda: moved)
    assert wrapper.current_arrays["w"].numpy().tolist() == [1.0, 2.0]
    assert vars(inside)["current_arrays"]["w"].tolist() == [1.0, 2.0]


def test_a_class_among_a_strategys_attributes_is_no_state():
    strategy = FedRot(alignment=None)
    strategy.kind = torch.optim.SGD
    RunState(strategy, ConfigRecord(), ConfigRecord()).encoded({})


class Malformed(FakeGrid):
    """Its replies cannot be decoded."""

    error = ValueError

    def pull_messages(self, message_ids):
        raise self.error("torn")


@pytest.mark.parametrize(
    "error", [ValueError, KeyError, AssertionError, DecodeError, OSError]
)
def test_a_reply_that_cannot_be_decoded_is_an_error_reply_of_its_node(
    error,
):
    grid = Malformed({7: failure})
    grid.error = error
    asked = Message(RecordDict(), dst_node_id=7, message_type="train")
    if error is OSError:  # Of transport.
        with pytest.raises(OSError, match="torn"):
            list(LazyGrid(grid).send_and_receive([asked]))
        return
    (found,) = LazyGrid(grid).send_and_receive([asked])
    assert found.has_error()
    assert found.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert "torn" in (found.error.reason or "")
    assert found.metadata.src_node_id == 7


def test_a_message_that_the_grid_refuses_is_not_waited_for():
    class Refusing(FakeGrid):
        def push_messages(self, messages):
            return [None, *super().push_messages(list(messages)[1:])]

        def pull_messages(self, *given, **named):
            assert None not in given[0]
            return super().pull_messages(*given, **named)

    grid = Refusing(
        {node: lambda message: reply(message, {}, 1) for node in (100, 101)}
    )
    messages = [Message(RecordDict(), node, "train") for node in (100, 101)]
    assert len(LazyGrid(grid).send_and_receive(messages, timeout=0.5)) == 1


def test_the_call_that_a_client_lacks_is_said_behind_a_long_traceback():
    reason = (
        "RayTaskError: "
        + "File, line. " * 90
        + "No train function registered with name x"
    )
    lacking = SimpleNamespace(error=SimpleNamespace(reason=reason))
    said = legible(failure_of(lacking, "answer_with_sums"))
    assert said.endswith(
        "registered with name x Call answer_with_sums with its ClientApp."
    )
    assert (said[:23], len(said)) == ("it failed: RayTaskError", LONGEST_REASON)
