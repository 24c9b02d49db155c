"""Whole runs: stopped and repeated, on two engines, failing, estimated, told while they run."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from rich.console import Console

from fedrot.errors import FedrotError
from fedrot.simulations import simulate as runs
from fedrot.simulations.checks import checked, costs_of, estimate, in_words
from fedrot.simulations.engine import Ended, Job, Machine
from fedrot.simulations.federation.cells import RUNS, Cell, cells_of
from fedrot.simulations.folder import RunFolder, read_run
from fedrot.simulations.report import pages
from fedrot.simulations.settings import Experiment
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task, task_of
from tests.simulations.commands import SMALL, invoke, settings, simulated
from tests.simulations.tasks.cases import SIZES, save

FILE = """
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
strategies = ["fedavg", "aligned", "head_only"]

[[experiment]]
name = "one"

[[experiment]]
name = "two"
partition = "dirichlet:1"
start = "different"
"""
#: Experiments, seeds and strategies.
CELLS = 2 * 2 * 3


def _bare_page(path: Path, *_: Any, **__: Any) -> Path:
    """Write a page without pictures, which take longer than these runs."""
    path.write_text("page")
    return path


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "write_page", _bare_page)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, one cell after the other, that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "two.toml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "write_page", _bare_page)
        printed = invoke("simulate", folder / "two.toml", "--workers", 1, "--out", folder / "run")[1]
    (folder / "run" / "printed.txt").write_text(printed)
    return folder / "run"


def lasting(folder: Path) -> list[dict[str, Any]]:
    """Return the rows without durations."""
    return [row for row in read_run(folder).rows if not row["metric"].startswith("seconds-")]


def files(folder: Path) -> dict[str, int]:
    """Return when every result was written."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "cells").glob("*.json")}


def complete(folder: Path, whole: Path) -> None:
    """A folder has the rows of the whole run, and nothing of running jobs."""
    assert lasting(folder) == lasting(whole)
    assert read_run(folder).alignment == read_run(whole).alignment
    assert read_run(folder).missing == []
    names = {path.name for path in folder.iterdir()} - {"printed.txt"}
    assert names == {*("cells", "config.json", "rows.csv", "report.html")}
    assert not [*folder.glob("cells/*.txt")]


# One whole run


def test_a_run_says_what_it_does_and_keeps_all_of_it(whole: Path) -> None:
    printed, run = (whole / "printed.txt").read_text(), read_run(whole)
    complete(whole, whole)
    assert len(files(whole)) == CELLS
    order = [(row["experiment"], row["seed"], row["strategy"]) for row in run.rows]
    names = ("fedavg", "aligned", "head_only")
    wanted = [(e, seed, name) for e in ("one", "two") for seed in (0, 1) for name in names]
    assert [*dict.fromkeys(order)] == wanted
    # A line for each part with the metrics of the last round, and before them data and an estimate.
    lines = re.findall(r"\[(\d+) of 12\] (\S+) · seed (\d) · (\w+): accuracy (0\.\d{3})", printed)
    assert [int(number) for number, *_ in lines] == [*range(1, CELLS + 1)]
    last = {
        (row["experiment"], str(row["seed"]), row["strategy"]): f"{row['value']:.3f}"
        for row in run.rows
        if (row["scope"], row["round"], row["metric"]) == ("central", 2, "accuracy")
    }
    assert {tuple(place): value for _, *place, value in lines} == last
    assert re.search(r"This takes about \d+ s in 1 process with \d+\.\d GB", printed)
    assert printed.count("120 training rows and 20 test rows, 7 classes.") == 1
    assert re.search(r"Always '\w+' would have accuracy 0\.\d{3}\.", printed)
    assert printed.count("2 clients have 60 rows each (seed 0).") == 1
    assert f"Report: {whole / 'report.html'}" in printed
    cell = json.loads(next((whole / "cells").glob("*seed-1-al*")).read_text())
    assert cell["title"].endswith("seed 1 · aligned")
    assert "[ROUND 2/2]" in cell["log"]


