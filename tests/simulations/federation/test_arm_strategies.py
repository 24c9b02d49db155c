"""What the strategy of a cell is made with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedrot.options import AlignmentOptions
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.arm_strategies import ArmRun, strategy_of
from fedrot.simulations.federation.store import CellRows
from fedrot.simulations.tasks.task import task_of
from fedrot.strategies import FedRot
from fedrot.strategies.client_matching import OTHER_BASIS_OPTIONS

SMALL: dict[str, Any] = {
    "train_limit": 60,
    "test_limit": 17,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "max_length": 16,
    "clients": 4,
    "seeds": 1,
}


class Made(Exception):
    """Carries the arguments of the strategy."""


def made_with(arm: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """Return what ``FedRot`` is given for an arm."""

    def given(self: FedRot, *_: Any, **given: Any) -> None:
        raise Made(given)

    monkeypatch.setattr(FedRot, "__init__", given)
    config = SimulationConfig.from_flat({**SMALL, "arms": arm, **settings})
    task = task_of(config.to_json())
    cell = ArmRun(task, 0, "same", Arm.parse(arm), CellRows(), {}, Path("unused.txt"))
    with pytest.raises(Made) as made:
        strategy_of(cell, cell.model(), Path("unused.jsonl"))
    found: dict[str, Any] = made.value.args[0]
    return found


def test_plain_aligns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = made_with("plain", monkeypatch)
    assert (given["alignment"], given["other_basis"], given["guard"]) == (None, None, None)


def test_replies_in_another_basis_are_matched_by_the_evidence_of_the_arm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {
        arm: made_with(arm, monkeypatch)
        for arm in ("aligned", "aligned~weights", "aligned~clients", "aligned~learned", "whole@running")
    }
    basis = {arm: given["other_basis"] for arm, given in found.items()}
    assert {arm: (b.model is not None, b.at_clients, b.learning_passes) for arm, b in basis.items()} == {
        "aligned": (True, False, 0),
        "aligned~weights": (False, False, 0),
        "aligned~clients": (False, True, 0),
        "aligned~learned": (False, False, 3),
        "whole@running": (True, False, 0),
    }
    assert all(given["alignment"] is not None for given in found.values())
    assert basis["aligned"].options == OTHER_BASIS_OPTIONS
    whole = found["whole@running"]
    assert basis["whole@running"].options == whole["alignment"] == Arm.parse("whole@running").options


def test_options_of_an_arm_hold_for_both_ways_to_match(monkeypatch: pytest.MonkeyPatch) -> None:
    given = made_with("aligned(layers=last:1)*0.25:loss", monkeypatch)
    assert given["alignment"] == AlignmentOptions(layers="last:1", chance=0.25)
    assert given["other_basis"].options == replace(OTHER_BASIS_OPTIONS, layers="last:1")
    assert given["guard"].metric == "loss"


def test_arms_of_some_clients_wait_for_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"fraction_train": 0.5, "holdout": 0.0}
    names = ("fraction_train", "fraction_evaluate", "min_available_nodes", "min_evaluate_nodes")
    given = made_with("plain#0+2", monkeypatch, **settings)
    assert [given[name] for name in names] == [0.5, 0.0, 2, 0]
    given = made_with("plain", monkeypatch)
    assert [given[name] for name in names] == [1.0, 1.0, 4, 1]
