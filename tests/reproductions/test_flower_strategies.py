"""Flower's strategies as arms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reproductions.flower_strategies  # noqa: F401
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.grid_run import run_job
from tests.reproductions.test_task_heads import SMALL

#: Arms that are FedAvg by their arguments, and arms that are not.
SAME = ("fedavgm(server_momentum=0)", "fedprox(proximal_mu=0)")
OTHERS = ("fedavgm", "fedadam", "fedprox(proximal_mu=20)")


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    """The loss after every round, by arm."""
    config = SimulationConfig(**{**SMALL, "rounds": 2})
    names = ("plain", *SAME, *OTHERS)
    told = [(config.to_json(), 0, "same", name) for name in names]
    found = {}
    for name, (_, rows, _, failure) in zip(names, run_job(told, Path("nowhere"), "none"), strict=True):
        assert not failure
        own = (r for r in rows.rows if (r["scope"], r["metric"]) == ("central", "loss"))
        found[name] = [row["value"] for row in own]
    return found


@pytest.mark.parametrize("name", SAME)
def test_without_their_own_step_they_are_fedavg(name: str, losses: dict[str, list[float]]) -> None:
    assert losses[name] == pytest.approx(losses["plain"], rel=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_their_arguments_reach_them(name: str, losses: dict[str, list[float]]) -> None:
    assert losses[name][0] == losses["plain"][0]
    assert losses[name][2] != pytest.approx(losses["plain"][2], rel=1e-3)


def test_flowers_momentum_begins_in_the_second_round(losses: dict[str, list[float]]) -> None:
    assert losses["fedavgm"][1] == pytest.approx(losses["plain"][1], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("fedavgm", {"server_momentum": 0.9, "server_learning_rate": 1.0}),
        ("fedavgm(server_momentum=0.5)", {"server_momentum": 0.5, "server_learning_rate": 1.0}),
        ("fedadam(eta=0.3)", {"eta": 0.3, "tau": 0.001}),
        ("fedprox", {"proximal_mu": 0.1}),
    ],
)
def test_names_give_arguments(name: str, given: dict[str, float]) -> None:
    arm: Any = Arm.parse(name)
    assert (arm.name, arm.align, dict(arm.given)) == (name, False, given)


def test_arguments_of_others_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown argument 'eta'; one of proximal_mu"):
        Arm.parse("fedprox(eta=1)")