def test_options_give_the_rows_of_a_file_and_what_is_finished_is_not_run_again(
    tmp_path: Path, whole: Path
) -> None:
    out = tmp_path / "run"
    values = {
        **SMALL,
        "train_limit": 120,
        "test_limit": 20,
        "width": 16,
        "max_length": 16,
        "name": "one",
    }
    values |= {"clients": 2, "rounds": 2}
    simulated(out, {**values, "seeds": 1, "strategies": "fedavg,aligned"})
    before, rows = files(out), lasting(out)
    printed = simulated(out, {**values, "seeds": 2, "strategies": "fedavg,aligned,head_only"})
    assert "2 of 6 results are there already." in printed
    after = files(out)
    assert {name: after[name] for name in before} == before
    assert [row for row in lasting(out) if row["seed"] == 0 and row["strategy"] != "head_only"] == rows
    assert lasting(out) == [row for row in lasting(whole) if row["experiment"] == "one"]
    assert len(read_run(out).commands) == 1  # The tests' command line is the same.
    # Other values of a setting are refused, and nothing changes.
    code, said = invoke("simulate", "--out", out, *settings({**values, "lr": 0.5}))
    assert (code, "another lr (0.001). Choose another --out or name." in said) == (2, True), said
    assert files(out) == after


# Interruptions


def started(file: Path, out: Path, *options: object, first: int) -> subprocess.Popen[str]:
    """Return a run that has finished so many parts."""
    command = [sys.executable, "-m", "fedrot", "simulate", file, "--out", out, *options]
    process = subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
    )
    end = time.monotonic() + 200
    while len([*(out / "cells").glob("*.json")]) < first and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    return process


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "--multiprocessing-fork" in child.cmdline()]


def whole_files(folder: Path) -> None:
    """Every file of a folder can be read, and none is half written."""
    for path in (folder / "cells").iterdir():
        assert path.suffix == ".json", path
        assert json.loads(path.read_text())["rows"]
    assert read_run(folder).missing


