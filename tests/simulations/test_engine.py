"""Jobs side by side: what they say, how they fail, and two machines that share them."""

import os
import signal
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest
import ray

import fedrot
from fedrot.simulations import engine
from fedrot.simulations.engine import Ended, Job, Machine, run_jobs
from fedrot.simulations.environment import PLUGINS, load_plugins, prepare_environment


def halves(number, tell):
    """Say two numbers, and fail if there is a rest."""
    tell(number // 2)
    tell(number // 2)
    if number % 2:
        raise ValueError("no third half")


def die(path, tell):
    """End the process, and note that in a file."""
    tell("alive")
    time.sleep(0.2)
    with Path(path).open("a") as file:
        file.write("died\n")
    os._exit(3)


def interrupted(tell):
    raise KeyboardInterrupt


def sleep(seconds, tell):
    """Say the plug-ins, and who works: a node of a cluster, or a process."""
    tell(os.getenv(PLUGINS))
    tell(
        str(ray.get_runtime_context().get_node_id())
        if ray.is_initialized()
        else os.getpid()
    )
    time.sleep(seconds)


def running(path, name, tell):
    """Say when the job began and ended; the first one waits until another one runs
    beside it.
    """
    began = time.monotonic()
    Path(path, name).touch()
    while len([*Path(path).iterdir()]) < 2 and time.monotonic() < began + 60:
        time.sleep(0.01)
    tell((began, time.monotonic()))


def workers():
    """Return the processes for jobs that are running."""
    children = psutil.Process().children(recursive=True)
    return {child for child in children if "--multiprocessing-fork" in child.cmdline()}


def heard(jobs, machine, tick=lambda: None):
    """Return what each job said, by name."""
    found = {job.name: [] for job in jobs}
    run_jobs(jobs, machine, lambda job, said: found[job.name].append(said), tick)
    return found


ONE = Machine(1)
TWO = Machine(2)


@pytest.fixture(params=["processes", "ray"])
def machine(request):
    return (
        TWO
        if request.param == "processes"
        else Machine(ray=request.getfixturevalue("two_nodes"))
    )


def test_jobs_of_this_process_say_what_they_do_and_how_they_end():
    sound(heard([Job(str(number), halves, (number,)) for number in (2, 5, 6)], ONE))


def sound(found):
    assert (found["2"], found["6"]) == ([1, 1, Ended()], [3, 3, Ended()])
    *said, end = found["5"]
    assert (said, end.died, "in halves" in end.failure) == ([2, 2], False, True)
    assert end.failure.endswith("ValueError: no third half\n")


def test_a_job_whose_process_dies_ends_alone_and_is_not_tried_again(machine, tmp_path):
    file = tmp_path / "deaths"
    jobs = [
        Job("dead", die, (str(file),)),
        *(Job(str(n), halves, (n,)) for n in (2, 5, 6)),
    ]
    found = heard(jobs, machine)
    said, end = found["dead"]
    assert (said, end.died) == ("alive", True)
    assert "code 3" in end.failure or machine != TWO
    assert file.read_text() == "died\n"
    sound(found)


def test_a_process_that_dies_between_two_jobs_is_replaced():
    processes = engine._Processes(1)
    job = Job("2", halves, (2,))
    for _ in range(2):
        processes.start(job)
        said = []
        while Ended() not in said:
            said += [what for _, what in processes.heard()]
        assert said == [1, 1, Ended()]
        processes.running.clear()
        (process,) = workers()
        process.kill()
        process.wait()
    processes.close()


def test_two_places_share_the_jobs_and_the_caller_hears_and_looks_while_they_run(
    machine, monkeypatch
):
    monkeypatch.setenv(PLUGINS, "json")
    said, when, ticks = {}, [], []

    def hear(job, what):
        said.setdefault(job.name, []).append(what)
        when.append(time.monotonic())

    run_jobs(
        [Job(n, sleep, (1.5,)) for n in "ab"], machine, hear, lambda: ticks.append(None)
    )
    plugins, places, ends = map(list, zip(*said.values(), strict=True))
    assert (plugins, ends) == (["json"] * 2, [Ended()] * 2)
    assert len({*places}) == 2
    assert max(when) - min(when) > 1
    assert len(ticks) >= 3


def test_no_more_jobs_run_than_there_are_workers_and_they_begin_in_order(
    tmp_path,
):
    found = heard([Job(name, running, (str(tmp_path), name)) for name in "abcd"], TWO)
    times = {name: said[0] for name, said in found.items()}
    beside = [
        sum(began <= one < ended for began, ended in times.values())
        for one, _ in times.values()
    ]
    assert max(beside) == 2
    assert min(times["c"][0], times["d"][0]) >= min(times["a"][1], times["b"][1])


def test_nothing_is_left_running_when_the_caller_stops():
    def stop(job, said):
        raise KeyboardInterrupt

    before = workers()
    with pytest.raises(KeyboardInterrupt):
        run_jobs([Job(name, sleep, (60.0,)) for name in "abc"], TWO, stop, lambda: None)
    assert workers() <= before


def test_ctrl_c_waits_until_a_process_has_started(
    monkeypatch,
):
    """The signal of a terminal goes to any thread, and Python raises it in the main
    one.
    """
    start, stop, ended = SpawnProcess.start, signal.SIGINT, list[None]()

    def interrupted_start(own):
        os.kill(os.getpid(), stop)
        time.sleep(0.2)
        start(own)
        ended.append(None)

    monkeypatch.setattr(SpawnProcess, "start", interrupted_start)
    before = signal.signal(
        stop, signal.default_int_handler
    )  # A shell's background ignores it.
    end = threading.Event()
    threading.Thread(target=end.wait).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            heard([Job("a", sleep, (0.0,)), Job("b", sleep, (0.0,))], TWO)
    finally:
        signal.signal(stop, before)
        end.set()
    assert len(ended) == 1
    assert not workers()
    assert stop not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_is_no_failure_of_a_job():
    with pytest.raises(KeyboardInterrupt):
        heard([Job("a", interrupted, ())], ONE)


def test_without_a_number_of_workers_there_is_one_per_core(
    monkeypatch,
):
    monkeypatch.setattr(engine.os, "cpu_count", lambda: 3)
    assert [Machine(workers).places(9) for workers in (None, 2, 20)] == [3, 2, 9]
    monkeypatch.setattr(engine.os, "cpu_count", lambda: None)
    assert Machine().places(9) == 1


def test_plug_ins_are_imported_once(monkeypatch, tmp_path):
    (tmp_path / "counting_plugin.py").write_text(
        "import fedrot\nfedrot.loads.append(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS, "counting_plugin,")
    monkeypatch.setattr(fedrot, "loads", [], raising=False)
    load_plugins.cache_clear()
    load_plugins()
    load_plugins()
    assert vars(fedrot)["loads"] == [1]
    load_plugins.cache_clear()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "no such address"])
def test_a_cluster_that_is_not_there_is_named(address):
    with pytest.raises(fedrot.FedrotError, match="Ray cluster"):
        heard([Job("a", halves, (2,))], Machine(ray=address))


def test_nothing_reports_home_unless_the_user_says_so(
    monkeypatch,
):
    wanted = {
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for name in wanted:
        # Set before it is deleted, so that its value is restored.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    prepare_environment()
    wanted["TRANSFORMERS_VERBOSITY"] = "info"
    assert {name: os.environ.get(name) for name in wanted} == wanted
