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
def settings() -> list[Any]:
    return list(runpy.run_path(str(SCRIPT))["published"]())


def test_every_choice_is_the_better_one_somewhere(settings: list[Any]) -> None:
    assert len(settings) == 19
    assert {one.better for one in settings} == {PLAIN, ALIGNED, WHOLE}


def test_the_better_average_is_named_in_nine_of_ten_settings(settings: list[Any]) -> None:
    right = [one.pooled.choice == one.better for one in settings]
    assert sum(right) >= BAR * len(settings)


def test_single_runs_name_it_as_often(settings: list[Any]) -> None:
    assert sum(one.agreed for one in settings) >= BAR * sum(len(one.by_seed) for one in settings)
