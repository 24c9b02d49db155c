"""Jobs side by side: what they return, how they fail, and two machines that share them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

import fedrot
from fedrot.simulations import jobs as jobs_module
from fedrot.simulations.jobs import (
    FAILURES,
    Job,
    Machine,
    Outcome,
    _on_ray,
    check_failures,
    noted_failure,
    run_jobs,
)
from fedrot.simulations.plugins import PLUGINS, load_plugins


def double(number: int) -> list[int]:
    return [2 * number]


def halves(number: int) -> Iterator[int]:
    """Yield two numbers, and fail where there would be a third."""
    yield number // 2
    yield number - number // 2
    raise ValueError("no third half")


def fail(reason: str) -> None:
    raise ValueError(reason)


def die(path: str) -> None:
    """End the process, and note that in a file."""
    with Path(path).open("a") as file:
        file.write("died\n")
    os._exit(3)


def interrupted() -> list[int]:
    raise KeyboardInterrupt


def last(seconds: float) -> list[int]:
    """Return this process after a while."""
    time.sleep(seconds)
    return [os.getpid()]


def running(path: str, name: str) -> list[list[str]]:
    """Return the names of the jobs that run at the same time as this one begins."""
    mine = Path(path, name)
    mine.touch()
    found = [file.name for file in Path(path).iterdir()]
    time.sleep(0.3)
    mine.unlink()
    return [found]


def told(name: str) -> list[str | None]:
    """Return a variable of the environment."""
    return [os.getenv(name)]


def where(seconds: float) -> list[str]:
    """Return the node of a Ray cluster that works."""
    time.sleep(seconds)
    return [str(ray.get_runtime_context().get_node_id())]


def outcomes(jobs: list[Job], machine: Machine) -> dict[str, Outcome]:
    return {job.name: outcome for job, outcome in run_jobs(jobs, machine)}


@pytest.mark.parametrize("workers", [1, 2])
def test_every_job_has_an_outcome(workers: int) -> None:
    jobs = [Job(str(i), double, (i,)) for i in range(3)]
    jobs[1:1] = [Job("bad", fail, ("no such data",)), Job("half", halves, (5,))]
    found = outcomes(jobs, Machine(workers))
    assert {name: found[name].parts for name in "012"} == {"0": [0], "1": [2], "2": [4]}
    assert (found["bad"].parts, found["half"].parts) == ([], [2, 3])
    assert found["bad"].failure.endswith("ValueError: no such data\n")
    assert "in fail" in found["bad"].failure
    assert found["half"].failure.endswith("ValueError: no third half\n")
    assert {name for name, outcome in found.items() if outcome.failure} == {"bad", "half"}
    assert not any(outcome.died for outcome in found.values())


def test_no_more_jobs_run_than_there_are_workers_and_they_begin_in_order(tmp_path: Path) -> None:
    jobs = [Job(name, running, (str(tmp_path), name)) for name in "abcde"]
    found = {name: outcome.parts[0] for name, outcome in outcomes(jobs, Machine(2)).items()}
    assert max(map(len, found.values())) == 2
    assert all(max(names) <= chr(ord(name) + 1) for name, names in found.items())


@pytest.mark.parametrize("workers", [1, 2])
def test_the_caller_can_look_while_jobs_run(workers: int) -> None:
    seen: list[str] = []
    jobs = [Job("a", last, (1.5,)), Job("b", double, (1,))]
    seen.extend(job.name for job, _ in run_jobs(jobs, Machine(workers), lambda: seen.append("look")))
    assert seen[0] == "look"
    assert sorted(name for name in seen if name != "look") == ["a", "b"]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_caller_fails_at_is_no_failure_of_a_job(workers: int) -> None:
    def full() -> None:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        list(run_jobs([Job(name, last, (1.0,)) for name in "ab"], Machine(workers), full))


def test_a_job_whose_process_dies_fails_alone_and_is_not_tried_again(tmp_path: Path) -> None:
    note = tmp_path / "note"
    jobs = [Job("dies", die, (str(note),)), *(Job(str(i), last, (0.2,)) for i in range(4))]
    found = outcomes(jobs, Machine(2))
    assert note.read_text() == "died\n"
    assert "process of the job ended" in found["dies"].failure
    assert {name for name, outcome in found.items() if outcome.died} == {"dies"}
    assert all(found[str(i)].parts for i in range(4))
    assert os.getpid() not in {found[str(i)].parts[0] for i in range(4)}


def test_nothing_is_left_running_when_the_caller_stops() -> None:
    jobs = [Job("a", double, (1,)), *(Job(f"s{i}", time.sleep, (60,)) for i in range(4))]
    before = set(psutil.Process().children(recursive=True))
    ended = run_jobs(jobs, Machine(2))
    assert next(ended)[1].parts == [2]
    started = set(psutil.Process().children(recursive=True)) - before
    # The two that work, and the tracker of multiprocessing, which stays.
    workers = [one for one in started if "--multiprocessing-fork" in one.cmdline()]
    assert len(workers) == 2
    ended.close()  # type: ignore[attr-defined]
    assert psutil.wait_procs(workers, timeout=60)[1] == []


def test_processes_of_this_machine_are_told_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS, "json,math")
    found = outcomes([Job(name, told, (PLUGINS,)) for name in "ab"], Machine(2))
    assert [outcome.parts for outcome in found.values()] == [["json,math"]] * 2


def test_without_a_number_of_workers_there_is_one_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = outcomes([Job(name, last, (0.0,)) for name in "ab"], Machine())
    assert [outcome.parts for outcome in found.values() if outcome.parts == [os.getpid()]] == []
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    found = outcomes([Job(name, last, (0.0,)) for name in "ab"], Machine())
    assert [outcome.parts for outcome in found.values()] == [[os.getpid()]] * 2


def test_ctrl_c_is_no_failure_of_a_job() -> None:
    with pytest.raises(KeyboardInterrupt):
        outcomes([Job("a", interrupted, ())], Machine(1))


def test_plug_ins_are_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / f"plug_in_{name}.py").write_text(f"import os\nos.environ['{name.upper()}'] += '+'\n")
        monkeypatch.setenv(name.upper(), "")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for variable in (None, ",plug_in_one,,plug_in_two,"):
            load_plugins.cache_clear()
            if variable is None:
                monkeypatch.delenv(PLUGINS, raising=False)
            else:
                monkeypatch.setenv(PLUGINS, variable)
            load_plugins()
        assert (os.environ["ONE"], os.environ["TWO"]) == ("+", "+")
        for name in ("plug_in_one", "plug_in_two"):
            del sys.modules[name]
        load_plugins()
        assert (os.environ["ONE"], os.environ["TWO"]) == ("+", "+")
    finally:
        load_plugins.cache_clear()


def test_a_cluster_that_is_not_there_is_named() -> None:
    assert outcomes([], Machine(address="127.0.0.1:1")) == {}
    with pytest.raises(fedrot.FedrotError, match=r"no Ray cluster at '127\.0\.0\.1:1'"):
        outcomes([Job("a", double, (1,))], Machine(address="127.0.0.1:1"))


def test_two_nodes_share_the_jobs(two_nodes: str) -> None:
    jobs = [Job(str(i), where, (0.5,)) for i in range(6)]
    found = outcomes(jobs, Machine(address=two_nodes))
    assert len({outcome.parts[0] for outcome in found.values()}) == 2


def test_nodes_of_a_cluster_are_told_the_plugins(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLUGINS, "json,math")
    found = outcomes([Job("plug-ins", told, (PLUGINS,))], Machine(address=two_nodes))
    assert found["plug-ins"] == Outcome(["json,math"])


def test_a_process_that_dies_on_a_cluster_ends_its_job_alone(two_nodes: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    jobs = [Job("dies", die, (str(note),)), Job("lives", double, (4,))]
    found = outcomes(jobs, Machine(address=two_nodes))
    assert (found["lives"].parts, found["dies"].died) == ([8], True)
    assert note.read_text() == "died\n"


def test_gpus_are_lent_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, float]] = []

    def remote(**resources: float) -> Callable[..., object]:
        asked.append(resources)
        return lambda work: work

    def refused(machine: Machine) -> None:
        raise ConnectionError

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(jobs_module, "_connect", refused)
    with pytest.raises(ConnectionError):
        outcomes([Job("a", double, (1,))], Machine(gpus=0.5))
    assert asked == [{"num_cpus": 1, "num_gpus": 0.5, "max_retries": 0}]


def test_jobs_of_this_machine_do_not_go_to_a_cluster_on_it(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    with _on_ray(Machine(2)) as (start, places):
        assert (start(Job("a", double, (1,))).result().parts, places()) == ([2], 2)


def test_the_traceback_of_an_earlier_attempt_goes_when_the_job_succeeds(tmp_path: Path) -> None:
    failed, fine = "Traceback\n  in work\nValueError: no room\n", ""
    for name in ("a", "b"):
        said = noted_failure(tmp_path, name, f"cell {name}", failed)
        assert said == f"FAILED, see {tmp_path / FAILURES / name}.txt: ValueError: no room"
    assert (tmp_path / FAILURES / "b.txt").read_text() == f"cell b\n\n{failed}"
    assert noted_failure(tmp_path, "a", "cell a", fine) == ""
    assert [file.name for file in (tmp_path / FAILURES).iterdir()] == ["b.txt"]
    assert noted_failure(tmp_path, "b", "cell b", fine) == ""
    assert noted_failure(tmp_path, "b", "cell b", fine) == ""
    assert list(tmp_path.iterdir()) == []


def test_failed_jobs_are_counted_and_no_failure_is_no_error(tmp_path: Path) -> None:
    check_failures(0, 3, "cells", tmp_path)
    with pytest.raises(RuntimeError, match=r"^1 of 3 cells failed; the tracebacks are in .*failures"):
        check_failures(1, 3, "cells", tmp_path)
