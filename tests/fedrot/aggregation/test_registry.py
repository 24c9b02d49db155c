"""Aggregations and statistic kinds by name: one error for unknown names, arguments from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedrot
from fedrot.aggregation import (
    Fisher,
    Mean,
    RegMean,
    aggregation_named,
    aggregations,
    check_statistics,
)
from fedrot.collect.statistics import STATISTIC_KINDS, kind_named, transport_statistics

CLASSES = {
    "mean": Mean,
    "fisher": Fisher,
    "regmean": RegMean,
}


def test_every_aggregation_has_a_name_and_says_what_it_needs() -> None:
    ours = [entry for entry in aggregations() if entry.build.__module__.startswith("fedrot.")]
    assert {entry.name: entry.build for entry in ours} == CLASSES
    needs = {entry.name: entry.needs for entry in ours if entry.needs}
    assert needs == {"fisher": ("fisher",), "regmean": ("gram",)}
    assert not any(entry.inputs for entry in ours)
    assert [entry.name for entry in ours if not entry.follows_rotations] == ["fisher"]
    for entry in ours:
        package, name = entry.path.rsplit(".", 1)
        assert getattr(fedrot, package.removeprefix("fedrot.")).__dict__[name] is CLASSES[entry.name]


def test_aggregations_are_found_by_what_can_be_given() -> None:
    assert [e.name for e in aggregations(())] == ["mean", "fisher", "regmean"]


@pytest.mark.parametrize("name", ["mean", "fisher", "regmean"])
def test_a_name_builds_a_new_aggregator_every_time(name: str) -> None:
    build = aggregation_named(name)
    first, second = build(), build()
    assert type(first) is type(second) is CLASSES[name]
    assert first is not second


def test_arguments_are_computed_for_the_aggregations_that_take_them() -> None:
    def unwanted() -> Any:
        raise AssertionError("this aggregation does not take the argument")

    asked: list[float] = []

    def alpha() -> float:
        asked.append(0.5)
        return asked[-1]

    build = aggregation_named("regmean", alpha=alpha, symmetry=unwanted, score=unwanted)
    assert not asked
    found = build()
    assert isinstance(found, RegMean)
    assert found.alpha == 0.5
    build()
    assert len(asked) == 2


def test_a_name_that_builds_nothing_is_an_error() -> None:
    with pytest.raises(fedrot.FedrotError, match="'median'; choose from mean, fisher, regmean"):
        aggregation_named("median")


def test_an_unknown_kind_is_one_error_everywhere() -> None:
    given = {"hessian": {"fc": torch.ones(2)}}
    message = f"Unknown statistics 'hessian'; known kinds: {', '.join(STATISTIC_KINDS)}."
    for refuse in (
        lambda: kind_named("hessian"),
        lambda: check_statistics(given, {"fc": (2,)}),
        lambda: transport_statistics(given, (), {"fc": (2,)}),
        lambda: Mean().add({"fc": torch.ones(2)}, 1.0, given),
    ):
        with pytest.raises(fedrot.UpdateError) as raised:
            refuse()
        assert str(raised.value) == message


def test_kinds_are_collected_with_and_without_their_limit() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    batches = [{"input": torch.full((1, 2), float(i))} for i in range(102)]
    gram = kind_named("gram")
    limited, all_of_them = (gram.collected(model, batches, limited=flag) for flag in (True, False))
    for found, count in ((limited, 100), (all_of_them, 102)):
        expected = sum(i**2 for i in range(count)) / count
        assert float(found["gram"]["0.weight"][0, 1]) == pytest.approx(expected)


def test_kinds_that_are_not_computed_from_batches_say_so() -> None:
    for name in ("gram_conv1d", "trained"):
        with pytest.raises(fedrot.FedrotError, match=f"'{name}' cannot be computed from batches"):
            kind_named(name).collected(nn.Linear(2, 2), [])
