"""Grids cell by cell: continued where they were left, whatever fails on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.app import ArrayRecord

from fedrot.simulations.federation import client_app, experiment, grid_run
from fedrot.simulations.federation.run_folder import read_alignment, read_rows
from reproductions.report.compact import compact, write_parquet
from tests.simulations import commands
from tests.simulations.in_process import simulated

GRID = """
[base]
train_limit = 120
test_limit = 20
layers = 1
width = 16
heads = 2
max_length = 16
clients = 2
rounds = 2
seeds = [0, 1]
arms = ["plain", "aligned", "joined"]

[[setting]]
setting = "one"

[[setting]]
setting = "two"
partition = "dirichlet:1"
starts = ["different"]
"""


def test_a_layer_that_the_model_lacks_is_refused_before_anything_runs(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text(GRID.replace('"joined"', '"attention(layers=1)"'))
    code, printed = commands.invoke("simulate", grid, "--out", tmp_path / "run")
    assert code == 2
    assert "arm 'attention(layers=1)': Layer 1 is not in the model, which has 1" in " ".join(
        printed.split()
    )
    assert not (tmp_path / "run").exists()


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


def lasting(folder: Path) -> list[dict[str, Any]]:
    """Return the rows without wall times."""
    return [row for row in read_rows(folder) if "seconds" not in row["metric"]]


def cells(folder: Path) -> dict[str, int]:
    """Return when every cell's file was written."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "cells").glob("*.json")}


