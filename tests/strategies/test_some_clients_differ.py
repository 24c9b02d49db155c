"""Rounds in which only some clients mark rows, match themselves, or send what others do not send."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyClientSideAdaptiveClipping, FedAvg
from flwr.supercore.differential_privacy import KEY_NORM_BIT

from fedrot.collect.statistics import TRAINED
from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions
from fedrot.strategies import Aligned, FedRot, OtherBasis, Server
from fedrot.strategies.lazy_grid import LazyGrid
from fedrot.strategies.lora import AdapterMean
from fedrot.strategies.resume.state import RunState
from tests.models import State, config_of, near
from tests.strategies.aggregating import HEAD, headless, honest
from tests.strategies.aggregating import play as play_clients
from tests.strategies.classifier import NAME, SYMMETRY, WHOLE, permuted, state
from tests.strategies.fakes import (
    FakeGrid,
    broadcast,
    failure,
    play,
    reply,
    tensors_of,
)
from tests.strategies.test_lora import SETTINGS, adapter

CONFIG = config_of(NAME)
ZERO = {"w": torch.zeros(3)}


def test_a_clients_metric_does_not_replace_the_servers_figure() -> None:
    strategy = FedRot(CONFIG)
    sent = [
        reply(message, near(state(), 0.01, i), 10, i, **{"fedrot-replies-dropped": 7.0})
        for i, message in enumerate(broadcast(strategy, state(), 3))
    ]
    _, metrics = strategy.aggregate_train(1, sent)
    assert metrics is not None
    assert metrics["fedrot-replies-dropped"] == 0


class OwnMessages(FedRot):
    """Makes its messages without ``super().configure_train``."""

    def configure_train(self, *given: Any) -> Iterable[Message]:
        _, arrays, config, grid = given
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, node, "train") for node in grid.get_node_ids()]


def test_a_second_run_of_own_messages_starts_from_its_own_model() -> None:
    def client(message: Message) -> Message:
        received = tensors_of(message.content.array_records["arrays"])
        return reply(message, near(received, 0.01, 1), 10)

    grid = FakeGrid({100: client, 101: client})

    def strategy() -> FedRot:
        return OwnMessages(CONFIG, fraction_evaluate=0.0)

    def distance(runs: FedRot, start: State) -> Any:
        result = runs.start(grid, ArrayRecord(dict(start)), num_rounds=1)
        return result.train_metrics_clientapp[1]["fedrot-share-found"]

    twice = {name: 2 * t if t.is_floating_point() else t for name, t in state().items()}
    used = strategy()
    distance(used, state())
    assert distance(used, twice) == pytest.approx(distance(strategy(), twice))


def test_messages_with_different_models_have_no_broadcast_model() -> None:
    class TwoModels(FedRot):
        def configure_train(self, *given: Any) -> Iterable[Message]:
            _, arrays, config, grid = given
            twice = ArrayRecord({name: 2 * t for name, t in tensors_of(arrays).items()})
            nodes = zip(grid.get_node_ids(), (arrays, twice), strict=True)
            return [Message(RecordDict({"arrays": a, "config": config}), n, "train") for n, a in nodes]

    grid = FakeGrid(dict.fromkeys((100, 101), lambda message: reply(message, state(), 10)))
    strategy = TwoModels(CONFIG, fraction_evaluate=0.0)
    with pytest.raises(FedrotError, match="hold different ArrayRecords"):
        strategy.start(grid, ArrayRecord(state()), num_rounds=1)


def test_a_message_that_the_grid_refuses_is_not_waited_for() -> None:
    class Refusing(FakeGrid):
        def push_messages(self, messages: Iterable[Message]) -> Any:
            return [None, *super().push_messages(list(messages)[1:])]

        def pull_messages(self, *given: Any, **named: Any) -> Any:
            assert None not in given[0]
            return super().pull_messages(*given, **named)

    grid = Refusing({node: lambda message: reply(message, {}, 1) for node in (100, 101)})
    messages = [Message(RecordDict(), node, "train") for node in (100, 101)]
    assert len(LazyGrid(grid).send_and_receive(messages, timeout=0.5)) == 1


def test_an_average_of_adapters_receives_the_marks_of_untrained_rows() -> None:
    base, head = adapter(0), "base_model.model.head.bias"
    mean = AdapterMean(AdapterOptions().average(SETTINGS, base, 1))
    mean.add(base, 1.0, {TRAINED: {head: torch.tensor([True, True, False, False])}, "gram": {}})
    other = {**base, head: base[head] + 8}
    mean.add(other, 3.0, {TRAINED: {head: torch.tensor([True, False, True, False])}})
    torch.testing.assert_close(mean.result()[head] - base[head], torch.tensor([6.0, 0, 8, 6]).double())


def test_without_alignment_the_marks_of_one_client_count() -> None:
    one, two, *_ = (replace(client, statistics={}) for client in honest())
    result, _ = play_clients(FedRot(CONFIG, alignment=None), [headless(one, (0,)), two])
    torch.testing.assert_close(tensors_of(result)[HEAD[1]][1:], two.update[HEAD[1]][1:])


def test_a_norm_bit_is_0_or_1() -> None:
    class Private(Aligned, DifferentialPrivacyClientSideAdaptiveClipping):
        pass

    strategy = Private(None, FedAvg(), 1.0, 3, clipped_count_stddev=10.0, alignment=None)
    sent = [
        reply(message, {"w": torch.ones(3)}, 1, i, **{KEY_NORM_BIT: bit})
        for i, (message, bit) in enumerate(zip(broadcast(strategy, ZERO, 3), (1e9, 1, 0), strict=True))
    ]
    _, metrics = strategy.aggregate_train(1, sent)
    assert metrics is not None
    assert metrics["fedrot-replies-dropped"] == 1


def test_a_reply_that_is_dropped_for_its_metrics_is_not_enough_for_min_replies() -> None:
    strategy = FedRot(alignment=None, server=Server(min_replies=3))
    sent = [
        reply(message, {"w": torch.ones(3)}, 1, i, **({"extra": 1.0} if i == 2 else {}))
        for i, message in enumerate(broadcast(strategy, ZERO, 3))
    ]
    assert strategy.aggregate_train(1, sent)[0] is None


def test_beside_a_client_that_matched_itself_the_others_keep_their_own_alignment() -> None:
    def identity(message: Message) -> Message:
        return Message(RecordDict({"fedrot-elements": ArrayRecord()}), reply_to=message)

    others = OtherBasis(options=WHOLE, at_clients=True)
    strategy = FedRot(SYMMETRY, other_basis=others)
    sent = [permuted(near(state(), 0.01, seed), seed) for seed in (1, 2, 3)]
    _, metrics = play(strategy, state(), sent, [identity, failure, failure])
    assert metrics["fedrot-replies-dropped"] == 0
    assert metrics["fedrot-replies-accepted"] == 3


def test_a_class_among_a_strategys_attributes_is_no_state() -> None:
    strategy: Any = FedRot(alignment=None)
    strategy.kind = torch.optim.SGD
    RunState(strategy, ConfigRecord(), ConfigRecord()).encoded({})
