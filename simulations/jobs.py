"""Jobs of a grid: run side by side as Ray tasks, each in a process with one thread."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from fedrot._io import write_text
from fedrot.errors import FedrotError


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
    """What a job returned, the traceback if it failed (empty if not), and its wall time in seconds."""

    value: Any
    failure: str
    seconds: float


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


def failure_file(out: Path, name: str) -> Path:
    """Return the file of a job's traceback."""
    return out / FAILURES / f"{name}.txt"


def write_failure(file: Path, title: str, traceback: str) -> None:
    """Write why a job failed."""
    file.parent.mkdir(exist_ok=True)
    write_text(file, f"{title}\n\n{traceback}")


def forget_failure(file: Path) -> None:
    """Delete the traceback of a job that succeeded now, and the folder if it was the last one."""
    file.unlink(missing_ok=True)
    with suppress(OSError):
        file.parent.rmdir()


def last_line(failure: str) -> str:
    """Return the reason at the end of a traceback."""
    return failure.strip().splitlines()[-1]


def attempted(job: Job) -> Outcome:
    """Do a job; what it raises becomes its outcome."""
    start = perf_counter()
    try:
        return Outcome(job.work(*job.arguments), "", perf_counter() - start)
    except Exception:
        return Outcome(None, traceback.format_exc(), perf_counter() - start)


def run_jobs(jobs: Sequence[Job], machine: Machine) -> Iterator[tuple[Job, Outcome]]:
    """Do all jobs, and yield them with their outcomes as they end.

    When the iterator is closed, jobs that run are stopped and the others are not begun.

    Raises:
        FedrotError: there is no Ray cluster at the machine's address.
    """
    if machine.workers == 1 and not machine.address and not machine.gpus:
        yield from ((job, attempted(job)) for job in jobs)
    elif jobs:
        yield from _on_ray(jobs, machine)


def _on_ray(jobs: Sequence[Job], machine: Machine) -> Iterator[tuple[Job, Outcome]]:
    import ray

    task = ray.remote(num_cpus=1, num_gpus=machine.gpus, max_retries=0)(attempted)
    _connect(machine)
    try:
        waiting, running = list(jobs), dict[Any, Job]()
        while waiting or running:
            unfinished = {job.name for job in (*waiting, *running.values())}
            ready = [job for job in waiting if job.after not in unfinished]
            waiting = [job for job in waiting if job.after in unfinished]
            running |= {task.remote(job): job for job in ready}
            (ended,), _ = ray.wait(list(running), num_returns=1)
            yield running.pop(ended), _outcome(ended)
    finally:
        ray.shutdown()


def _connect(machine: Machine) -> None:
    import ray

    if machine.address:
        try:
            _check_reachable(machine.address)
            ray.init(address=machine.address, log_to_driver=False)
        except (OSError, ValueError) as error:
            raise FedrotError(
                f"There is no Ray cluster at '{machine.address}': {error} Start one with 'ray start "
                "--head', or leave --ray out to use this machine."
            ) from error
    else:
        ray.init(num_cpus=machine.workers, include_dashboard=False, log_to_driver=False)


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
        return Outcome(None, f"The process of the job ended: {error}", 0.0)
    return outcome