def test_cells_side_by_side_give_the_rows_of_one_after_the_other(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text(GRID.replace(', "joined"', ""))
    simulated(tmp_path / "one", "simulate", grid)
    code, printed = commands.invoke("simulate", grid, "--workers", 2, "--out", tmp_path / "many")
    assert code == 0, printed
    assert lasting(tmp_path / "one") == lasting(tmp_path / "many")
    wanted = [(s, seed, arm) for s in ("one", "two") for seed in (0, 1) for arm in ("plain", "aligned")]
    rows = lasting(tmp_path / "one")
    assert list(dict.fromkeys((r["setting"], r["seed"], r["arm"]) for r in rows)) == wanted
    assert {row["arm"] for row in read_alignment(tmp_path / "many")} == {"aligned"}
    assert json.loads((tmp_path / "many" / "status.json").read_text()) == {"complete": True}
    assert (tmp_path / "many" / "report.html").is_file()
    assert "Reply of client 0" in (tmp_path / "many" / "flower.log").read_text()


def test_a_setting_alone_gives_the_rows_of_flowers_engine(grid: Path, tmp_path: Path) -> None:
    """``fedrot simulate`` runs through the engine's interface, one arm after the other."""
    simulated(tmp_path / "grid", "simulate", grid)
    arguments = "--train-limit 120 --test-limit 20 --layers 1 --width 16 --heads 2 --max-length 16"
    arguments += " --clients 2 --rounds 2 --seeds 2 --arms plain,aligned,joined"
    simulated(tmp_path / "engine", "simulate", *arguments.split())
    rows = [row for row in lasting(tmp_path / "grid") if row["setting"] == "one"]
    others = [{**row, "setting": "one"} for row in lasting(tmp_path / "engine")]
    assert rows == others


def test_what_is_finished_is_not_run_again(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = GRID.replace("seeds = [0, 1]", "seeds = [0]").replace(', "joined"', "")
    grid.write_text(first)
    simulated(out, "simulate", grid)
    before, rows = cells(out), lasting(out)
    grid.write_text(GRID)
    assert "4 of 12 cells are finished already" in simulated(out, "simulate", grid)
    after = cells(out)
    assert len(after) == 12
    assert {name: after[name] for name in before} == before
    assert [row for row in lasting(out) if row["seed"] == 0 and row["arm"] != "joined"] == rows
    simulated(tmp_path / "whole", "simulate", grid)
    assert lasting(out) == lasting(tmp_path / "whole")


def test_a_cell_that_fails_is_shown_and_tried_again(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def broken(*_: object) -> None:
        raise ValueError("no room for the joined model")

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "train_joined", broken)
        code, printed = commands.invoke("simulate", grid, "--workers", 1, "--out", out)
    assert code == 1
    assert "4 of 12 cells failed" in printed
    files = sorted((out / "failures").iterdir())
    assert len(files) == 4
    assert printed.count("FAILED") == 4
    told = files[0].read_text()
    assert told.startswith("one · seed 0 · same · joined")
    assert "in broken" in told
    assert "no room for the joined model" in told
    assert json.loads((out / "status.json").read_text()) == {"complete": False}
    assert {row["arm"] for row in read_rows(out)} == {"plain", "aligned"}
    assert "8 of 12 cells are finished already" in simulated(out, "simulate", grid)
    assert not (out / "failures").exists()
    assert json.loads((out / "status.json").read_text()) == {"complete": True}


def test_what_a_failed_cell_trained_is_kept_until_it_succeeds(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run_alone, train = tmp_path / "run", grid_run.run_alone, client_app._train
    trained: list[int] = []

    def broken(*arguments: Any) -> Any:
        found = run_alone(*arguments)
        if arguments[3] == "aligned":
            raise ValueError("lost at the end")
        return found

    def seen(job: client_app.ClientJob, arrays: ArrayRecord) -> client_app.Result:
        trained.append(job.client)
        return train(job, arrays)

    monkeypatch.setattr(client_app, "_train", seen)
    with monkeypatch.context() as patch:
        patch.setattr(grid_run, "run_alone", broken)
        assert commands.invoke("simulate", grid, "--workers", 1, "--out", out)[0] == 1
    assert len(list((out / "trainings").glob("*/initial.json"))) == 4
    assert trained
    trained.clear()
    simulated(out, "simulate", grid)
    assert not trained
    assert not (out / "trainings").exists()
    simulated(tmp_path / "whole", "simulate", grid)
    assert trained
    assert lasting(out) == lasting(tmp_path / "whole")


def test_arms_share_trainings_until_the_last_of_them(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    run_alone = grid_run.run_alone

    def seen(*arguments: Any) -> Any:
        found = run_alone(*arguments)
        kept.append(len(list(Path(arguments[-1]).glob("*.safetensors"))))
        return found

    monkeypatch.setattr(grid_run, "run_alone", seen)
    simulated(tmp_path / "run", "simulate", grid)
    # Both clients' models of both rounds, trained by the first arm, are there for the next two. From
    # starts of their own clients are moved, and in the second round they train from another average.
    assert kept == [*[4, 4, 4] * 2, *[4, 6, 6] * 2]


def test_settings_that_train_alike_train_once(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    train = client_app._train

    def seen(job: client_app.ClientJob, arrays: ArrayRecord) -> client_app.Result:
        trained.append(job.client)
        return train(job, arrays)

    monkeypatch.setattr(client_app, "_train", seen)
    settings = '[[setting]]\nsetting = "again"\narms = ["plain/regmean"]\nrounds = 1\n' * 2
    grid.write_text(GRID.split("[[setting]]")[0] + settings.replace("again", "once", 1))
    simulated(tmp_path / "run", "simulate", grid)
    assert sorted(trained) == [0, 0, 1, 1]  # Of two seeds.
    once, again = (
        [r for r in lasting(tmp_path / "run") if r["setting"] == s] for s in ("once", "again")
    )
    assert [{**row, "setting": "again"} for row in once] == again


@pytest.mark.parametrize("change", ['partition = "dirichlet:2"', 'partition = "dirichlet:1"\nlr = 0.5'])
def test_results_of_other_settings_are_not_mixed(grid: Path, tmp_path: Path, change: str) -> None:
    simulated(tmp_path / "run", "simulate", grid)
    before = cells(tmp_path / "run")
    grid.write_text(GRID.replace('partition = "dirichlet:1"', change))
    code, printed = commands.invoke("simulate", grid, "--workers", 1, "--out", tmp_path / "run")
    assert code == 2
    key = change.splitlines()[-1].split()[0]
    assert f"holds the setting 'two' with {key}" in printed
    assert cells(tmp_path / "run") == before


def test_a_folder_from_before_a_field_existed_goes_on(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    grid.write_text(GRID.replace('arms = ["plain", "aligned", "joined"]', 'arms = ["plain"]'))
    simulated(out, "simulate", grid)
    config = json.loads((out / "config.json").read_text())
    for setting in config["settings"]:
        assert setting.pop("unseen_data") == ""
    (out / "config.json").write_text(json.dumps(config))
    before = cells(out)
    simulated(out, "simulate", grid)
    assert cells(out) == before


def test_a_compact_copy_goes_on(grid: Path, tmp_path: Path) -> None:
    """What was published can be extended: more seeds, more arms."""
    grid.write_text(GRID.replace("seeds = [0, 1]", "seeds = [0]"))
    simulated(tmp_path / "first", "simulate", grid)
    out = compact(tmp_path / "first", tmp_path / "published")
    grid.write_text(GRID)
    assert "6 of 12 cells are finished already" in simulated(out, "simulate", grid)
    assert not list(out.glob("*.parquet"))
    simulated(tmp_path / "whole", "simulate", grid)
    assert lasting(out) == lasting(tmp_path / "whole")
    copied, whole = (read_alignment(folder) for folder in (out, tmp_path / "whole"))
    assert [row.keys() for row in copied] == [row.keys() for row in whole]
    removed = ([row["before"] - row["after"] for row in rows] for rows in (copied, whole))
    np.testing.assert_allclose(*removed, rtol=1e-5, atol=1e-7)


def test_a_run_of_another_kind_stays(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "rows.jsonl").write_text("{}\n")
    copy = tmp_path / "copy"
    copy.mkdir()
    write_parquet(copy / "rows.parquet", [{"method": "vanilla", "loss": 1.0}])
    for folder, file in ((out, "rows.jsonl"), (copy, "rows.parquet")):
        code, printed = commands.invoke("simulate", grid, "--workers", 1, "--out", folder)
        assert code == 2
        assert "holds a run of another kind" in printed
        assert [file.name for file in folder.iterdir()] == [file]


#: A signal is handled alike with one worker and with two, and a kill is not handled at all.
LONG_STOPS = [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGKILL, 2)]


@pytest.mark.parametrize(
    ("how", "workers"),
    [
        (signal.SIGTERM, 1),
        (signal.SIGINT, 2),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_STOPS),
    ],
)
def test_a_stopped_grid_goes_on(grid: Path, tmp_path: Path, how: signal.Signals, workers: int) -> None:
    """Whatever stops it: finished cells stay, no process does."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fedrot", "simulate", str(grid), "--out", str(out)]
    command += ["--workers", str(workers)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + 200
    while len(list((out / "cells").glob("*.json"))) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    started = psutil.Process(process.pid).children(recursive=True)
    if how == signal.SIGKILL:
        # Ray's own watchers end on their own, after a minute or more.
        started = [one for one in started if "attempted" in one.name()]
    os.kill(process.pid, how)
    printed, _ = process.communicate(timeout=60)
    assert not psutil.wait_procs(started, timeout=60)[1]
    assert process.returncode != 0
    before = cells(out)
    assert 3 <= len(before) < 12, printed
    if how == signal.SIGINT:
        assert "Repeat the command to go on" in " ".join(printed.split())
    simulated(out, "simulate", grid)
    after = cells(out)
    assert {name: after[name] for name in before} == before
    assert len(after) == 12
    simulated(tmp_path / "whole", "simulate", grid)
    assert lasting(out) == lasting(tmp_path / "whole")
