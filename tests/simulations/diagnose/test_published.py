"""The rule of ``diagnose`` on the published runs: it names the better average from round 1 alone."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from fedrot.diagnosis import ALIGNED, PLAIN, WHOLE

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "diagnose.py"

#: The share of settings that has to be right.
BAR = 0.9


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def settings(benchmark: dict[str, Any]) -> list[Any]:
    return list(benchmark["published"]())


def test_every_choice_is_the_better_one_somewhere(settings: list[Any]) -> None:
    assert len(settings) == 18
    assert {one.better for one in settings} == {PLAIN, ALIGNED, WHOLE}


def test_the_better_average_is_named_in_nine_of_ten_settings(settings: list[Any]) -> None:
    right = [one.pooled.choice == one.better for one in settings]
    assert sum(right) >= BAR * len(settings)


def test_single_runs_name_it_as_often(settings: list[Any]) -> None:
    assert sum(one.agreed for one in settings) >= BAR * sum(len(one.by_seed) for one in settings)


def test_later_rounds_are_averaged_as_they_are_once_the_gain_ends(benchmark: dict[str, Any]) -> None:
    found = benchmark["by_round"]("attention+ffn@running*0")
    assert {len(choices) for choices in found.values()} == {10}
    assert set(found[1]) == {ALIGNED}
    assert all(set(found[number]) == {PLAIN} for number in range(3, 11))


def test_the_broadcast_model_as_anchor_shows_nothing(benchmark: dict[str, Any]) -> None:
    found = benchmark["by_round"]("attention+ffn@global*0")
    choices = [choice for choices in found.values() for choice in choices]
    assert len(choices) == 100
    assert choices.count(PLAIN) >= 95
