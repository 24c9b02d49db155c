"""Jobs of a grid: run side by side as Ray tasks, each in a process with one thread."""

from __future__ import annotations

import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrot._io import write_text
from fedrot.errors import FedrotError
from fedrot.simulations.plugins import PLUGINS


@dataclass(frozen=True)
class Job:
    """One job of a grid.

    Attributes:
        name: of its own in the grid.
        work: a function of a module, with its arguments: both travel to other processes.
        cost: how long it takes, in any unit that the jobs of the grid share.
        after: the name of a job that has to end first, whether it succeeds or not; empty for none.
    """

    name: str
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    cost: float = 1.0
    after: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a job returned, and the traceback if it failed (empty if not)."""

    value: Any
    failure: str


@dataclass(frozen=True)
class Machine:
    """Where jobs run.

    Attributes:
        workers: jobs at a time on this machine, one per core if None; 1 works in this process.
        address: of a Ray cluster, whose cores all work; empty for this machine.
        gpus: GPUs per job: a share of one, or a whole number.
    """

    workers: int | None = None
    address: str = ""
    gpus: float = 0.0


#: The folder of tracebacks, in the folder of a grid.
FAILURES = "failures"


def noted_failure(out: Path, name: str, title: str, outcome: Outcome) -> str:
    """Write why a job failed, or delete what an earlier attempt left; return the failure in words.

    It is empty if the job succeeded.
    """
    file = out / FAILURES / f"{name}.txt"
    if outcome.failure:
        file.parent.mkdir(exist_ok=True)
        write_text(file, f"{title}\n\n{outcome.failure}")
        return f"FAILED, see {file}: {outcome.failure.strip().splitlines()[-1]}"
    file.unlink(missing_ok=True)
    with suppress(OSError):
        file.parent.rmdir()
    return ""


def check_failures(failed: int, of: int, what: str, out: Path) -> None:
    """Raise ``RuntimeError`` if jobs failed."""
    if failed:
        raise RuntimeError(
            f"{failed} of {of} {what} failed; the tracebacks are in {out / FAILURES}. Repeat the "
            "command to try them again."
        )


def attempted(job: Job) -> Outcome:
    """Do a job; what it raises becomes its outcome."""
    try:
        return Outcome(job.work(*job.arguments), "")
    except Exception:
        return Outcome(None, traceback.format_exc())


def run_jobs(jobs: Sequence[Job], machine: Machine) -> Iterator[tuple[Job, Outcome]]:
    """Do all jobs, and yield them with their outcomes as they end.

    When the iterator is closed, jobs that run are stopped and the others are not begun.

    Raises:
        FedrotError: there is no Ray cluster at the machine's address.
    """
    if machine.workers == 1 and not machine.address and not machine.gpus:
        waiting = list(jobs)
        while waiting:
            job = _ready(waiting)[0]
            waiting.remove(job)
            yield job, attempted(job)
    elif jobs:
        yield from _on_ray(jobs, machine)


def _ready(waiting: Sequence[Job], running: Iterable[Job] = ()) -> list[Job]:
    """Return the jobs that wait for none of the others."""
    unfinished = {job.name for job in (*waiting, *running)}
    return [job for job in waiting if job.after not in unfinished]


def _on_ray(jobs: Sequence[Job], machine: Machine) -> Iterator[tuple[Job, Outcome]]:
    import ray

    task = ray.remote(num_cpus=1, num_gpus=machine.gpus, max_retries=0)(attempted)
    with keeping_sigterm():
        _connect(machine)
    try:
        waiting, running = list(jobs), dict[Any, Job]()
        while waiting or running:
            # No more at a time than there are cores, so that jobs start in the order of the list.
            cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
            ready = _ready(waiting, running.values())[: max(0, cores - len(running))]
            waiting = [job for job in waiting if job not in ready]
            running |= {task.remote(job): job for job in ready}
            (ended,), _ = ray.wait(list(running), num_returns=1)
            yield running.pop(ended), _outcome(ended)
    finally:
        ray.shutdown()


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM where Ray starts: Ray's own ones exit or abort."""
    from ray._private import utils

    ours = signal.getsignal(signal.SIGTERM)
    theirs, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)


def _connect(machine: Machine) -> None:
    import ray

    if machine.address:
        try:
            _check_reachable(machine.address)
            plugins = os.environ.get(PLUGINS)
            # Nodes that run already have an environment of their own.
            told = {"env_vars": {PLUGINS: plugins}} if plugins else None
            ray.init(address=machine.address, log_to_driver=False, runtime_env=told)
        except (OSError, ValueError) as error:
            raise FedrotError(
                f"There is no Ray cluster at '{machine.address}': {error} Start one with 'ray start "
                "--head', or leave --ray out to use this machine."
            ) from error
    else:
        # "local": without it, Ray joins a cluster that somebody else runs on this machine.
        ray.init("local", num_cpus=machine.workers, include_dashboard=False, log_to_driver=False)


def _check_reachable(address: str) -> None:
    """Raise ``OSError`` if nobody answers at ``host:port``; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _outcome(ended: Any) -> Outcome:
    """Return the outcome of a task; that of one whose process died names the reason."""
    import ray

    try:
        outcome: Outcome = ray.get(ended)
    except ray.exceptions.RayError as error:
        return Outcome(None, f"The process of the job ended: {error}")
    return outcome
