"""Runs cell by cell: continued where they were left, whatever fails on the way."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from flwr.app import ArrayRecord
from rich.console import Console

from fedrot.errors import FedrotError
from fedrot.simulations.cli.experiment_commands import configs_of
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation import client_app, experiment, grid_run
from fedrot.simulations.federation.run_folder import read_alignment, read_rows
from fedrot.simulations.federation.store import CellRows, RunFolder, cells_of
from fedrot.simulations.jobs import FAILURES, Job, Machine, Outcome
from fedrot.simulations.report import run_page
from tests.simulations import commands
from tests.simulations.in_process import simulated

ROW = {"setting": "a", "arm": "plain", "start": "same", "seed": 0, "round": 3, "scope": "central"}
ROW |= {"metric": "loss", "value": 1.0}

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


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of this process have no pictures, which take longer than these runs."""
    monkeypatch.setitem(run_page.PAGE.sections, "settings", lambda run: None)


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of the grid, one cell after the other, that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "grid.toml").write_text(GRID)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(run_page.PAGE.sections, "settings", lambda run: None)
        simulated(folder / "whole", "simulate", folder / "grid.toml")
    return folder / "whole"


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


def test_a_setting_from_options_gives_the_rows_of_a_grid(whole: Path, tmp_path: Path) -> None:
    arguments = "--train-limit 120 --test-limit 20 --max-length 16"
    arguments += " --set layers=1 --set width=16 --set heads=2"
    arguments += " --clients 2 --rounds 2 --seeds 2 --arms plain,aligned,joined"
    printed = simulated(tmp_path / "options", "simulate", *arguments.split())
    rows = [row for row in lasting(whole) if row["setting"] == "one"]
    others = [{**row, "setting": "one"} for row in lasting(tmp_path / "options")]
    assert rows == others
    # A line for each cell: the headline metric and the loss.
    told = (
        r"\[1 of 6\] goemotions_ekman, iid · seed 0 · same · plain: accuracy 0\.\d{3}, loss \d\.\d{3};"
    )
    assert re.search(told + r" about \d:\d\d:\d\d left \[2 of 6\]", printed)
    assert "are finished already" not in printed
    assert "6 of 6 cells are finished already" in simulated(
        tmp_path / "options", "simulate", *arguments.split()
    )


