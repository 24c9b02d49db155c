"""The folder of a run: what it takes for finished, and what it keeps when a run grows."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import ROW_FIELDS, read_alignment, read_rows, versions
from fedrot.simulations.federation.store import (
    CellRows,
    RunFolder,
    cells_of,
    identity_of,
    partitions_of,
    write_cell,
)


def config(**changes: Any) -> SimulationConfig:
    arms = ["plain", "aligned"]
    return SimulationConfig.from_flat({"setting": "a", "rounds": 3, "seeds": 1, "arms": arms, **changes})


def row(arm: str, server_round: int, seed: int = 0, setting: str = "a") -> dict[str, Any]:
    about = {"setting": setting, "arm": arm, "start": "same", "seed": seed, "round": server_round}
    return {**about, "scope": "central", "metric": "loss", "value": 1.0}


def partition(*seeds: int, rows: int = 5) -> dict[str, Any]:
    return {
        "label_names": ["x"],
        "seeds": {str(seed): {"sizes": [rows], "counts": []} for seed in seeds},
    }


def test_a_grid_that_grows_forgets_nothing(tmp_path: Path) -> None:
    first = config(seeds=[0, 1])
    folder = RunFolder(tmp_path, [first], "fedrot simulate A")
    folder.partitions({"a": partition(0, 1)})
    for cell in cells_of([first]):
        folder.add(cell, CellRows([row(cell.arm.name, 3, cell.seed)]))
    more = [config(seeds=[3], arms=["plain", "whole"]), config(setting="b")]
    folder = RunFolder(tmp_path, more, "fedrot simulate B")
    folder.partitions({"a": partition(3), "b": partition(0)})
    held = json.loads((tmp_path / "config.json").read_text())
    assert held["command"] == "fedrot simulate A\nfedrot simulate B"
    a, b = held["settings"]
    assert (a["seeds"], a["arms"]) == ([0, 1, 3], ["plain", "aligned", "whole"])
    assert b["setting"] == "b"
    partitions = json.loads((tmp_path / "partition.json").read_text())
    assert set(partitions["a"]["seeds"]) == {"0", "1", "3"}
    assert len(read_rows(tmp_path)) == 4
    RunFolder(tmp_path, more, "fedrot simulate B")
    assert json.loads((tmp_path / "config.json").read_text())["command"].count("simulate B") == 1


def test_starts_are_added_and_seeds_stay_in_the_order_they_came(tmp_path: Path) -> None:
    RunFolder(tmp_path, [config(seeds=[4, 2], starts="scrambled")], "one")
    RunFolder(tmp_path, [config(seeds=[1, 2], starts="same,scrambled", data_dir="there")], "two")
    (held,) = json.loads((tmp_path / "config.json").read_text())["settings"]
    assert (held["seeds"], held["starts"]) == ([4, 2, 1], ["scrambled", "same"])
    assert held["data_dir"] == "there"


def test_partitions_have_the_rows_of_every_client_by_setting_and_seed() -> None:
    images = {"task": "image", "train_limit": 60, "test_limit": 10, "rounds": 1, "seeds": [3, 0]}
    few, many = (
        SimulationConfig.from_flat({**images, "setting": f"of {n}", "clients": n, **more})
        for n, more in ((2, {"partition": "keyclass:1"}), (4, {}))
    )
    found = partitions_of([few, many])
    assert {name: [*own["seeds"]] for name, own in found.items()} == {
        "of 2": ["3", "0"],
        "of 4": ["3", "0"],
    }
    for name, clients in (("of 2", 2), ("of 4", 4)):
        assert found[name]["label_names"] == [str(digit) for digit in range(10)]
        for own in found[name]["seeds"].values():
            assert own["sizes"] == [sum(counts) for counts in own["counts"]]
            assert (len(own["sizes"]), sum(own["sizes"])) == (clients, 60)
    one, other = found["of 4"]["seeds"].values()
    assert one != other


def test_data_that_have_changed_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, [config()], "fedrot simulate")
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
    folder = RunFolder(tmp_path, [config()], "fedrot simulate")
    plain, aligned = cells_of([config()])
    measured = {"setting": "a", "arm": "aligned", "start": "same", "seed": 0, "dropped": "NaN"}
    folder.add(aligned, CellRows([row("aligned", 3)], [measured]), "one line\n")
    folder.publish(aligned)
    assert [found["arm"] for found in read_rows(tmp_path)] == ["aligned"]
    assert read_alignment(tmp_path) == [measured]
    assert (folder.finished(aligned), folder.finished(plain)) == (True, False)
    folder.add(plain, CellRows([row("plain", 3)]))
    folder.publish(plain)
    assert [found["arm"] for found in read_rows(tmp_path)] == ["aligned", "plain"]
    folder.close(complete=True)
    assert [found["arm"] for found in read_rows(tmp_path)] == ["plain", "aligned"]
    assert json.loads((tmp_path / "status.json").read_text()) == {"complete": True}
    assert json.loads((tmp_path / "versions.json").read_text()) == versions()
    assert "a · seed 0 · same · aligned\none line\n" in (tmp_path / "flower.log").read_text()
    # Cells of an earlier grid come after those of this one; the folder of data may have moved.
    later = config(arms=["whole", "aligned"], data_dir="elsewhere")
    folder = RunFolder(tmp_path, [later], "fedrot simulate")
    folder.add(cells_of([later])[0], CellRows([row("whole", 3)]))
    folder.close(complete=True)
    assert [found["arm"] for found in read_rows(tmp_path)] == ["whole", "aligned", "plain"]
    with pytest.raises(FedrotError, match=r"has the setting 'a' with lr 0\.001, not 0\.5"):
        RunFolder(tmp_path, [config(lr=0.5)], "fedrot simulate")


def test_a_worker_writes_a_cell_where_it_sees_the_folder(tmp_path: Path) -> None:
    store = RunFolder(tmp_path / "run", [config()], "fedrot simulate")
    plain, aligned = cells_of([config()])
    write_cell(store.path, plain, CellRows([row("plain", 3)]), "of the worker\n")
    store.add(plain, CellRows([row("plain", 2)]), "of the parent\n")
    store.add(aligned, CellRows([row("aligned", 3)]), "of the parent\n")
    assert (store.path / "flower.log").read_text() == (
        f"{plain.title}\nof the worker\n{aligned.title}\nof the parent\n"
    )
    assert [store.publish(cell)[0]["round"] for cell in (plain, aligned)] == [3, 3]
    # A folder of the same path on another machine is of another run, or not there.
    other = RunFolder(tmp_path / "other", [config(lr=0.5)], "fedrot simulate")
    found = [identity_of(path) for path in (store.path, other.path, tmp_path / "nowhere")]
    assert len(set(found)) == 3
    assert identity_of(store.path) == found[0]


def test_values_that_are_not_finite_are_nan_when_they_are_read(tmp_path: Path) -> None:
    store = RunFolder(tmp_path, [config()], "fedrot simulate")
    cell, found = cells_of([config()])[0], CellRows()
    for value in (math.nan, math.inf, 0.25):
        found.row({**row("plain", 3), "value": value, "more": 1})
    store.add(cell, found)
    store.close(complete=True)
    text = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["value"] for line in text] == [None, None, 0.25]
    assert [set(json.loads(line)) for line in text] == [set(ROW_FIELDS)] * 3
    values = [one["value"] for one in read_rows(tmp_path)]
    assert [math.isnan(value) for value in values] == [True, True, False]


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    store = RunFolder(tmp_path, [config()], "fedrot simulate")
    cell = cells_of([config()])[0]
    store.add(cell, CellRows([row("plain", 3)]))
    for content, lacking in (
        ('{"rows": [3], "alignment": []}', "rows"),
        ('{"alignment": []}', "rows"),
        ('{"rows": []}', "alignment"),
        ('{"rows": [], "alignment": {}}', "alignment"),
    ):
        (tmp_path / "cells" / f"{cell.name}.json").write_text(content)
        with pytest.raises(FedrotError, match=f"{cell.name}.json' is damaged: it has no {lacking}"):
            RunFolder(tmp_path, [config()], "fedrot simulate")
