"""The folder of a grid: what it takes for finished, and what it keeps when a grid grows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.grid_folder import CellRows, GridFolder, cells_of
from fedrot.simulations.federation.grid_run import _jobs
from fedrot.simulations.federation.run_folder import RunFolder, read_alignment, read_rows
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
    folder = GridFolder(compact(run.path, tmp_path / "copy"), [config()], "fedrot simulate")
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
    folder = GridFolder(tmp_path, [first], "fedrot simulate A")
    folder.partitions({"a": partition(0, 1)})
    for cell in cells_of([first]):
        folder.add(cell, CellRows([row(cell.arm.name, 3, cell.seed)]), "")
    more = [config(seeds=[3], arms=["plain", "whole"]), config(setting="b")]
    folder = GridFolder(tmp_path, more, "fedrot simulate B")
    folder.partitions({"a": partition(3), "b": partition(0)})
    held = json.loads((tmp_path / "config.json").read_text())
    assert held["command"] == "fedrot simulate A\nfedrot simulate B"
    a, b = held["settings"]
    assert (a["seeds"], a["arms"]) == ([0, 1, 3], ["plain", "aligned", "whole"])
    assert b["setting"] == "b"
    partitions = json.loads((tmp_path / "partition.json").read_text())
    assert set(partitions["a"]["seeds"]) == {"0", "1", "3"}
    assert len(read_rows(tmp_path)) == 4
    GridFolder(tmp_path, more, "fedrot simulate B")
    assert json.loads((tmp_path / "config.json").read_text())["command"].count("simulate B") == 1


def test_data_that_have_changed_are_refused(tmp_path: Path) -> None:
    folder = GridFolder(tmp_path, [config()], "fedrot simulate")
    folder.partitions({"a": partition(0)})
    with pytest.raises(FedrotError, match="'a' with other rows for seed 0: the data have changed"):
        folder.partitions({"a": partition(0, rows=6)})
    assert json.loads((tmp_path / "partition.json").read_text()) == {"a": partition(0)}


def test_cells_share_a_first_training_where_nothing_that_decides_it_differs() -> None:
    def first(**changes: Any) -> Any:
        (cell,) = cells_of([config(arms=["plain"], **changes)])
        return cell.trains_first

    own = first()
    # Clients scramble what they have trained.
    for same in ({"setting": "b"}, {"starts": "scrambled"}):
        assert first(**same) == own
    others: tuple[dict[str, Any], ...] = (
        *({"seeds": (1,)}, {"starts": "different"}, {"local_epochs": 2}, {"rounds": 2}, {"lr": 0.5}),
    )
    assert len({own, *(first(**other) for other in others)}) == 1 + len(others)


def test_names_of_cells_are_of_their_own_and_short() -> None:
    settings = [config(setting=name) for name in ("a b", "a-b", "a, b", "x" * 300, "x" * 299 + "y")]
    names = [cell.name for cell in cells_of(settings)]
    assert len({name.casefold() for name in names}) == 2 * len(settings)
    assert all(len(name) < 120 and re.fullmatch(r"[\w.-]+", name) for name in names)


def test_rows_are_there_at_once_and_in_the_end_in_the_order_of_the_grid(tmp_path: Path) -> None:
    folder = GridFolder(tmp_path, [config()], "fedrot simulate")
    plain, aligned = cells_of([config()])
    measured = {"setting": "a", "arm": "aligned", "start": "same", "seed": 0, "dropped": "NaN"}
    folder.add(aligned, CellRows([row("aligned", 3)], [measured]), "one line\n")
    assert [found["arm"] for found in read_rows(tmp_path)] == ["aligned"]
    assert read_alignment(tmp_path) == [measured]
    assert (folder.finished(aligned), folder.finished(plain)) == (True, False)
    folder.add(plain, CellRows([row("plain", 3)]), "")
    assert [found["arm"] for found in read_rows(tmp_path)] == ["aligned", "plain"]
    folder.close(complete=True)
    assert [found["arm"] for found in read_rows(tmp_path)] == ["plain", "aligned"]
    assert (tmp_path / "rows.csv").read_text().count("\n") == 3
    assert "a · seed 0 · same · aligned\none line\n" in (tmp_path / "flower.log").read_text()
    # Cells of an earlier grid come after those of this one; the folder of data may have moved.
    later = config(arms=["whole", "aligned"], data_dir="elsewhere")
    folder = GridFolder(tmp_path, [later], "fedrot simulate")
    folder.add(cells_of([later])[0], CellRows([row("whole", 3)]), "")
    folder.close(complete=True)
    assert [found["arm"] for found in read_rows(tmp_path)] == ["whole", "aligned", "plain"]
    with pytest.raises(FedrotError, match=r"holds the setting 'a' with lr 0\.001, not 0\.5"):
        GridFolder(tmp_path, [config(lr=0.5)], "fedrot simulate")


def test_the_first_arm_trains_for_those_that_wait_for_it(tmp_path: Path) -> None:
    settings = {"local_epochs": 0.5, "first_epochs": 2, "fraction_train": 0.5}
    one = config(arms=["plain", "joined", "aligned"], seeds=[0, 1], **settings)
    two = config(setting="b", arms=["whole"], partition="dirichlet:1", **settings)
    partitions = {"a": partition(0, 1, rows=100), "b": partition(0, rows=10)}
    cells = cells_of([one, two])
    jobs = {job.name: job for job in _jobs(cells, partitions, tmp_path)}
    assert [*jobs] == [cell.name for cell in cells]
    names = {(cell.config.setting, cell.seed, cell.arm.name): cell.name for cell in cells}
    waits = {key: jobs[name].after for key, name in names.items() if jobs[name].after}
    assert waits == {("a", seed, "aligned"): names["a", seed, "plain"] for seed in (0, 1)}
    # Epochs of three rounds, of half of the clients, and a tenth for each round; without the first one.
    whole, rest = (2 + 0.5 + 0.5) / 2 + 0.3, (0.5 + 0.5) / 2 + 0.3
    assert jobs[names["a", 0, "plain"]].cost == pytest.approx(100 * whole)
    assert jobs[names["a", 1, "joined"]].cost == pytest.approx(100 * whole)
    assert jobs[names["a", 0, "aligned"]].cost == pytest.approx(100 * rest)
    assert jobs[names["b", 0, "whole"]].cost == pytest.approx(10 * whole)
    caches = {key: jobs[name].arguments[-1] for key, name in names.items()}
    assert caches["a", 0, "plain"] == caches["a", 0, "aligned"]
    assert len(set(caches.values())) == 3
    assert all(Path(cache).is_dir() for cache in caches.values())
