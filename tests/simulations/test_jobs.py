"""Jobs side by side: what they return, how they fail, and two machines that share them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import fedrot
from fedrot.simulations.jobs import (
    FAILURES,
    Job,
    Machine,
    Outcome,
    _ready,
    check_failures,
    noted_failure,
    run_jobs,
)
from fedrot.simulations.plugins import PLUGINS


def double(number: int) -> int:
    return 2 * number


def fail(reason: str) -> None:
    raise ValueError(reason)


def die() -> None:
    os._exit(3)


def note(path: str, name: str) -> list[str]:
    """Append a name to a file after a while; return the names before it."""
    time.sleep(0.2)
    file = Path(path)
    before = file.read_text().split() if file.exists() else []
    with file.open("a") as opened:
        opened.write(f"{name}\n")
    return before


def until(path: str, name: str) -> None:
    """Return once ``note`` has written the name."""
    while not Path(path).exists() or name not in Path(path).read_text().split():
        time.sleep(0.05)


def where(seconds: float) -> str:
    """Return the node of a Ray cluster that works."""
    time.sleep(seconds)
    return str(ray.get_runtime_context().get_node_id())


def outcomes(jobs: list[Job], machine: Machine) -> dict[str, Outcome]:
    return {job.name: outcome for job, outcome in run_jobs(jobs, machine)}


@pytest.mark.parametrize("workers", [1, 2])
def test_every_job_has_an_outcome(workers: int) -> None:
    jobs = [Job(str(i), double, (i,)) for i in range(3)]
    jobs[1:1] = [Job("bad", fail, ("no such data",))]
    found = outcomes(jobs, Machine(workers))
    assert {name: found[name].value for name in "012"} == {"0": 0, "1": 2, "2": 4}
    assert found["bad"].value is None
    assert found["bad"].failure.endswith("ValueError: no such data\n")
    assert "in fail" in found["bad"].failure
    assert all((outcome.failure == "") == (name != "bad") for name, outcome in found.items())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_waits_for_the_one_before_it_even_if_that_fails(workers: int, tmp_path: Path) -> None:
    path = str(tmp_path / "order")
    jobs = [
        Job("b", note, (path, "b"), after="a"),
        Job("d", note, (path, "d"), after="c"),
        Job("a", note, (path, "a")),
        Job("c", fail, ("c",)),
    ]
    found = outcomes(jobs, Machine(workers))
    assert "a" in found["b"].value
    assert found["d"].failure == ""


def test_a_job_waits_for_one_that_runs() -> None:
    first, second = Job("first", double, (1,)), Job("second", double, (2,), after="first")
    other = Job("other", double, (3,))
    assert _ready([second, other], running=[first]) == [other]
    assert _ready([second, other]) == [second, other]


def test_a_job_that_waited_goes_on_before_later_ones(tmp_path: Path) -> None:
    order = str(tmp_path / "order")
    jobs = [Job(name, note, (order, name)) for name in ("first", "third", "last")]
    jobs[1:1] = [
        Job("follower", note, (order, "follower"), after="first"),
        Job("occupied", until, (order, "follower")),
    ]
    outcomes(jobs, Machine(2))
    found = Path(order).read_text().split()
    assert found[:2] == ["first", "follower"]
    assert sorted(found[2:]) == ["last", "third"]  # Two cores do them at the same time.


def test_a_job_whose_process_dies_fails_alone() -> None:
    found = outcomes([Job("dies", die, ()), Job("lives", double, (4,))], Machine(2))
    assert found["lives"].value == 8
    assert "process of the job ended" in found["dies"].failure


def test_nothing_is_left_running_when_the_caller_stops() -> None:
    running = run_jobs(
        [Job("a", double, (1,)), *(Job(f"s{i}", time.sleep, (60,)) for i in range(4))], Machine(2)
    )
    assert next(running)[1].value == 2
    running.close()  # type: ignore[attr-defined]
    assert not ray.is_initialized()


def test_a_cluster_that_is_not_there_is_named() -> None:
    with pytest.raises(fedrot.FedrotError, match=r"no Ray cluster at '127\.0\.0\.1:1'"):
        outcomes([Job("a", double, (1,))], Machine(address="127.0.0.1:1"))


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """Start two Ray nodes of one core each; return their address."""
    # In a folder of their own: other tests run beside this one, and Ray joins the cluster that its
    # folder names. A short one: it becomes part of the names of sockets.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1)
        try:
            yield cluster.address
        finally:
            cluster.shutdown()


def test_two_nodes_share_the_jobs(two_nodes: str) -> None:
    jobs = [Job(str(i), where, (0.5,)) for i in range(6)]
    found = outcomes(jobs, Machine(address=two_nodes))
    assert len({outcome.value for outcome in found.values()}) == 2


def test_nodes_of_a_cluster_are_told_the_plugins(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLUGINS, "json,math")
    found = outcomes([Job("plug-ins", os.getenv, (PLUGINS,))], Machine(address=two_nodes))
    assert found["plug-ins"] == Outcome("json,math", "")


def test_jobs_of_this_machine_do_not_go_to_a_cluster_on_it(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    found = outcomes([Job("a", double, (1,))], Machine(2))
    assert found["a"].value == 2


def test_the_traceback_of_an_earlier_attempt_goes_when_the_job_succeeds(tmp_path: Path) -> None:
    failed, fine = Outcome(None, "Traceback\n  in work\nValueError: no room\n"), Outcome(1, "")
    for name in ("a", "b"):
        said = noted_failure(tmp_path, name, f"cell {name}", failed)
        assert said == f"FAILED, see {tmp_path / FAILURES / name}.txt: ValueError: no room"
    assert (tmp_path / FAILURES / "b.txt").read_text() == f"cell b\n\n{failed.failure}"
    assert noted_failure(tmp_path, "a", "cell a", fine) == ""
    assert [file.name for file in (tmp_path / FAILURES).iterdir()] == ["b.txt"]
    assert noted_failure(tmp_path, "b", "cell b", fine) == ""
    assert noted_failure(tmp_path, "b", "cell b", fine) == ""
    assert list(tmp_path.iterdir()) == []


def test_failed_jobs_are_counted_and_no_failure_is_no_error(tmp_path: Path) -> None:
    check_failures(0, 3, "cells", tmp_path)
    with pytest.raises(RuntimeError, match=r"^1 of 3 cells failed; the tracebacks are in .*failures"):
        check_failures(1, 3, "cells", tmp_path)
