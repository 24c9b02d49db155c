"""A task head that is fitted after every round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reproductions.task_heads
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation import arm_strategies
from fedrot.simulations.federation.grid_run import run_job
from tests.strategies.fakes import tensors_of

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


def test_clients_go_on_from_the_head_of_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[Any] = []
    real, configure = arm_strategies.fit_task_head, arm_strategies.CellStrategy.configure_train
    broadcast: list[Any] = []

    def noting(grid: Any, arrays: Any, *args: Any, **kwargs: Any) -> Any:
        fits.append(real(grid, arrays, *args, **kwargs))
        return fits[-1]

    def configured(self: Any, server_round: int, arrays: Any, *args: Any) -> Any:
        broadcast.append(tensors_of(arrays))
        return configure(self, server_round, arrays, *args)

    monkeypatch.setattr(arm_strategies, "fit_task_head", noting)
    monkeypatch.setattr(arm_strategies.CellStrategy, "configure_train", configured)
    config = SimulationConfig(**SMALL)
    told = [(config.to_json(), 0, "same", "plain+task-head-each-round")]
    ((_, rows, _, failure),) = run_job(told, Path("nowhere"), "of no folder here")
    assert not failure
    assert len(fits) == len(broadcast) == 3
    for fit, received in zip(fits[:2], broadcast[1:], strict=True):
        sent = tensors_of(fit.arrays)
        assert all(torch.equal(received[tensor], value) for tensor, value in sent.items())
    kept = [row["round"] for row in rows.rows if row["metric"] == "kept"]
    assert kept == [1, 2, 3]


def test_the_name_is_that_of_an_arm_and_more() -> None:
    arm = Arm.parse("aligned:loss+task-head-each-round")
    assert (arm.guard, arm.fits_task_head, arm.chooses) == ("loss", True, True)
    assert arm.strategy is reproductions.task_heads.EachRound
    assert arm.name == "aligned:loss+task-head-each-round"


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
