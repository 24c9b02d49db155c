"""The folder of a run: what an attempt leaves, and what the next one takes for finished."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.federation.run_folder import (
    ROW_FIELDS,
    RunFolder,
    read_alignment,
    read_results,
    read_rows,
    rows_file,
)

SETTINGS: list[dict[str, Any]] = [{"setting": "a", "rounds": 2}]


def row(arm: str, seed: int = 0, server_round: int = 1, value: float = 0.5) -> dict[str, Any]:
    about = {"setting": "a", "arm": arm, "start": "same", "seed": seed, "round": server_round}
    return {**about, "scope": "central", "metric": "loss", "value": value}


def found(arm: str, seed: int = 0) -> dict[str, Any]:
    about = {"setting": "a", "arm": arm, "start": "same", "seed": seed, "round": 1}
    return {**about, "part": "ffn", "layer": 0, "before": 2.0, "after": 1.0}


def attempt(path: Path, settings: Any = SETTINGS) -> RunFolder:
    return RunFolder(path, settings, "fedrot simulate")


def test_the_cell_that_was_written_last_is_done_again(tmp_path: Path) -> None:
    first = attempt(tmp_path)
    assert first.finished_cells == 0
    for arm, seed in (("plain", 0), ("aligned", 0), ("plain", 1)):
        for server_round in (0, 1):
            first.row(row(arm, seed, server_round))
        first.alignment(found(arm, seed))
    first.partition("a", 0, ["x", "y"], [5], [[2, 3]])
    first.close(complete=False)
    second = attempt(tmp_path)
    assert second.finished_cells == 2
    cells = [("a", seed, "same", arm) for seed in (0, 1) for arm in ("plain", "aligned")]
    assert [second.finished(*cell) for cell in cells] == [True, True, False, False]
    assert [(r["arm"], r["seed"]) for r in read_rows(tmp_path)] == [("plain", 0)] * 2 + [
        ("aligned", 0)
    ] * 2
    assert [(r["arm"], r["seed"]) for r in read_alignment(tmp_path)] == [("plain", 0), ("aligned", 0)]
    # Partitions of the first attempt stay beside new ones, and have to be the same.
    for sizes, counts in (([5], [[3, 2]]), ([6], [[2, 3]])):
        with pytest.raises(FedrotError, match="'a' with other rows for seed 0: the data have changed"):
            second.partition("a", 0, ["x", "y"], sizes, counts)
    second.partition("a", 0, ["x", "y"], [5], [[2, 3]])
    second.partition("a", 1, ["x", "y"], [5], [[4, 1]])
    held = json.loads((tmp_path / "partition.json").read_text())
    assert held["a"]["label_names"] == ["x", "y"]
    assert {seed: one["counts"] for seed, one in held["a"]["seeds"].items()} == {
        "0": [[2, 3]],
        "1": [[4, 1]],
    }
    second.close(complete=True)
    assert json.loads((tmp_path / "status.json").read_text()) == {"complete": True}
    with (tmp_path / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [tuple(line) for line in lines] == [ROW_FIELDS] * 4
    assert [line["arm"] for line in lines] == ["plain", "plain", "aligned", "aligned"]


def test_a_finished_run_and_one_of_other_settings_are_refused(tmp_path: Path) -> None:
    attempt(tmp_path).close(complete=False)
    with pytest.raises(FileExistsError, match="already holds a run"):
        attempt(tmp_path, [{**SETTINGS[0], "rounds": 3}])
    attempt(tmp_path).close(complete=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match="already holds a run"):
        attempt(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_config_of_a_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(FileExistsError, match=r"a config\.json of something else, such as a model"):
        attempt(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_values_that_are_not_finite_are_nan_when_they_are_read(tmp_path: Path) -> None:
    folder = attempt(tmp_path)
    for value in (math.nan, math.inf, 0.25):
        folder.row({**row("plain", value=value), "more": 1})
    folder.close(complete=True)
    text = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["value"] for line in text] == [None, None, 0.25]
    assert [set(json.loads(line)) for line in text] == [set(ROW_FIELDS)] * 3
    values = [one["value"] for one in read_rows(tmp_path)]
    assert [math.isnan(value) for value in values] == [True, True, False]


@pytest.mark.parametrize("name", ROW_FIELDS)
def test_a_row_of_results_without_a_field_is_no_result(name: str, tmp_path: Path) -> None:
    lines = [row("plain"), {k: v for k, v in row("aligned").items() if k != name}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if name == "setting":  # Older files have none.
        assert len(read_results(tmp_path)) == 2
    else:
        with pytest.raises(FedrotError, match=f"a row has no '{name}'"):
            read_results(tmp_path)


@pytest.mark.parametrize("name", ["start", "arm", "part", "layer", "after"])
def test_a_measured_row_without_a_field_is_no_alignment(name: str, tmp_path: Path) -> None:
    assert read_alignment(tmp_path) == []
    lost = {"arm": "aligned", "dropped": "not finite"}
    lines = [found("aligned"), lost, {k: v for k, v in found("aligned").items() if k != name}]
    (tmp_path / "alignment.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    assert read_alignment(tmp_path) == lines[:2]
    (tmp_path / "alignment.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FedrotError, match=f"a row has no '{name}'"):
        read_alignment(tmp_path)


def test_rows_end_where_a_line_is_unfinished(tmp_path: Path) -> None:
    whole = "".join(json.dumps(row("plain", seed)) + "\n" for seed in (0, 1))
    (tmp_path / "rows.jsonl").write_text(whole + '{"setting": "a", "arm"')
    assert [one["seed"] for one in read_rows(tmp_path)] == [0, 1]
    assert rows_file(tmp_path) == tmp_path / "rows.jsonl"
    assert rows_file(tmp_path, "alignment.jsonl") is None
