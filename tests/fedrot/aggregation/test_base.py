"""The base class of aggregators: what it gives, and what is no aggregator."""

import pytest
import torch

from fedrot import FedrotError
from fedrot.aggregation import Aggregator, Fisher, Mean, RegMean, register_aggregation
from fedrot.aggregation.registry import _ENTRIES


class Last(Aggregator):
    """The last update."""

    def add(self, update, weight, statistics=None):
        self.last = dict(update)

    def result(self):
        return self.last


class Doubled(Mean):
    """Twice the mean."""

    def result(self, device=None):
        return {name: 2 * tensor for name, tensor in super().result(device).items()}


def test_a_subclass_needs_add_and_result_alone():
    last = Last()
    last.fold_parts([{"a": torch.ones(1)}, {"b": torch.zeros(1)}], 2.0)
    assert last.release() == last.result() == last.last
    assert last.last.keys() == {"a", "b"}
    assert (last.needs, last.streams, last.notes) == ((), False, {})
    assert (last.sentence, last.measured) == ("", {})


def test_only_the_mean_itself_streams():
    assert Mean.streams
    assert not any(cls.streams for cls in (Fisher, RegMean, Doubled))
    doubled = Doubled()
    doubled.add({"w": torch.ones(2)}, 1.0)
    assert doubled.release()["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("other", [dict, type("Duck", (), {"add": 1, "result": 1}), 3])
def test_another_class_is_refused_when_it_is_registered(other):
    with pytest.raises(FedrotError, match=r"subclass fedrot\.aggregation"):
        register_aggregation("other", "no aggregator")(other)
    assert "other" not in _ENTRIES
