"""Whole runs: stopped and repeated, on two engines, failing, estimated, told while they
run.
"""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
import transformers
from rich.console import Console

from fedrot.errors import FedrotError
from fedrot.simulations import checks
from fedrot.simulations import simulate as runs
from fedrot.simulations.checks import Checked, checked, costs_of, estimate, in_words
from fedrot.simulations.engine import Ended, Job, Machine
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.models import build_model
from fedrot.simulations.report import pages
from fedrot.simulations.run_folder import (
    WRITTEN,
    RunFolder,
    cells_of,
    read_run,
)
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import task_of
from tests.simulations.commands import (
    SMALL,
    contents,
    run,
    settings,
    simulated,
)
from tests.simulations.commands import values as read_values
from tests.simulations.data.files import write
from tests.simulations.report.runs import row
from tests.simulations.tasks.cases import SIZES, save

FILE = """
[base]
train_limit = 120
test_limit = 20
depth = 1
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


def _bare_page(path, *_, **__):
    """Write a page without pictures, which take longer than these runs."""
    path.write_text("page")
    return path


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch):
    monkeypatch.setattr(pages, "write_page", _bare_page)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run, one cell after the other, that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "two.toml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "write_page", _bare_page)
        printed = run(
            "simulate", folder / "two.toml", "--workers", 1, "--out", folder / "run"
        )
    (folder / "run" / "printed.txt").write_text(printed)
    return folder / "run"


def rows_of(folder):
    """Return the rows without durations."""
    return [
        row for row in read_run(folder).rows if not row["metric"].startswith("seconds-")
    ]


def files(folder):
    """Return when every result was written."""
    return {
        file.name: file.stat().st_mtime_ns for file in (folder / "cells").glob("*.json")
    }


def complete(folder, whole):
    """A folder has the rows of the whole run, and nothing of running jobs."""
    found = read_run(folder)
    expected = read_run(whole)
    assert (found.missing, found.alignment) == ([], expected.alignment)
    assert rows_of(folder) == rows_of(whole)
    names = {path.name for path in folder.iterdir()} - {"printed.txt"}
    assert names == {"cells", "config.json", "rows.csv", "report.html"}
    assert not [*folder.glob("cells/*.txt")]


def test_a_run_says_what_it_does_and_keeps_all_of_it(whole):
    printed = (whole / "printed.txt").read_text()
    kept = read_run(whole)
    complete(whole, whole)
    assert len(files(whole)) == CELLS
    lines = re.findall(r"\[(\d+) of 12\] (.+?: accuracy 0\.\d{3})", printed)
    assert [int(number) for number, _ in lines] == [*range(1, CELLS + 1)]
    titles = {
        f"{row['experiment']} · seed {row['seed']} · {row['strategy']}": row["value"]
        for row in kept.rows
        if (row["scope"], row["round"], row["metric"]) == ("central", 2, "accuracy")
    }
    names = ("fedavg", "aligned", "head_only")
    places = itertools.product(("one", "two"), (0, 1), names)
    assert [*titles] == [f"{e} · seed {seed} · {name}" for e, seed, name in places]
    assert {line for _, line in lines} == {
        f"{title}: accuracy {value:.3f}" for title, value in titles.items()
    }
    assert re.search(r"This takes about [\w ]+ in 1 process with \d+\.\d GB", printed)
    assert printed.count("120 training rows and 20 test rows, 7 classes.") == 1
    assert f"Report: {whole / 'report.html'}" in printed
    cell = json.loads(next((whole / "cells").glob("*seed-1-al*")).read_text())
    assert cell["title"].endswith("seed 1 · aligned")
    assert "[ROUND 2/2]" in cell["log"]


def wait_for(process, out, files, count):
    end = time.monotonic() + 400
    while len([*(out / "cells").glob(files)]) < count and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def started(file, out, workers, first):
    """Return a run that has finished so many parts, its children, and those that run
    jobs.
    """
    command = f"{sys.executable} -m fedrot simulate {file} --out {out}"
    process = subprocess.Popen(
        [*command.split(), "--workers", str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background of a shell ignores Ctrl-C, and so would its
        # children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
    )
    wait_for(process, out, "*.json", first)
    children = psutil.Process(process.pid).children(recursive=True)
    return (
        process,
        children,
        [c for c in children if "--multiprocessing-fork" in c.cmdline()],
    )


@pytest.mark.parametrize(
    ("how", "workers"), [(signal.SIGTERM, 1), (signal.SIGINT, 2), (signal.SIGKILL, 2)]
)
def test_a_stopped_run_goes_on(file, tmp_path, whole, how, workers):
    """Whatever stops it, finished parts stay and no process does; a killed worker loses
    its part.
    """
    out = tmp_path / "run"
    process, children, working = started(file, out, workers, first=2)
    assert len(working) == (workers if workers > 1 else 0)
    if how == signal.SIGINT:
        working[0].kill()
        wait_for(process, out, "*.txt", 1)
        (told,) = out.glob("cells/*.txt")
        assert "of the job ended" in told.read_text()
        os.killpg(
            process.pid, how
        )  # As a terminal does it: workers are in the foreground, too.
    else:
        os.kill(process.pid, how)
    printed, _ = process.communicate(timeout=400)
    assert not psutil.wait_procs(children, timeout=100)[1]
    assert process.returncode == {signal.SIGKILL: -9}.get(how, 130)
    before = files(out)
    assert 2 <= len(before) < CELLS, printed
    for path in (out / "cells").iterdir():  # none is half written
        assert path.suffix == ".txt" or json.loads(path.read_text())["rows"]
    if how != signal.SIGKILL:
        assert f"Interrupted; {len(before)} of 12 results are in" in " ".join(
            printed.split()
        )
        assert (out / "report.html").is_file()
        assert not (out / runs.TRAININGS).exists()
    assert "Traceback" not in printed
    run("simulate", file, "--workers", 1, "--out", out)
    after = files(out)
    assert {name: after[name] for name in before} == before
    complete(out, whole)


def of(**fields):
    values = {
        **SMALL,
        "train_limit": 60,
        "test_limit": 20,
        "clients": 2,
        "seeds": 1,
        "name": "a",
    }
    return Experiment.from_flat({**values, **fields})


def shown_run(folder, experiment, **console):
    """Return a run that nobody has begun, and what it will print."""
    shown = io.StringIO()
    listed = costs(experiment)
    held = RunFolder(folder, {experiment.name: checked(experiment).described}, "test")
    return runs._Run(held, *listed, Console(file=shown, width=200, **console)), shown


def costs(*experiments):
    """Return all cells and their costs."""
    cells = cells_of(experiments)
    return cells, costs_of(cells, {one.name: checked(one) for one in experiments})


def test_parts_behind_one_whose_process_died_are_run_and_that_one_once(
    tmp_path, monkeypatch
):
    tried = []
    run, shown = shown_run(tmp_path, of(strategies="fedavg,aligned,fedavg_head"))

    def dying(jobs, machine, hear, tick):
        (job,) = jobs
        listed = job.arguments[0]
        tried.append([cell.strategy.name for cell in listed])
        for cell in listed:
            if cell.strategy.name == "aligned":
                hear(job, Ended("The process of the job ended: killed", died=True))
                return
            value = np.nan if cell.strategy.name == "fedavg" else 1.0
            told = row(
                cell.strategy.name, 0, value, experiment="a", round=3, metric="loss"
            )
            failed = {**told, "scope": "round", "metric": "fedrot-head-failed"}
            failed["value"] = cell.strategy.name == "fedavg_head"
            hear(job, runs.CellResult(cell.name, [told, failed], [], ""))
        hear(job, Ended())

    monkeypatch.setattr(runs, "run_jobs", dying)
    run.finish(Machine(1))
    assert tried == [["fedavg", "aligned", "fedavg_head"], ["fedavg_head"]]
    assert run.failed == 1
    kept = {row["strategy"] for row in read_run(tmp_path).rows}
    assert kept == {"fedavg", "fedavg_head"}
    (told,) = tmp_path.glob("cells/*.txt")
    title = "a · seed 0 · aligned"
    assert told.read_text() == f"{title}\n\nThe process of the job ended: killed"
    first, second, third = shown.getvalue().splitlines()
    assert first == "[1 of 3] a · seed 0 · fedavg: loss nan"
    assert second.startswith(f"[2 of 3] {title}: FAILED, see ")
    assert third.startswith("[3 of 3] a · seed 0 · fedavg_head: loss 1.000, task head ")


def test_the_longest_job_is_first_and_parts_that_share_trainings_are_one_job(tmp_path):
    listed = [
        of(strategies="fedavg,aligned", seeds=2),
        of(name="b", rounds=9, strategies="fedavg"),
    ]
    listed.append(
        of(name="c", strategies="fedavg_head")
    )  # clients train as in the first one
    folder = RunFolder(tmp_path, {}, "test")
    jobs = runs._Run(folder, *costs(*listed), Console(file=io.StringIO()))._jobs()
    names = [
        [f"{c.experiment.name}{c.seed} {c.strategy.name}" for c in job.arguments[0]]
        for job in jobs
    ]
    assert names == [
        ["b0 fedavg"],
        ["a0 fedavg", "a0 aligned", "c0 fedavg_head"],
        ["a1 fedavg", "a1 aligned"],
    ]


def test_progress_is_told_inside_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_BEAT", 0.0)
    experiment = of(strategies="fedavg", rounds=2)
    (cell,), found = costs(experiment)
    (cost,) = found.values()
    heard = []
    runs.run_job([cell], [cost], tmp_path, heard.append)
    assert training.ON_ROWS == []
    done = [said.done for said in heard if isinstance(said, runs.CellProgress)]
    assert len(done) > 5
    assert done == sorted(done)
    assert not [*tmp_path.iterdir()]
    # What a part costs is counted before it runs: in the end it is all of it.
    assert done[-1] == pytest.approx(cost, rel=0.25)
    assert heard[-2].text == f"fedavg (seed 0) {100 * done[-1] / cost:.0f} %"


@pytest.mark.parametrize("terminal", [False, True])
def test_without_a_terminal_a_line_breaks_a_silence(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "SILENCE", 0.0)
    run, shown = shown_run(tmp_path, of(strategies="fedavg"), force_terminal=terminal)
    run._start -= 60
    job = Job("a", print, ())
    # One hundredth does not tell the speed of the rest.
    run._of_job[job] = runs.CellProgress("some", run._cost / 100)
    run._show()
    assert "left" not in shown.getvalue()
    run._of_job[job] = runs.CellProgress("fedavg (seed 0) 25 %", run._cost / 4)
    run._show()
    told = "25 % about 2 min to 4 min left; fedavg (seed 0) 25 %"
    assert (told in shown.getvalue()) == (not terminal)


def test_after_the_first_result_the_time_left_is_told(tmp_path):
    """By hand: one of four equal jobs and .4 of another in 60 s, in two processes.

    The other 2.6 would take 111 s, and four thirds of it, because the last job runs
    alone: 149 s.
    """
    run, shown = shown_run(tmp_path, of(strategies="fedavg", seeds=4))
    run._start -= 60
    run._printed -= 60
    jobs = run._jobs()
    for job in jobs[:2]:
        run._of_job[job] = runs.CellProgress("some", run._cost / 10)
    for job in jobs[:2]:
        (cell,) = job.arguments[0]
        run._hear(job, runs.CellResult(cell.name, [], [], ""))
    for job in jobs[:2]:
        run._hear(job, Ended())
    _, left, _ = shown.getvalue().splitlines()
    assert left == "35 % about 2 min to 3 min left; some"


def test_costs_are_of_trainings_that_are_not_shared():
    """By hand, in rows of training: 450 of 500 are trained on, and 20 are for tests."""
    tables = [{"name": "slow", "alignment": False, "learning_rate": 1e-4}]
    tables += [{"name": "half", "alignment": False, "fraction_train": 0.5}]
    # Rows that are trained on, and others that pass through the model.
    expected = {
        "fedavg": (2500, 80),
        "fedavg_head": (0, 580),
        "aligned": (1000, 80),
        "head_only": (0, 540),
        "fit_head": (2500, 2580),
        "alone": (2500, 80),
        "local_finetuning": (500, 80),
        "slow": (2500, 80),
        "half": (500, 80),
    }
    names = [*expected][:7]
    cells, found = costs(
        of(
            strategies=[*names, *tables],
            train_limit=500,
            rounds=2,
            holdout=0.1,
            first_epochs=3,
            local_epochs=2,
        )
    )
    for cell in cells:
        trained, passed = expected[cell.strategy.name]
        cost = trained + training.EVALUATED * (passed + 50)
        assert found[cell.name] == pytest.approx(cost), cell.name


def test_rows_are_timed_after_the_first_step_and_memory_is_that_of_all_models(
    monkeypatch,
):
    ticks = iter([0.0, 10.0, 13.0])
    experiment = of()
    monkeypatch.setattr(checks, "process_time", lambda: next(ticks))
    found = checked(experiment)
    model = build_model(experiment, task_of(experiment.to_json()).data, 0)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    measured = (found.seconds, found.memory, found.test_rows)
    assert measured == (3 / 60, (2 + 3) * size, 20)


@pytest.mark.parametrize(
    ("machine", "load", "said"),
    [
        # 300 s; between .8 and 1.4 of it.
        (Machine(1), 1, "4 min to 7 min in 1 process with"),
        # Of three jobs, two turns, and 30 s for new processes: 230 s.
        (Machine(2), 1, "3 min to 5 min in 2 processes with"),
        # Eight processes on four cores.
        (Machine(2), 6, "6 min to 11 min in 2 processes with"),
        (Machine(ray="here"), 6, "4 min to 8 min of one core, 3 jobs with"),
    ],
)
def test_an_estimate_counts_jobs_places_starts_and_load(
    machine, load, said, monkeypatch
):
    monkeypatch.setattr(checks, "process_time", lambda: 30.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    cells = cells_of([of(strategies="fedavg,aligned", seeds=3)])
    costs = {cell.name: 100.0 for cell in cells}
    known = Checked({}, [], 0, 0.5, 3 * 10**9)
    found = estimate(cells, costs, {"a": known}, machine)
    assert f"This takes about {said}" in found
    assert 3 < float(found.split("with ")[1].split(" GB")[0]) < 20


def test_durations_are_told_in_words():
    words = [in_words(seconds) for seconds in (0.2, 50, 89, 170, 5369, 6000)]
    assert ", ".join(words) == "1 s, 50 s, 89 s, 3 min, 89 min, 1 h 40 min"


def test_what_is_known_and_said_of_the_data():
    experiment = of(
        partition="pathological:2", seeds="3,7", strategies="fedavg,aligned"
    )
    task = task_of(experiment.to_json())
    found = checked(experiment)
    assert found.described["label_names"] == list(task.data.label_names)
    assert found.described["seeds"] == {
        str(seed): task.partition(seed)[1] for seed in (3, 7)
    }
    strategies = found.described["strategies"].values()
    assert [own["code"] for own in strategies] == ["FedAvg()", "FedRot(model.config)"]
    assert all(own["says"] for own in strategies)
    assert found.described["scored"].startswith("1 of 7 classes have no test row")
    largest = int(np.bincount(task.data.train.labels).argmax())
    said = " ".join(found.sentences)
    share = (task.data.test.labels == largest).mean()
    answer = f"always answers '{task.data.label_names[largest]}'"
    assert f"{answer} would have accuracy {share:.3f}." in said
    sizes = [len(rows) for rows in task.clients(3)]
    assert f"2 clients have {min(sizes)} to {max(sizes)} rows each (seed 3)" in said
    assert f"leaves out {60 - sum(sizes)} of 60 rows (seed 3)." in said
    # Few rows to choose by are said, too.
    chosen = {"holdout": 0.5, "strategies": "fedavg,fit_head,guarded"}
    small = of(train_limit=80, **chosen)
    remarks = " ".join(checked(small).sentences)
    rows = task_of(small.to_json()).client_rows
    held_out = sum(len(rows(0, client)[1]) for client in range(small.clients))
    few = (
        f"Clients hold out {held_out} rows in all (seed 0), by which fit_head, guarded"
    )
    assert f"{few} choose" in remarks
    known = f"2 of 2 clients send sums over fewer than {3 * small.width} rows"
    assert known in remarks
    assert "leaves out" not in remarks
    assert "have 40 rows each" in remarks
    assert "holdout above 0.5" in remarks  # not one that the run has
    of_column = {"train_limit": 400, "partition": "column:label_name", **chosen}
    remarks = " ".join(checked(of(**of_column)).sentences)
    assert "hold out" not in remarks
    assert re.search(r"Rows by site: \w+ \+ \w+ \+ [\w ]+ \d+, \w+ \+ ", remarks)
    remarks = " ".join(checked(of(task="mlm", strategies="fedavg")).sentences)
    assert "always" not in remarks
    assert "send sums" not in remarks


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"guard": "perplexity"}, "unknown metric 'perplexity'; one of accuracy"),
        ({"alignment": {"layers": [1]}}, "Layer 1 is not in the model, which has 1"),
        ({"alignment": {"colour": "red"}}, "colour"),
        # The last client has one row, which it keeps.
        ({"fit_head": True, "clients": [3]}, "needs clients' held-out rows"),
    ],
)
def test_a_strategy_that_cannot_run_is_refused(table, words):
    experiment = of(
        strategies=[{"name": "mine", **table}], clients=4, train_limit=7, holdout=0.1
    )
    with pytest.raises(FedrotError, match=r"^strategy 'mine': ") as caught:
        checked(experiment)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", sorted(WRITTEN))
@pytest.mark.parametrize("option", ["--dry-run", "--workers=1"])
def test_what_no_run_wrote_stays_and_nothing_is_computed(
    name, option, tmp_path, monkeypatch
):
    monkeypatch.setattr(runs, "checked", lambda _: pytest.fail("data were read"))
    (tmp_path / name).write_text("{}")
    says = f"has {name}, which no run of fedrot wrote"
    run("simulate", "--out", tmp_path, option, code=2, says=says)
    assert contents(tmp_path).keys() == {name}
    assert (tmp_path / name).read_text() == "{}"
    run("simulate", "--out", tmp_path / name, option, code=2, says="Not a directory")


SITES = {"North": 40, "South ": 12, "East": 30}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A table of three sites; its path has a comma."""
    path = tmp_path_factory.mktemp("sites") / "my,rows.csv"
    sites = [site for site, size in SITES.items() for _ in range(size)]
    texts = [f"day {row} was {('good', 'bad')[row % 2]}" for row in range(len(sites))]
    return write(path, text=texts, label=["a", "b"] * 41, site=sites)


