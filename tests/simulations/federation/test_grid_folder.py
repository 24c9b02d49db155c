"""The folder of a grid: what it takes for finished, and what it keeps when a grid grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.grid_folder import CellRows, GridFolder, cells_of
from fedrot.simulations.federation.run_folder import RunFolder, read_rows
from reproductions.report.compact import compact


def config(**changes: Any) -> SimulationConfig:
    arms = ["plain", "aligned"]
    return SimulationConfig.from_flat({"setting": "a", "rounds": 3, "seeds": 1, "arms": arms, **changes})


def row(arm: str, server_round: int, seed: int = 0, setting: str = "a") -> dict[str, Any]:
    about = {"setting": setting, "arm": arm, "start": "same", "seed": seed, "round": server_round}
    return {**about, "scope": "central", "metric": "loss", "value": 1.0}


def test_a_cell_of_a_copy_without_its_last_round_runs_again(tmp_path: Path) -> None:
    """An interrupted ``simulate`` whose second arm was in round 1 of 3."""
    run = RunFolder(tmp_path / "run", [config().model_dump(mode="json")], "fedrot simulate")
    for arm, last in (("plain", 3), ("aligned", 1)):
        for server_round in range(last + 1):
            run.row(row(arm, server_round))
    run.close(complete=False)
    folder = GridFolder(compact(run.path, tmp_path / "copy"), [config()], "fedrot compare")
    finished = {cell.arm.name: folder.finished(cell) for cell in cells_of([config()])}
    assert finished == {"plain": True, "aligned": False}
    assert {found["arm"] for found in read_rows(folder.path)} == {"plain"}


def partition(*seeds: int, rows: int = 5) -> dict[str, Any]:
    return {
        "label_names": ["x"],
        "seeds": {str(seed): {"sizes": [rows], "counts": []} for seed in seeds},
    }


def test_a_grid_that_grows_forgets_nothing(tmp_path: Path) -> None:
    first = config(seeds=[0, 1])
    folder = GridFolder(tmp_path, [first], "fedrot compare A")
    folder.partitions({"a": partition(0, 1)})
    for cell in cells_of([first]):
        folder.add(cell, CellRows([row(cell.arm.name, 3, cell.seed)]), "")
    more = [config(seeds=[3], arms=["plain", "whole"]), config(setting="b")]
    folder = GridFolder(tmp_path, more, "fedrot compare B")
    folder.partitions({"a": partition(3), "b": partition(0)})
    held = json.loads((tmp_path / "config.json").read_text())
    assert held["command"] == "fedrot compare A\nfedrot compare B"
    a, b = held["settings"]
    assert (a["seeds"], a["arms"]) == ([0, 1, 3], ["plain", "aligned", "whole"])
    assert b["setting"] == "b"
    partitions = json.loads((tmp_path / "partition.json").read_text())
    assert set(partitions["a"]["seeds"]) == {"0", "1", "3"}
    assert len(read_rows(tmp_path)) == 4
    GridFolder(tmp_path, more, "fedrot compare B")
    assert json.loads((tmp_path / "config.json").read_text())["command"].count("compare B") == 1


def test_data_that_have_changed_are_refused(tmp_path: Path) -> None:
    folder = GridFolder(tmp_path, [config()], "fedrot compare")
    folder.partitions({"a": partition(0)})
    with pytest.raises(FedrotError, match="'a' with other rows for seed 0: the data have changed"):
        folder.partitions({"a": partition(0, rows=6)})
    assert json.loads((tmp_path / "partition.json").read_text()) == {"a": partition(0)}
