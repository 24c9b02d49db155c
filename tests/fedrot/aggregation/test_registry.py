"""Aggregations by name: what they need, errors for unknown names, arguments from
outside.
"""

from importlib import import_module
from itertools import count

import pytest

from fedrot import FedrotError
from fedrot.aggregation import Fisher, Mean, RegMean, aggregation_named, aggregations
from fedrot.aggregation.registry import _ENTRIES, register_aggregation

CLASSES = {"mean": Mean, "fisher": Fisher, "regmean": RegMean}


def test_every_aggregation_has_a_name_and_says_what_it_needs():
    ours = {entry.name: entry for entry in aggregations(())}
    assert {name: entry.build for name, entry in ours.items()} == CLASSES
    assert {name: entry.needs for name, entry in ours.items()} == {
        "mean": (),
        "fisher": ("fisher",),
        "regmean": ("gram",),
    }
    assert [name for name, entry in ours.items() if not entry.follows_rotations] == [
        "fisher"
    ]
    for name, entry in ours.items():
        package, _, attribute = entry.path.rpartition(".")
        assert package == "fedrot.aggregation"
        assert getattr(import_module(package), attribute) is type(
            aggregation_named(name)()
        )


def test_aggregations_of_users_get_the_arguments_that_they_take():
    class Median(Mean):
        def __init__(self, symmetry, score=None):
            super().__init__()
            self.given = symmetry, score

    def unwanted():
        raise AssertionError("this aggregation does not take the argument")

    numbers = count()
    try:
        register_aggregation("median", "the median")(Median)
        (entry,) = set(aggregations(("symmetry",))) - set(aggregations(()))
        assert entry in aggregations()
        assert (entry.inputs, entry.meaning) == (("symmetry",), "the median")
        assert entry.path == f"{__name__}.Median"
        with pytest.raises(FedrotError, match="argument 'symmetry'"):
            aggregation_named("median", score=unwanted)
        build = aggregation_named(
            "median", symmetry=lambda: next(numbers), alpha=unwanted
        )
        # Arguments are computed for every aggregator anew.
        assert [build().given for _ in range(2)] == [(0, None), (1, None)]
    finally:
        del _ENTRIES["median"]


def test_a_name_that_builds_nothing_is_an_error():
    with pytest.raises(FedrotError, match="mean, fisher, regmean"):
        aggregation_named("median")