def test_values_of_a_column_are_the_clients_by_their_names(hospitals, tmp_path):
    """In lines, rows and the page; a path may have a comma."""
    given = {"rounds": 1, "seeds": 1, "strategies": "fedavg,aligned"}
    line = ("--data", hospitals, "--partition", "column:site")
    printed = simulated(tmp_path / "run", given, *line)
    assert "3 clients have" in printed
    assert re.search(r"Rows by site: East \d+, North \d+, South \d+\.", printed)
    kept = read_run(tmp_path / "run")
    (about,) = kept.experiments.values()
    assert (about["clients"], about["sites"]) == (3, ["East", "North", "South"])
    scopes = {row["scope"] for row in kept.rows if row["scope"].startswith("client:")}
    assert scopes == {f"client:{site}" for site in about["sites"]}
    assert {row["client"] for row in kept.alignment} == set(about["sites"])
    # A number shares sites among so many clients.
    said = run(
        *("simulate", "--out", tmp_path / "other", *line, "--clients", 2),
        *settings({**SMALL, **given}),
        "--dry-run",
    )
    assert "2 clients have" in said
    assert re.search(r"Rows by site: North \d+, East \+ South \d+\.", said)


def test_a_run_that_cannot_begin_leaves_no_results(tmp_path):
    given = settings(
        {**SMALL, "seeds": 1, "strategies": "fedavg", "ray": "127.0.0.1:1"}
    )
    said = "There is no Ray cluster at '127.0.0.1:1'"
    run("simulate", "--out", tmp_path / "run", *given, code=2, says=said)
    assert not [*tmp_path.rglob("cells/*")]


