"""``run_jobs``: jobs in this process, in processes of this machine, or as tasks of a
Ray cluster.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

from fedrot.errors import FedrotError
from fedrot.simulations.environment import PLUGINS

#: Seconds between two looks at running jobs.
PAUSE = 0.5

#: Receives what a job says while it runs.
Tell: TypeAlias = Callable[[Any], None]


@dataclass(frozen=True)
class Job:
    """One job. The function, at the top of a module, and its arguments are pickled for
    other processes.

    Attributes:
        work: is called with ``arguments`` and a function that takes what it says:
            picklable values.
    """

    name: str
    work: Callable[..., None]
    arguments: tuple[Any, ...] = field(hash=False)


@dataclass(frozen=True)
class Ended:
    """The last word of a job: the traceback if it failed, and whether its process
    died.
    """

    failure: str = ""
    died: bool = False


@dataclass(frozen=True)
class Machine:
    """Where jobs run.

    Attributes:
        workers: jobs at a time on this machine; None: one per core; 1: jobs run in this
            process.
        ray: address of a Ray cluster, all of whose cores are used; empty for this
            machine.
        grid: an ``OrderedGrid`` of the clients, for one worker; None: clients in the
            jobs' processes.
    """

    workers: int | None = None
    ray: str = ""
    grid: Any = None

    def places(self, jobs: int) -> int:
        """Return how many of ``jobs`` run at the same time on this machine."""
        return max(1, min(self.workers or os.cpu_count() or 1, jobs))


def run_jobs(
    jobs: Sequence[Job],
    machine: Machine,
    hear: Callable[[Job, Any], None],
    tick: Callable[[], None],
) -> None:
    """Run all jobs; return when they have ended.

    Jobs start in the order of the list. If the process of a job dies, only this job
    ends, and it is not tried again. After an exception, also Ctrl-C, running jobs are
    stopped and no other is started.

    Args:
        hear: called with a job and what it said, at the end an ``Ended``.
        tick: called about every ``PAUSE`` seconds.

    Raises:
        FedrotError: there is no Ray cluster at the machine's address.
    """
    count = machine.places(len(jobs))
    if not machine.ray and count <= 1:
        for job in jobs:
            attempt(job, partial(hear, job))
        return
    waiting = deque(jobs)
    with closing(_Tasks(machine.ray) if machine.ray else _Processes(count)) as engine:
        while waiting or engine.running:
            while waiting and len(engine.running) < engine.places():
                engine.start(waiting.popleft())
            for place, said in engine.heard():
                job = (
                    engine.running.pop(place)
                    if isinstance(said, Ended)
                    else engine.running[place]
                )
                hear(job, said)
            tick()


def attempt(job: Job, tell: Tell) -> None:
    """Run a job; an exception becomes its failure."""
    failure = ""
    try:
        job.work(*job.arguments, tell)
    except Exception:
        failure = traceback.format_exc()
    tell(Ended(failure))


class _Processes:
    """Jobs in new processes, which wait for the next job on a pipe; ``running`` has the
    jobs.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        self.running: dict[Connection, Job] = {}

    def places(self) -> int:
        return self._count

    def start(self, job: Job) -> None:
        pipe = next((own for own in self._processes if own not in self.running), None)
        if pipe is None:
            pipe, theirs = self._spawn.Pipe()
            process = self._spawn.Process(target=_serve, args=(theirs,), daemon=True)
            with _no_interrupt():
                process.start()
                self._processes[pipe] = process
            theirs.close()  # Else this end would not see that the process has ended.
        self.running[pipe] = job
        pipe.send(job)

    def heard(self) -> Iterator[tuple[Any, Any]]:
        """Yield keys of ``running`` and what these jobs said, after ``PAUSE`` seconds
        at most.
        """
        for pipe in wait([*self.running], PAUSE):
            assert isinstance(pipe, Connection)
            try:
                said = pipe.recv()
            except (EOFError, OSError):
                process = self._processes.pop(pipe)
                process.join()
                said = Ended(
                    f"The process of the job ended with code {process.exitcode}.",
                    died=True,
                )
            yield pipe, said

    def close(self) -> None:
        for pipe, process in self._processes.items():
            process.kill()
            process.join()
            pipe.close()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end; processes begun inside never get a
    terminal's Ctrl-C.
    """
    came = list[int]()
    resource_tracker.ensure_running()  # Its start would unblock the signal.
    # Processes inherit the mask: this one ends them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # The mask holds for one thread; another one's signal is handled in the main thread
    # all the same.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    handlers = {
        one: signal.signal(one, lambda number, _: came.append(number))
        for one in numbers
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for arrived in came:
            signal.raise_signal(arrived)


def _serve(pipe: Connection) -> None:
    """Run the jobs that come through a pipe until the other end is closed, as by the
    parent's death.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    # tqdm's default lock is a semaphore of the system, which would remain after the
    # process is killed.
    tqdm.set_lock(threading.RLock())
    with suppress(EOFError, OSError):
        while True:
            attempt(pipe.recv(), pipe.send)


class _Tasks:
    """Jobs as tasks of a Ray cluster, which stream what they say."""

    def __init__(self, address: str) -> None:
        """Connect to a cluster; raises ``FedrotError`` if there is none."""
        import ray

        self._ray: Any = ray  # its types know no streams
        self.running = dict[Any, Job]()
        host, _, port = address.removeprefix("ray://").rpartition(":")
        plugins = os.environ.get(PLUGINS)
        # Nodes of a running cluster do not inherit this process's environment.
        told = {"env_vars": {PLUGINS: plugins}} if plugins else None
        ours = signal.getsignal(signal.SIGTERM)
        try:
            if host and port.isdecimal():  # Ray would try for minutes.
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(address=address, log_to_driver=False, runtime_env=told)
        except (OSError, ValueError) as error:
            raise FedrotError(
                f"There is no Ray cluster at '{address}': {error} Start one with 'ray "
                "start --head', or leave ray out to use this machine."
            ) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)  # Ray's own handler exits.
        options = {"num_cpus": 1, "max_retries": 0, "num_returns": "streaming"}
        self._task = self._ray.remote(**options)(_said)

    def places(self) -> int:
        # At most one job per core is submitted, so that jobs start in the order of the
        # list.
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def start(self, job: Job) -> None:
        self.running[self._task.remote(job)] = job

    def heard(self) -> Iterator[tuple[Any, Any]]:
        found, _ = self._ray.wait(
            [*self.running], num_returns=1, timeout=PAUSE, fetch_local=False
        )
        for stream in found:
            try:
                said = self._ray.get(next(stream))
            except (StopIteration, self._ray.exceptions.RayError) as error:
                said = Ended(
                    f"The task of the job ended: {error or 'it was stopped'}", died=True
                )
            yield stream, said

    def close(self) -> None:
        self._ray.shutdown()


def _said(job: Job) -> Iterator[Any]:
    """Run a job in a thread, and yield what it says."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=attempt, args=(job, said.put), daemon=True).start()
    while not isinstance(last := said.get(), Ended):
        yield last
    yield last