def test_of_several_settings_the_terminal_shows_sentences_and_fedrot_report_the_tables(
    grid: Path, tmp_path: Path
) -> None:
    grid.write_text(GRID.replace(', "joined"', ""))
    out, table = tmp_path / "a run", "final round, 2 seed(s)"
    printed = simulated(out, "simulate", grid)
    assert "Alignment in 2 settings and starts" in printed
    assert table not in printed
    assert "Rows per client" not in printed
    assert printed.count("Labels: 7 classes") == 1  # Both settings have the same data.
    assert printed.count("2 clients have 60 rows each (seed 0; --dry-run shows more).") == 1
    assert re.search("2 clients have ([0-9]+) to ([0-9]+) rows each", printed)
    assert f"Tables: fedrot report '{out}'" in printed
    assert table in commands.invoke("report", out)[1]
    # Without the arm that sentences are about, there are tables.
    grid.write_text(GRID.replace('"aligned", "joined"', '"attention"'))
    assert table in simulated(tmp_path / "other", "simulate", grid)


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_terminal_finished_cells_share_a_line_and_failures_stay(
    fails: bool, grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid.write_text(GRID.replace(', "aligned", "joined"', "").replace("seeds = [0, 1]", "seeds = [0]"))
    lines = list[str]()

    class Terminal(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            lines.extend(map(str, objects))
            super().print(*objects, **options)

    if fails:
        monkeypatch.setattr(grid_run, "run_job", None)
    shown = io.StringIO()
    terminal = Terminal(file=shown, force_terminal=True, width=200)
    configs = configs_of(grid, quick=False, data_dir=None, model=None)
    expected = pytest.raises(RuntimeError, match="2 of 2 cells failed") if fails else nullcontext()
    with expected:
        grid_run.simulate(configs, tmp_path / "run", "", terminal, Machine(1))
    assert [line[:8] for line in lines if "seed 0 · " in line] == ["[1 of 2]", "[2 of 2]"] * fails
    assert ("FAILED" if fails else "[1 of 2] one · seed 0 · same · plain: accuracy") in shown.getvalue()


def test_a_terminal_shows_the_last_round_of_running_cells(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid.write_text(GRID.replace(', "aligned", "joined"', "").replace("seeds = [0, 1]", "seeds = [0]"))
    updates = list[str]()
    update = grid_run.Text.__init__

    def noted(self: Any, text: str = "", *args: Any, **options: Any) -> None:
        updates.append(text)
        update(self, text, *args, **options)

    configs = configs_of(grid, quick=False, data_dir=None, model=None)
    run = grid_run._Run(
        grid_run.RunFolder(tmp_path / "run", configs, ""),
        grid_run.cells_of(configs),
        grid_run.partitions_of(configs),
        Console(file=io.StringIO(), force_terminal=True, width=200),
    )
    for name, line in (("b", "one: round 2/3"), ("a", "two: round 0/3")):
        folder = run.store.path / "trainings" / name
        folder.mkdir(parents=True)
        (folder / experiment.PROGRESS).write_text(line)
    (run.store.path / "trainings" / "c").mkdir()  # Its first round is running.
    monkeypatch.setattr(grid_run.Text, "__init__", noted)
    run._look()
    assert updates == ["The first cells run.\ntwo: round 0/3\none: round 2/3"]


def test_what_is_finished_is_not_run_again(grid: Path, tmp_path: Path, whole: Path) -> None:
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
    assert lasting(out) == lasting(whole)


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


def test_arms_share_trainings_until_the_last_of_them(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, kept, write = tmp_path / "run", list[int](), grid_run.write_cell

    def seen(*arguments: Any) -> None:
        kept.append(len(list((out / "trainings").glob("*/*.safetensors"))))
        write(*arguments)

    monkeypatch.setattr(grid_run, "write_cell", seen)
    simulated(out, "simulate", grid)
    # Both clients' models of both rounds, trained by the first arm, are there for the next two. From
    # starts of their own clients are moved, and in the second round they train from another average.
    assert kept == [*[4, 4, 4] * 2, *[4, 6, 6] * 2]
    assert not (out / "trainings").exists()


def test_clients_that_scramble_what_they_trained_do_not_train_again(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    train = client_app._train

    def seen(job: client_app.ClientJob, arrays: ArrayRecord) -> client_app.Result:
        trained.append(job.round)
        return train(job, arrays)

    monkeypatch.setattr(client_app, "_train", seen)
    grid.write_text(GRID.replace('["different"]', '["same", "scrambled"]').replace("[0, 1]", "[0]"))
    simulated(tmp_path / "run", "simulate", grid)
    assert trained.count(1) == 2 * 2  # Clients of two settings.


def test_a_worker_that_does_not_see_the_folder_sends_the_rows(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another machine of a cluster."""
    with monkeypatch.context() as patch:
        patch.setattr(grid_run, "identity_of", lambda _: uuid4().hex)
        printed = simulated(tmp_path / "far", "simulate", grid)
    assert "[12 of 12]" in printed
    assert "Reply of client 0" in (tmp_path / "far" / "flower.log").read_text()
    simulated(tmp_path / "near", "simulate", grid)
    assert lasting(tmp_path / "far") == lasting(tmp_path / "near")


def test_cells_behind_one_whose_process_died_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that one is tried once."""
    arms = ("plain", "aligned", "joined")
    config = SimulationConfig(setting="a", arms=arms, seeds=(0,), train_limit=60, test_limit=20)
    store, tried = RunFolder(tmp_path, [config], "test"), list[list[str]]()

    def dying(jobs: list[Job], machine: Machine, tick: Any) -> Any:
        (job,) = jobs
        names = [arm for *_, arm in job.arguments[0]]
        tried.append(names)
        parts = []
        for name in names:
            if name == "aligned":
                yield job, Outcome([], "The process of the job ended: killed", died=True)
                return
            rows = CellRows([{**ROW, "arm": name, "value": value[name]}])
            parts.append((by_arm[name].name, rows, "", ""))
            store.add(by_arm[name], rows)
        yield job, Outcome(parts)

    value = {"plain": float("nan"), "joined": 1.0}
    by_arm = {cell.arm.name: cell for cell in cells_of([config])}
    monkeypatch.setattr(grid_run, "run_jobs", dying)
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    with pytest.raises(RuntimeError, match="1 of 3 cells failed"):
        grid_run._fill(store, [config], cells_of([config]), console, Machine(1))
    assert tried == [["plain", "aligned", "joined"], ["joined"]]
    assert {row["arm"] for row in read_rows(tmp_path)} == {"plain", "joined"}
    (file,) = (tmp_path / FAILURES).iterdir()
    assert file.read_text() == f"{by_arm['aligned'].title}\n\nThe process of the job ended: killed"
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("[")]
    titles = [f"[{n} of 3] {by_arm[a].title}: " for n, a in enumerate(("plain", "aligned", "joined"), 1)]
    assert all(line.startswith(title) for line, title in zip(lines, titles, strict=True))
    assert re.search(r": loss nan; about \d:\d\d:\d\d left$", lines[0])
    assert lines[2].endswith(": loss 1.000")


def test_gpus_of_a_cluster_are_not_those_of_this_machine_and_a_dry_run_writes_nothing(
    tmp_path: Path,
) -> None:
    about: dict[str, Any] = {"task": "image", "train_limit": 60, "test_limit": 20, "layers": 1}
    configs = [SimulationConfig(setting=name, seeds=(0, 1), **about) for name in ("one", "two")]
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    there = Machine(address="127.0.0.1:1", gpus=64)
    grid_run.simulate(configs, tmp_path / "run", "", console, there, dry_run=True)
    cells = 2 * 2 * len(configs[0].arms)
    assert [shown.getvalue().count(f"Rows per client: {c.setting}, seed 0") for c in configs] == [1, 1]
    assert (
        f"Dry run: {cells} cells (seed, start and arm); nothing was run or written." in shown.getvalue()
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FedrotError, match="gpus is 64 for each job"):
        grid_run.simulate(configs, tmp_path / "run", "", console, Machine(gpus=64), dry_run=True)


def test_the_longest_job_begins_first(tmp_path: Path) -> None:
    settings = {
        "seeds": (0,),
        "rounds": 3,
        "local_epochs": 0.5,
        "first_epochs": 2,
        "fraction_train": 0.5,
    }
    one = SimulationConfig(setting="a", arms=("plain", "joined", "aligned"), **settings)
    two = SimulationConfig(setting="b", arms=("whole",), partition="dirichlet:1", **settings)
    sizes = {"a": [5, 5], "b": [50, 50]}
    partitions = {name: {"seeds": {"0": {"sizes": found}}} for name, found in sizes.items()}
    cells = cells_of([one, two])
    # Epochs of three rounds, of half of the clients, and a tenth for each round; without the first one.
    whole, rest = (2 + 0.5 + 0.5) / 2 + 0.3, (0.5 + 0.5) / 2 + 0.3
    costs = grid_run._costs(cells, partitions)
    assert [costs[cell.name] for cell in cells] == pytest.approx(
        [10 * whole, 10 * whole, 10 * rest, 100 * whole]
    )
    run = grid_run._Run(RunFolder(tmp_path, [one, two], "test"), cells, partitions, Console())
    jobs = run._jobs()
    assert [[cell.arm.name for cell in own] for own in jobs.values()] == [
        ["whole"],
        ["plain", "joined", "aligned"],
    ]
    assert [job.cost for job in jobs] == pytest.approx([100 * whole, 10 * (2 * whole + rest)])


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
    assert f"has the setting 'two' with {key}" in printed
    assert cells(tmp_path / "run") == before


def test_a_run_of_another_kind_stays(grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "rows.jsonl").write_text("{}\n")
    code, printed = commands.invoke("simulate", grid, "--workers", 1, "--out", out)
    assert code == 2
    assert "has a run of another kind" in printed
    assert [file.name for file in out.iterdir()] == ["rows.jsonl"]


def test_machines_of_a_cluster_share_the_jobs(
    grid: Path, tmp_path: Path, two_nodes: str, whole: Path
) -> None:
    code, printed = commands.invoke("simulate", grid, "--ray", two_nodes, "--out", tmp_path / "run")
    assert (code, "[12 of 12]" in printed) == (0, True), printed
    assert lasting(tmp_path / "run") == lasting(whole)


def started(grid: Path, out: Path, workers: int, cells_first: int) -> subprocess.Popen[str]:
    """Return a run that has finished some cells."""
    command = [sys.executable, "-m", "fedrot", "simulate", str(grid), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--workers", str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
    )
    end = time.monotonic() + 200
    while len(list((out / "cells").glob("*.json"))) < cells_first and time.monotonic() < end:
        time.sleep(0.02)
    return process


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "--multiprocessing-fork" in child.cmdline()]


#: A signal is handled alike with one worker and with two, and a kill is not handled at all.
LONG_STOPS = [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGKILL, 1)]


@pytest.mark.parametrize(
    ("how", "workers"),
    [
        (signal.SIGTERM, 1),
        (signal.SIGINT, 2),
        (signal.SIGKILL, 2),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_STOPS),
    ],
)
def test_a_stopped_run_goes_on(
    grid: Path, tmp_path: Path, whole: Path, how: signal.Signals, workers: int
) -> None:
    """Whatever stops it: finished cells stay, no process does."""
    out = tmp_path / "run"
    process = started(grid, out, workers, cells_first=3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(workers_of(process)) == (workers if workers > 1 else 0)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # As a terminal does it: workers are in the foreground, too.
    else:
        os.kill(process.pid, how)
    printed, _ = process.communicate(timeout=200)
    assert not psutil.wait_procs(children, timeout=200)[1]
    assert process.returncode == {signal.SIGKILL: -9}.get(how, 130)
    before = cells(out)
    assert 3 <= len(before) < 12, printed
    if how != signal.SIGKILL:
        assert "Repeat the command to resume" in " ".join(printed.split())
        assert json.loads((out / "status.json").read_text()) == {"complete": False}
        assert "incomplete" in (out / "report.html").read_text()
    assert "Traceback" not in printed
    simulated(out, "simulate", grid)
    after = cells(out)
    assert {name: after[name] for name in before} == before
    assert len(after) == 12
    assert not (out / "trainings").exists()
    assert lasting(out) == lasting(whole)


def test_a_worker_that_is_killed_loses_the_cell_that_it_ran(
    grid: Path, tmp_path: Path, whole: Path
) -> None:
    out = tmp_path / "run"
    process = started(grid, out, workers=2, cells_first=1)
    workers_of(process)[0].kill()
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 1, printed
    assert "1 of 12 cells failed" in printed
    (file,) = (out / FAILURES).iterdir()
    assert "The process of the job ended" in file.read_text()
    assert len(cells(out)) == 11
    assert "11 of 12 cells are finished already" in simulated(out, "simulate", grid)
    assert not (out / FAILURES).exists()
    assert lasting(out) == lasting(whole)