@pytest.mark.parametrize("moving", [{"strategies": "aligned"}, {"start": "scrambled"}])
def test_only_runs_that_move_weights_need_a_supported_family(moving, tmp_path):
    config = transformers.BigBirdConfig(**SIZES, attention_type="original_full")
    fields = {**MODEL, "model": str(save(tmp_path, config)), "strategies": "fedavg"}
    assert checked(Experiment.from_flat(fields)).described["model"] == fields["model"]
    with pytest.raises(FedrotError, match="big_bird"):
        checked(Experiment.from_flat({**fields, **moving}))


MODEL = {
    "train_limit": 48,
    "test_limit": 16,
    "max_length": 16,
    "clients": 2,
    "rounds": 2,
    "seeds": 1,
    "lr": 0.01,
    "holdout": 0.2,
    "min_class_rows": 1,
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A saved encoder in bfloat16."""
    folder = tmp_path_factory.mktemp("encoder")
    return save(folder, transformers.BertConfig(**SIZES), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("values", "strategies"),
    [
        ({"strategies": "fedavg,aligned,fit_head"}, 3),
        ({"lora": '{r = [1, 3], target_modules = ["query", "value"]}'}, 3),
    ],
)
def test_a_model_of_another_precision_runs_as_the_dry_run_says(
    values, strategies, encoder, tmp_path
):
    given = {**MODEL, "model": encoder, **values}
    line = ("simulate", "--out", tmp_path / "run", *settings(given))
    printed = run(*line, "--dry-run", says="This takes about")
    assert printed.endswith("Dry run: nothing was run or written.")
    assert [*tmp_path.iterdir()] == []
    run(*line, "--workers", 1)
    kept = read_run(tmp_path / "run")
    assert len({row["strategy"] for row in kept.rows}) == strategies
    assert kept.missing == []
    for (_, _, number, metric), value in read_values(tmp_path / "run").items():
        assert (number, metric) != (0, "loss") or 0 < value < 3
    losses = [row["value"] for row in kept.rows if row["metric"] == "train-loss"]
    assert min(losses) < max(losses)
