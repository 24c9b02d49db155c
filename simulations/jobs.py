"""Jobs in parallel: in processes with one thread each, or as tasks of a Ray cluster."""

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

#: Seconds between two calls of ``tick``.
PAUSE = 0.5


@dataclass(frozen=True)
class Job:
    """One job of a grid.

    Attributes:
        name: the job's name, unique in the grid.
        work: returns or yields the parts of a result. The function, at the top of a module, and its
            arguments are pickled for other processes.
        cost: expected duration, in a unit that all jobs of the grid share.
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
        workers: jobs at a time on this machine; None: one per core; 1: jobs run in this process.
        address: address of a Ray cluster, all of whose cores are used; empty for this machine.
        gpus: GPUs per job: a fraction of one, or a whole number. Ray assigns them, also on this machine.
    """

    workers: int | None = None
    address: str = ""
    gpus: float = 0.0


#: Starts a job, and returns the future of its outcome.
Start: TypeAlias = Callable[[Job], Future[Outcome]]

#: The folder of tracebacks, in the folder of a grid.
FAILURES = "failures"


def noted_failure(out: Path, name: str, title: str, failure: str) -> str:
    """Write the traceback of a failed job, and return a sentence about it.

    If the job succeeded, delete the traceback of an earlier attempt, and return an empty text.
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
    """Run a job, and call ``tick`` after every part; an exception of the job becomes its failure."""
    outcome = Outcome()
    for part in _parts(job, outcome):
        outcome.parts.append(part)
        tick()
    return outcome


def _parts(job: Job, outcome: Outcome) -> Iterator[Any]:
    """Yield the parts of a job's result until the job ends or fails."""
    try:
        yield from job.work(*job.arguments)
    except Exception:
        outcome.failure = traceback.format_exc()


def run_jobs(
    jobs: Sequence[Job], machine: Machine, tick: Callable[[], None] = lambda: None
) -> Generator[tuple[Job, Outcome], None, None]:
    """Run all jobs, and yield each with its outcome when it ends.

    Jobs start in the order of the list. If the process of a job dies, only this job fails, and it is not
    tried again. When the iterator is closed, running jobs are stopped and the others are not started.

    Args:
        tick: called while jobs run, for example to show what they have written.

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
    """Return the outcome of a job; if its process died, an outcome with the reason."""
    error = ended.exception()
    if error is None:
        return ended.result()
    return Outcome(failure=f"The process of the job ended: {error}", died=True)


@contextmanager
def _in_processes(count: int) -> Iterator[tuple[Start, Callable[[], int]]]:
    """Run jobs in ``count`` new processes. Each is a pool of its own, so that one death ends one job."""
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
        here.close()  # Ends the running processes at once.
        raise
    finally:
        for pool in last:
            pool.shutdown()
        here.close()
        there.close()


def _end_with(parent: Connection) -> None:
    """End this process at once when its parent ends or closes the other end of a pipe."""

    def end() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        os._exit(1)

    from tqdm import tqdm  # type: ignore[import-untyped]

    # tqdm's default lock is a semaphore of the system, which would remain after os._exit.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=end, daemon=True).start()


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block SIGINT, so that processes started here inherit the mask and ignore Ctrl-C."""
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
    """Run jobs as tasks of a Ray cluster, or of Ray on this machine."""
    import ray

    task = ray.remote(num_cpus=1, num_gpus=machine.gpus, max_retries=0)(attempted)
    ours = signal.getsignal(signal.SIGTERM)
    _connect(machine)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ours)  # Ray's own handler exits.
    try:
        # At most one job per core is submitted, so that jobs start in the order of the list.
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
            # Nodes of a running cluster do not inherit this process's environment.
            told = {"env_vars": {PLUGINS: plugins}} if plugins else None
            ray.init(address=machine.address, log_to_driver=False, runtime_env=told)
        except (OSError, ValueError) as error:
            raise FedrotError(
                f"There is no Ray cluster at '{machine.address}': {error} Start one with 'ray start "
                "--head', or omit --ray to use this machine."
            ) from error
    else:
        # Without "local", Ray connects to a cluster that already runs on this machine.
        ray.init("local", num_cpus=machine.workers, include_dashboard=False, log_to_driver=False)


def _check_reachable(address: str) -> None:
    """Raise ``OSError`` if no connection to ``host:port`` is possible; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()
