"""Jobs side by side: in processes with one thread each, or as tasks of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from fedrot._io import write_text
from fedrot.errors import FedrotError
from fedrot.simulations.plugins import PLUGINS

#: Seconds between two looks at what the jobs that run have finished.
PAUSE = 0.5


@dataclass(frozen=True)
class Job:
    """One job of a grid.

    Attributes:
        name: of its own in the grid.
        work: a function of a module that returns or yields the parts of a result; it and its arguments
            travel to other processes.
        cost: how long it takes, in any unit that the jobs of the grid share.
    """

    name: str
    work: Callable[..., Iterable[Any]]
    arguments: tuple[Any, ...]
    cost: float = 1.0


@dataclass
class Outcome:
    """The parts of a job's result, the traceback if it failed, and whether its process died."""

    parts: list[Any] = field(default_factory=list)
    failure: str = ""
    died: bool = False


@dataclass(frozen=True)
class Machine:
    """Where jobs run.

    Attributes:
        workers: jobs at a time on this machine, one per core if None; 1 works in this process.
        address: of a Ray cluster, whose cores all work; empty for this machine.
        gpus: GPUs per job: a share of one, or a whole number. Ray lends them, also on this machine.
    """

    workers: int | None = None
    address: str = ""
    gpus: float = 0.0


#: Starts a job, and returns its outcome to come.
Start: TypeAlias = Callable[[Job], Future[Outcome]]

#: The folder of tracebacks, in the folder of a grid.
FAILURES = "failures"


def noted_failure(out: Path, name: str, title: str, failure: str) -> str:
    """Write the traceback of a job, or delete what an earlier attempt left; return the failure in words.

    It is empty if the job succeeded.
    """
    file = out / FAILURES / f"{name}.txt"
    if failure:
        file.parent.mkdir(exist_ok=True)
        write_text(file, f"{title}\n\n{failure}")
        return f"FAILED, see {file}: {failure.strip().splitlines()[-1]}"
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


def attempted(job: Job, tick: Callable[[], None] = lambda: None) -> Outcome:
    """Do a job, and call ``tick`` after every part; what the job raises becomes its outcome."""
    outcome = Outcome()
    for part in _parts(job, outcome):
        outcome.parts.append(part)
        tick()
    return outcome


def _parts(job: Job, outcome: Outcome) -> Iterator[Any]:
    """Yield the parts of a job's result until it fails."""
    try:
        yield from job.work(*job.arguments)
    except Exception:
        outcome.failure = traceback.format_exc()


def run_jobs(
    jobs: Sequence[Job], machine: Machine, tick: Callable[[], None] = lambda: None
) -> Generator[tuple[Job, Outcome], None, None]:
    """Do all jobs, and yield them with their outcomes as they end.

    They begin in the order of the list. One whose process dies fails alone, and is not tried again. When
    the iterator is closed, jobs that run are stopped and the others are not begun.

    Args:
        tick: called while jobs run, so that the caller sees what they have written.

    Raises:
        FedrotError: there is no Ray cluster at the machine's address.
    """
    count = min(machine.workers or os.cpu_count() or 1, len(jobs))
    on_ray = bool(machine.address or machine.gpus)
    if count <= 1 and not (on_ray and jobs):
        yield from ((job, attempted(job, tick)) for job in jobs)
        return
    with _on_ray(machine) if on_ray else _in_processes(count) as (start, places):
        waiting, running = list(jobs), dict[Future[Outcome], Job]()
        while waiting or running:
            while waiting and len(running) < places():
                job = waiting.pop(0)
                running[start(job)] = job
            ended, _ = wait(running, PAUSE, FIRST_COMPLETED)
            tick()
            for future in ended:
                yield running.pop(future), _outcome(future)


def _outcome(ended: Future[Outcome]) -> Outcome:
    """Return the outcome of a job; that of one whose process died names the reason."""
    error = ended.exception()
    if error is None:
        return ended.result()
    return Outcome(failure=f"The process of the job ended: {error}", died=True)


@contextmanager
def _in_processes(count: int) -> Iterator[tuple[Start, Callable[[], int]]]:
    """Work in ``count`` new processes of this machine, each a pool of its own: it dies alone."""
    spawn = multiprocessing.get_context("spawn")
    there, here = spawn.Pipe(duplex=False)
    last: dict[ProcessPoolExecutor, Future[Outcome]] = {}

    def start(job: Job) -> Future[Outcome]:
        idle = (pool for pool, future in last.items() if future.done() and not future.exception())
        pool = next(idle, None) or ProcessPoolExecutor(1, spawn, _end_with, (there,))
        with _without_ctrl_c():
            last[pool] = pool.submit(attempted, job)
        return last[pool]

    try:
        yield start, lambda: count
    except BaseException:
        here.close()  # What runs ends at once.
        raise
    finally:
        for pool in last:
            pool.shutdown()
        here.close()
        there.close()


def _end_with(parent: Connection) -> None:
    """End this process at once when its parent closes the other end of a pipe, or ends itself."""

    def end() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        os._exit(1)

    from tqdm import tqdm  # type: ignore[import-untyped]

    # Its default lock is a semaphore of the system, which a process that ends like that would leave.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=end, daemon=True).start()


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Start a process that a Ctrl-C at the terminal does not reach: it inherits the mask."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _on_ray(machine: Machine) -> Iterator[tuple[Start, Callable[[], int]]]:
    """Work as tasks of a Ray cluster, or of Ray on this machine."""
    import ray

    task = ray.remote(num_cpus=1, num_gpus=machine.gpus, max_retries=0)(attempted)
    ours = signal.getsignal(signal.SIGTERM)
    _connect(machine)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ours)  # Ray's own handler exits.
    try:
        # No more at a time than there are cores, so that jobs start in the order of the list.
        yield (
            lambda job: task.remote(job).future(),
            lambda: max(1, int(ray.cluster_resources().get("CPU", 1))),
        )
    finally:
        ray.shutdown()


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
