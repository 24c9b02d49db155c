"""The names and shapes of a reply are checked at the door, and nowhere else."""

import sys

import pytest
import torch

import fedrot
from fedrot import tensors
from fedrot.strategies import FedRot, from_arrays
from fedrot.strategies.round import inbox
from fedrot.strategies.wire import arrays
from tests.models import config_of, near
from tests.strategies.classifier import NAME, state
from tests.strategies.fakes import broadcast, reply, tensors_of

COUNT = 4


@pytest.fixture
def checked(monkeypatch):
    """Collect what every module of fedrot gives to ``check_update``."""
    original = tensors.check_update
    calls = []

    def noting(update, shapes):
        calls.append(update)
        original(update, shapes)

    for name, module in list(sys.modules.items()):
        if name.startswith("fedrot") and vars(module).get("check_update") is original:
            monkeypatch.setattr(module, "check_update", noting)
    return calls


@pytest.mark.parametrize("anchor", ["global", "running"])
def test_a_reply_is_checked_once_and_the_broadcast_once_a_round(anchor, checked):
    options = fedrot.AlignmentOptions(anchor=anchor)
    strategy = FedRot(config_of(NAME), alignment=options)
    messages = broadcast(strategy, state(), COUNT)
    sent = [reply(m, near(state(), 0.05, i), 10, i) for i, m in enumerate(messages)]
    checked.clear()
    result, metrics = strategy.aggregate_train(1, sent)
    assert result is not None
    assert metrics is not None
    assert metrics["fedrot-replies-accepted"] == COUNT
    assert len(checked) == COUNT + 1


def test_names_and_shapes_are_checked_before_any_array_is_decoded(
    monkeypatch,
):
    decoded = []
    original = arrays.decode

    def noting(name, array, *of):
        decoded.append(name)
        return original(name, array, *of)

    monkeypatch.setattr(arrays, "decode", noting)
    model = {"a": torch.ones(2), "b": torch.ones(3)}
    schema = inbox.Schema(model)
    for wrong in (
        {"a": torch.ones(2)},
        {**model, "more": torch.ones(1)},
        {**model, "b": torch.ones(4)},
        {**model, "b": torch.ones(3).long()},
    ):
        with pytest.raises(fedrot.UpdateError):
            schema.read(fedrot.strategies.to_arrays(wrong), copy=True)
    assert decoded == []
    good = schema.read(fedrot.strategies.to_arrays(model), copy=True)
    assert decoded == ["a", "b"]
    assert all(torch.equal(good[name], tensor) for name, tensor in model.items())


class Structural:
    """Has two of an aggregator's members."""

    needs = ()

    def add(self, update, weight, statistics=None):
        """Add nothing."""


def test_an_aggregation_that_is_no_aggregator_is_refused():
    with pytest.raises(fedrot.FedrotError, match="subclass"):
        FedRot(alignment=None, aggregation=Structural)  # type: ignore[arg-type]


def test_updates_with_marks_are_averaged_from_the_first_mark_on():
    """Whichever client has marked its rows, the result is the same."""
    model = {"w": torch.zeros(2, 3)}
    trained = {"w": torch.tensor([True, False])}
    record = fedrot.strategies.statistics_record({"trained": trained})
    results = []
    for marked in range(3):
        strategy = FedRot(alignment=None)
        messages = broadcast(strategy, model, 3)
        sent = []
        for place, message in enumerate(messages):
            answer = reply(message, {"w": torch.full((2, 3), float(place))}, 1, place)
            if place == marked:
                answer.content["fedrot-statistics"] = record
            sent.append(answer)
        result, _ = strategy.aggregate_train(1, sent)
        assert result is not None
        results.append(from_arrays(result)["w"])
        others = [place for place in range(3) if place != marked]
        expected = torch.tensor([1.0, sum(others) / 2])
        assert torch.allclose(results[-1], expected[:, None].expand(2, 3))
    assert len(results) == len({tuple(r[1].tolist()) for r in results})
    assert tensors_of(result).keys() == model.keys()
