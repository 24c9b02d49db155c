"""A task head that is fitted after every round, for the evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import reproductions.task_heads
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.grid_run import run_job

SMALL: dict[str, Any] = {
    "task": "image",
    "train_limit": 400,
    "test_limit": 60,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "clients": 2,
    "holdout": 0.3,
    "rounds": 3,
    "lr": 0.01,
    "seeds": (0,),
}


def test_the_name_is_that_of_an_arm_and_more() -> None:
    arm = Arm.parse("aligned:loss+task-head-measured")
    assert (arm.guard, arm.fits_task_head, arm.chooses) == ("loss", True, True)
    assert arm.strategy is reproductions.task_heads.Measured
    assert arm.name == "aligned:loss+task-head-measured"


def test_a_head_that_is_measured_does_not_reach_the_clients() -> None:
    config = SimulationConfig(**SMALL)
    names = ("plain", "plain+task-head", "plain+task-head-measured")
    told = [(config.to_json(), 0, "same", name) for name in names]
    found = {}
    for name, (_, rows, _, failure) in zip(names, run_job(told, Path("nowhere"), "none"), strict=True):
        assert not failure
        central = [row for row in rows.rows if row["scope"] == "central"]
        found[name] = {(row["round"], row["metric"]): row["value"] for row in central}
        kept = [row["round"] for row in rows.rows if row["metric"] == "kept"]
        assert kept == {"plain": [], "plain+task-head": [3]}.get(name, [1, 2, 3])
        clients = [row["value"] for row in rows.rows if row["metric"] == "train-loss"]
        assert found.setdefault("train-loss", clients) == clients
    plain, last, measured = (found[name] for name in names)
    assert all(measured[place] == last[place] for place in last if place[0] == 3)
    assert all(measured[place] == plain[place] for place in plain if place[0] == 0)
    assert all(measured[number, "loss"] < plain[number, "loss"] for number in (1, 2))