@pytest.mark.parametrize(
    ("how", "workers"), [(signal.SIGTERM, 1), (signal.SIGINT, 2), (signal.SIGKILL, 2)]
)
def test_a_stopped_run_goes_on(
    file: Path, tmp_path: Path, whole: Path, how: signal.Signals, workers: int
) -> None:
    """Whatever stops it: finished parts stay, no process does."""
    out = tmp_path / "run"
    process = started(file, out, "--workers", workers, first=2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(workers_of(process)) == (workers if workers > 1 else 0)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # As a terminal does it: workers are in the foreground, too.
    else:
        os.kill(process.pid, how)
    printed, _ = process.communicate(timeout=200)
    assert not psutil.wait_procs(children, timeout=200)[1]
    assert process.returncode == {signal.SIGKILL: -9}.get(how, 130)
    before = files(out)
    assert 2 <= len(before) < CELLS, printed
    whole_files(out)
    if how != signal.SIGKILL:
        told = " ".join(printed.split())
        assert f"Interrupted; {len(before)} of 12 results are in" in told
        assert "Repeat the command to go on." in told
        assert (out / "report.html").is_file()
        assert not (out / runs.TRAININGS).exists()
    assert "Traceback" not in printed
    assert invoke("simulate", file, "--workers", 1, "--out", out)[0] == 0
    after = files(out)
    assert {name: after[name] for name in before} == before
    complete(out, whole)


@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_a_worker_that_is_killed_loses_the_part_that_it_ran(
    engine: str, file: Path, tmp_path: Path, whole: Path, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "run"
    if engine == "ray":
        before = set(ray_workers())
        process = started(file, out, "--set", f"ray={request.getfixturevalue('two_nodes')}", first=1)
        (worker, *_) = (one for one in ray_workers() if one not in before)
    else:
        process = started(file, out, "--workers", 2, first=1)
        (worker, *_) = workers_of(process)
    worker.kill()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 1, printed
    assert "1 of 12 parts failed" in " ".join(printed.split())
    (told,) = out.glob("cells/*.txt")
    assert "of the job ended" in told.read_text()
    assert len(files(out)) == CELLS - 1
    code, printed = invoke("simulate", file, "--workers", 1, "--out", out)
    assert (code, "11 of 12 results are there already" in printed) == (0, True), printed
    complete(out, whole)


def ray_workers() -> list[psutil.Process]:
    """Return Ray's processes that run a job."""
    return [p for p in psutil.process_iter() if any("ray::_said" in word for word in command_of(p))]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# Failures


def test_a_part_that_fails_is_shown_and_tried_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    out = tmp_path / "run"

    def broken(*_: object) -> None:
        raise ValueError("no room for the head")

    with monkeypatch.context() as patch:
        patch.setitem(RUNS, "head_only", broken)
        code, printed = invoke("simulate", file, "--workers", 1, "--out", out)
    assert (code, "4 of 12 parts failed" in printed) == (1, True), printed
    assert printed.count("FAILED, see ") == 4
    assert printed.count("ValueError: no room for the head") == 4
    assert "Report: " in printed
    told = sorted(file.read_text() for file in out.glob("cells/*.txt"))
    assert told[0].startswith("one · seed 0 · head_only\n")
    assert "in broken" in told[0]
    assert {row["strategy"] for row in read_run(out).rows} == {"fedavg", "aligned"}
    printed = invoke("simulate", file, "--workers", 1, "--out", out)[1]
    assert "8 of 12 results are there already" in printed
    complete(out, whole)


def of(**fields: Any) -> Experiment:
    values = {**SMALL, "train_limit": 60, "test_limit": 20, "clients": 2, "seeds": 1, "name": "a"}
    return Experiment.from_flat({**values, **fields})


def run_of(folder: Path, experiment: Experiment, console: Console) -> runs._Run:
    known = {experiment.name: checked(experiment)}
    held = RunFolder(folder, {experiment.name: known[experiment.name].described}, "test")
    listed = cells_of([experiment])
    return runs._Run(held, listed, costs_of(listed, known), console)


def costs(*experiments: Experiment) -> tuple[list[Cell], dict[str, float]]:
    """Return all cells and their costs."""
    cells = cells_of(experiments)
    return cells, costs_of(cells, {one.name: checked(one) for one in experiments})


def row_of(cell: Any, value: float | None) -> dict[str, Any]:
    labels = {"experiment": "a", "strategy": cell.strategy.name, "seed": 0, "scope": "central"}
    return {**labels, "round": 3, "metric": "loss", "value": value}


def test_parts_behind_one_whose_process_died_are_run_and_that_one_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []

    def dying(jobs: list[Job], machine: Machine, hear: Callable[..., None], tick: object) -> None:
        (job,) = jobs
        listed = job.arguments[0]
        tried.append([cell.strategy.name for cell in listed])
        for cell in listed:
            if cell.strategy.name == "aligned":
                hear(job, Ended("The process of the job ended: killed", died=True))
                return
            value = None if cell.strategy.name == "fedavg" else 1.0
            hear(job, ("cell", cell.name, [row_of(cell, value)], [], "", ""))
        hear(job, Ended())

    monkeypatch.setattr(runs, "run_jobs", dying)
    shown = io.StringIO()
    run = run_of(tmp_path, of(strategies="fedavg,aligned,head_only"), Console(file=shown, width=200))
    run.finish(Machine(1))
    assert tried == [["fedavg", "aligned", "head_only"], ["head_only"]]
    assert run.failed == 1
    assert {row["strategy"] for row in read_run(tmp_path).rows} == {"fedavg", "head_only"}
    (told,) = tmp_path.glob("cells/*.txt")
    assert told.read_text() == "a · seed 0 · aligned\n\nThe process of the job ended: killed"
    first, second, third = shown.getvalue().splitlines()
    assert first == "[1 of 3] a · seed 0 · fedavg: loss nan"
    assert second.startswith("[2 of 3] a · seed 0 · aligned: FAILED, see ")
    assert third == "[3 of 3] a · seed 0 · head_only: loss 1.000"


# Jobs and progress


def test_the_longest_job_is_first_and_parts_that_share_trainings_are_one_job(tmp_path: Path) -> None:
    listed = [of(strategies="fedavg,aligned", seeds=2), of(name="b", rounds=9, strategies="fedavg")]
    listed.append(of(name="c", strategies="head_only"))  # clients train as in the first one
    folder = RunFolder(tmp_path, {}, "test")
    jobs = runs._Run(folder, *costs(*listed), Console(file=io.StringIO()))._jobs()
    names = [
        [f"{c.experiment.name}{c.seed} {c.strategy.name}" for c in job.arguments[0]] for job in jobs
    ]
    assert names == [
        ["b0 fedavg"],
        ["a0 fedavg", "a0 aligned", "c0 head_only"],
        ["a1 fedavg", "a1 aligned"],
    ]


def test_progress_is_told_inside_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_BEAT", 0.0)
    experiment = of(strategies="fedavg", rounds=2)
    (cell,), found = costs(experiment)
    (cost,) = found.values()
    heard: list[Any] = []
    before = training.on_rows
    runs.run_job([cell], [cost], tmp_path, heard.append)
    assert training.on_rows is before
    done = [said[2] for said in heard if said[0] == "progress"]
    assert len(done) > 5
    assert done == sorted(done)
    # What a part costs is counted before it runs: in the end it is all of it.
    assert done[-1] == pytest.approx(cost, rel=0.25)
    assert heard[-2][1] == f"fedavg (seed 0) {100 * done[-1] / cost:.0f} %"


@pytest.mark.parametrize("terminal", [False, True])
def test_without_a_terminal_a_line_breaks_a_silence(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SILENCE", 0.0)
    shown = io.StringIO()
    run = run_of(tmp_path, of(strategies="fedavg"), Console(file=shown, force_terminal=terminal))
    run._start -= 60
    run._of_job[Job("a", print, ())] = ("fedavg (seed 0) 25 %", run._cost / 4)
    run._show()
    assert ("25 % about 3 min left; fedavg (seed 0) 25 %" in shown.getvalue()) == (not terminal)


def test_parts_share_trainings_and_a_worker_elsewhere_shares_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    monkeypatch.setattr(training, "train", lambda *given: trained.append(given[3]) or 0.0)
    listed = cells_of([of(strategies="fedavg,aligned", rounds=1)])
    for folder in (tmp_path, tmp_path / "elsewhere"):
        heard: list[Any] = []
        runs.run_job(listed, [1.0, 1.0], folder, heard.append)
        assert [said[-1] for said in heard if said[0] == "cell"] == ["", ""]
        assert not [*tmp_path.iterdir()]
    assert sorted(trained) == [1_000, 1_000, 1_001, 1_001]


# Estimates and what is said before


def test_a_dry_run_writes_nothing_and_prints_what_it_would_take(file: Path, tmp_path: Path) -> None:
    code, printed = invoke("simulate", file, "--dry-run", "--out", tmp_path / "run")
    assert code == 0, printed
    assert re.search(
        r"about \d+ s in \d process(es)? with \d\.\d GB each \(from one timed step\)", printed
    )
    assert printed.endswith("Dry run: nothing was run or written.")
    assert "clients have 60 rows each (seed 0)" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["two.toml"]


def test_an_estimate_is_near_the_time_that_a_run_takes(tmp_path: Path) -> None:
    """Against the processor time of the run, since others may use the machine, too."""
    experiment = of(train_limit=900, test_limit=200, rounds=3, strategies="fedavg,aligned", width=64)
    listed, found = costs(experiment)
    said = estimate(listed, found, {"a": checked(experiment)}, Machine(1))
    (number,) = re.findall(r"takes about (\d+) s", said)
    began = time.process_time()
    runs.run_job(listed, [found[cell.name] for cell in listed], tmp_path, lambda said: None)
    assert 1 / 4 < float(number) / (time.process_time() - began) < 4


def test_costs_are_of_trainings_that_are_not_shared() -> None:
    tables = [{"name": "slow", "alignment": False, "learning_rate": 1e-4}]
    names = ["fedavg", "fedavg_head", "aligned", "head_only"]
    experiment = of(strategies=[*names, *tables], rounds=2, train_limit=500)
    cells, found = costs(experiment)
    cost = {cell.strategy.name: found[cell.name] for cell in cells}
    assert (
        cost["head_only"] < cost["fedavg_head"] < cost["aligned"] < cost["fedavg"] < 1.5 * cost["slow"]
    )


def test_durations_in_words() -> None:
    found = [in_words(seconds) for seconds in (0.2, 50, 170, 4800, 6000)]
    assert found == ["1 s", "50 s", "3 min", "80 min", "1 h 40 min"]


def said(experiment: Experiment) -> str:
    return "\n".join(checked(experiment).said)


def test_what_is_said_of_the_data() -> None:
    experiment = of(train_limit=80)
    data = task_of(experiment.to_json()).data
    names, test = ([data.label_names[k] for k in split.labels] for split in (data.train, data.test))
    largest = max(data.label_names, key=names.count)
    share = test.count(largest) / len(test)
    assert f"Always '{largest}' would have accuracy {share:.3f}." in said(experiment)
    assert "80 training rows and 20 test rows, 7 classes.\n2 clients have 40 rows" in said(experiment)
    assert "Always" not in said(of(task="mlm", train_limit=80))
    # Rows that no client has.
    partition = of(partition="pathological:2", seeds="3,4")
    sizes = [*map(sum, task_of(partition.to_json()).partition(3)[1])]
    assert f"clients have {min(sizes)} to {max(sizes)} rows each (seed 3)" in said(partition)
    assert f"leaves out {60 - sum(sizes)} of 60 rows (seed 3)." in said(partition)
    assert "leaves out" not in said(experiment)
    # Few rows to choose by.
    few = "by which fit_head, guarded choose: the choice may be noise. --set holdout=0.3 gives more."
    chosen = {"holdout": 0.5, "strategies": "fedavg,fit_head,guarded"}
    assert "Clients hold out 40 rows in all (seed 0), " + few in said(of(train_limit=80, **chosen))
    assert "hold out" not in said(of(train_limit=400, **chosen))
    assert "hold out" not in said(of(strategies="fedavg,aligned"))


# Refusals before anything runs


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"guard": "perplexity"}, "unknown metric 'perplexity'; one of accuracy"),
        ({"alignment": {"layers": [1]}}, "Layer 1 is not in the model, which has 1"),
        ({"alignment": {"colour": "red"}}, "colour"),
        ({"server": {"colour": "red"}}, "colour"),
        # Of four clients, 1 and 3 have too few rows to hold one out.
        ({"fit_head": True, "clients": [1, 3]}, "needs clients' held-out rows"),
    ],
)
def test_a_strategy_that_cannot_run_is_refused(table: dict[str, Any], words: str) -> None:
    experiment = of(
        strategies=[{"name": "mine", **table}], clients=4, partition="dirichlet:0.1", holdout=0.1
    )
    with pytest.raises(FedrotError, match=r"^strategy 'mine': ") as caught:
        checked(experiment)
    assert words in str(caught.value)


