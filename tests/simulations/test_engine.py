"""Jobs side by side: what they say, how they fail, and two machines that share them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import fedrot
from fedrot.simulations import engine
from fedrot.simulations.engine import Ended, Job, Machine, Tell, run_jobs
from fedrot.simulations.environment import PLUGINS, load_plugins


def halves(number: int, tell: Tell) -> None:
    """Say two numbers, and fail if there is a rest."""
    tell(number // 2)
    tell(number // 2)
    if number % 2:
        raise ValueError("no third half")


def die(path: str, tell: Tell) -> None:
    """End the process, and note that in a file."""
    tell("alive")
    time.sleep(0.2)
    with Path(path).open("a") as file:
        file.write("died\n")
    os._exit(3)


def interrupted(tell: Tell) -> None:
    raise KeyboardInterrupt


def sleep(seconds: float, tell: Tell) -> None:
    tell(os.getpid())
    time.sleep(seconds)


def running(path: str, name: str, tell: Tell) -> None:
    """Say when the job began and ended; the first one waits until another one runs beside it."""
    began = time.monotonic()
    Path(path, name).touch()
    while len([*Path(path).iterdir()]) < 2 and time.monotonic() < began + 60:
        time.sleep(0.01)
    tell((began, time.monotonic()))


def told(name: str, tell: Tell) -> None:
    """Say a variable of the environment."""
    tell(os.getenv(name))


def where(seconds: float, tell: Tell) -> None:
    """Say the node of a Ray cluster that works."""
    tell(str(ray.get_runtime_context().get_node_id()))
    time.sleep(seconds)


def heard(jobs: list[Job], machine: Machine, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return what each job said, by name."""
    found: dict[str, list[Any]] = {job.name: [] for job in jobs}
    run_jobs(jobs, machine, lambda job, said: found[job.name].append(said), tick)
    return found


ONE, TWO = Machine(1), Machine(2)


@pytest.mark.parametrize("machine", [ONE, TWO])
def test_jobs_say_what_they_do_and_how_they_end(machine: Machine) -> None:
    found = heard([Job(str(number), halves, (number,)) for number in (2, 5, 6)], machine)
    assert found["2"] == [1, 1, Ended()]
    assert found["6"] == [3, 3, Ended()]
    *said, end = found["5"]
    assert said == [2, 2]
    assert end.failure.endswith("ValueError: no third half\n")
    assert "in halves" in end.failure
    assert not end.died


def test_no_more_jobs_run_than_there_are_workers_and_they_begin_in_order(tmp_path: Path) -> None:
    found = heard([Job(name, running, (str(tmp_path), name)) for name in "abcd"], TWO)
    times = {name: said[0] for name, said in found.items()}
    beside = [sum(began <= one < ended for began, ended in times.values()) for one, _ in times.values()]
    assert max(beside) == 2
    assert min(times["c"][0], times["d"][0]) >= min(times["a"][1], times["b"][1])


def test_the_caller_hears_and_looks_while_jobs_run() -> None:
    ticks, began = [], time.monotonic()
    run_jobs(
        [Job(name, sleep, (1.5,)) for name in "ab"],
        TWO,
        lambda job, said: ticks.append(("heard", time.monotonic() - began)),
        lambda: ticks.append(("tick", time.monotonic() - began)),
    )
    spoken = [when for what, when in ticks if what == "heard"]
    assert max(spoken) - min(spoken) > 1
    assert [what for what, _ in ticks].count("tick") >= 3


def test_a_job_whose_process_dies_ends_alone_and_is_not_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "deaths"
    jobs = [Job("dead", die, (str(file),)), *(Job(str(n), halves, (n,)) for n in (2, 4, 6))]
    found = heard(jobs, TWO)
    said, end = found["dead"]
    assert (said, end.died, "code 3" in end.failure) == ("alive", True, True)
    assert file.read_text() == "died\n"
    assert [found[name][-1] for name in "246"] == [Ended()] * 3


def test_nothing_is_left_running_when_the_caller_stops() -> None:
    def stop(job: Job, said: Any) -> None:
        raise KeyboardInterrupt

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        run_jobs([Job(name, sleep, (60.0,)) for name in "abc"], TWO, stop, lambda: None)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [child for child in left if "--multiprocessing-fork" in child.cmdline()]


def test_ctrl_c_is_no_failure_of_a_job() -> None:
    with pytest.raises(KeyboardInterrupt):
        heard([Job("a", interrupted, ())], ONE)


def test_without_a_number_of_workers_there_is_one_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.os, "cpu_count", lambda: 3)
    assert [Machine(workers).places(9) for workers in (None, 2, 20)] == [3, 2, 9]
    monkeypatch.setattr(engine.os, "cpu_count", lambda: None)
    assert Machine().places(9) == 1


def test_processes_of_this_machine_are_told_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS, "json")
    found = heard([Job(name, told, (PLUGINS,)) for name in "ab"], TWO)
    assert [said[0] for said in found.values()] == ["json", "json"]


def test_plug_ins_are_imported_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "counting_plugin.py").write_text("import fedrot\nfedrot.loads.append(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS, "counting_plugin,")
    monkeypatch.setattr(fedrot, "loads", [], raising=False)
    load_plugins.cache_clear()
    load_plugins()
    load_plugins()
    assert vars(fedrot)["loads"] == [1]
    load_plugins.cache_clear()


# Ray


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "no such address"])
def test_a_cluster_that_is_not_there_is_named(address: str) -> None:
    with pytest.raises(fedrot.FedrotError, match="There is no Ray cluster"):
        heard([Job("a", halves, (2,))], Machine(ray=address))


def test_two_nodes_share_the_jobs_and_say_what_they_do_while_they_run(two_nodes: str) -> None:
    times: list[float] = []
    nodes = set()

    def hear(job: Job, said: Any) -> None:
        times.append(time.monotonic())
        nodes.add(said if isinstance(said, str) else None)

    run_jobs([Job(n, where, (3.0,)) for n in "abcd"], Machine(ray=two_nodes), hear, lambda: None)
    assert len(nodes - {None}) == 2
    assert max(times) - min(times) > 2


def test_nodes_of_a_cluster_are_told_the_plugins(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLUGINS, "json")
    assert heard([Job("a", told, (PLUGINS,))], Machine(ray=two_nodes))["a"][0] == "json"


def test_a_process_that_dies_on_a_cluster_ends_its_job_alone(two_nodes: str, tmp_path: Path) -> None:
    jobs = [Job("dead", die, (str(tmp_path / "deaths"),)), Job("2", halves, (2,))]
    found = heard(jobs, Machine(ray=two_nodes))
    assert found["dead"][-1].died
    assert found["2"] == [1, 1, Ended()]
    assert (tmp_path / "deaths").read_text() == "died\n"