def test_only_runs_that_move_weights_need_a_supported_family(tmp_path: Path) -> None:
    config = transformers.BigBirdConfig(**SIZES, attention_type="original_full")
    model = str(save(tmp_path, config))
    experiment = Experiment.from_flat({**MODEL, "model": model, "strategies": "fedavg"})
    assert checked(experiment).described["model"] == model
    for moving in ({"strategies": "aligned"}, {"start": "scrambled"}):
        with pytest.raises(FedrotError, match="big_bird"):
            checked(Experiment.from_flat({**MODEL, "model": model, "strategies": "fedavg", **moving}))


def test_the_partition_of_every_seed_is_tried_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Task.clients
    seeds: list[int] = []
    monkeypatch.setattr(Task, "clients", lambda self, seed: seeds.append(seed) or clients(self, seed))
    experiment = of(strategies="fedavg,aligned", seeds="3,7", partition="pathological:2")
    told = checked(experiment).described
    assert {3, 7} <= {*seeds}
    task = task_of(experiment.to_json())
    assert told["label_names"] == list(task.data.label_names)
    for seed, counts in told["seeds"].items():
        labels = [task.data.train.labels[rows] for rows in clients(task, int(seed))]
        assert [[(own == k).sum() for k in range(7)] for own in labels] == counts
    codes = [strategy["code"] for strategy in told["strategies"].values()]
    assert codes == ["FedAvg()", "FedRot(model.config)"]
    assert all(strategy["says"] for strategy in told["strategies"].values())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data": "none.csv"}, "none.csv"),
        ({"ray": "127.0.0.1:1"}, "There is no Ray cluster at '127.0.0.1:1'"),
    ],
)
def test_a_run_that_cannot_begin_leaves_no_results(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given = settings({**SMALL, "seeds": 1, "strategies": "fedavg", **values})
    code, printed = invoke("simulate", "--out", tmp_path / "run", *given)
    assert (code, words in printed) == (2, True), printed
    assert not [*tmp_path.rglob("cells/*")]


# Saved models and adapters

MODEL: dict[str, Any] = {
    **{"train_limit": 48, "test_limit": 16, "max_length": 16, "clients": 2, "rounds": 2, "seeds": 1},
    **{"lr": 0.01, "holdout": 0.2},
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved encoder in bfloat16."""
    folder = tmp_path_factory.mktemp("encoder")
    return save(folder, transformers.BertConfig(**SIZES), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("values", "strategies"),
    [
        ({"strategies": "fedavg,aligned,fit_head"}, 3),
        ({"lora": '{r = 2, target_modules = ["query"]}'}, 4),
        ({"lora": '{r = [1, 3], target_modules = ["query", "value"]}'}, 2),
    ],
)
def test_a_model_of_another_precision_runs_as_the_dry_run_says(
    values: dict[str, Any], strategies: int, encoder: Path, tmp_path: Path
) -> None:
    given = {**MODEL, "model": encoder, **values}
    code, printed = invoke("simulate", "--out", tmp_path / "run", "--dry-run", *settings(given))
    assert (code, "nothing was run or written" in printed) == (0, True), printed
    options = ("--workers", 1, *settings(given))
    code, printed = invoke("simulate", "--out", tmp_path / "run", *options)
    assert code == 0, printed
    run = read_run(tmp_path / "run")
    found = {row["strategy"] for row in run.rows}
    assert len(found) == strategies
    assert run.missing == []
    first = [
        r["value"] for r in run.rows if (r["scope"], r["round"], r["metric"]) == ("central", 0, "loss")
    ]
    assert all(0 < value < 3 for value in first)
    losses = [row["value"] for row in run.rows if row["metric"] == "train-loss"]
    assert min(losses) < max(losses)
