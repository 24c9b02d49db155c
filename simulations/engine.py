"""``run_jobs``: jobs in this process, in others of this machine, or on a Ray cluster.

The processes are not those of ``concurrent.futures``: there, one dead process ends the
whole pool, and nothing tells which job it had. Here each process has its own pipe. The
job of a dead process is known and fails alone, and jobs can report while they run.
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
from typing import Any

from fedrot.errors import FedrotError
from fedrot.simulations.environment import PLUGINS

#: Seconds between two looks at running jobs.
PAUSE = 0.5

#: Receives the messages of a job while it runs: small picklable objects.
Tell = Callable[[Any], None]


@dataclass(frozen=True)
class Job:
    """One job.

    The function, at the top of a module, and its arguments are pickled for other
    processes.

    Attributes:
        work: is called with ``arguments`` and a ``Tell`` for its messages.
    """

    name: str
    work: Callable[..., None]
    arguments: tuple[Any, ...] = field(hash=False)


@dataclass(frozen=True)
class Ended:
    """The last message of a job.

    Attributes:
        failure: the traceback if it failed.
        died: whether its process died.
    """

    failure: str = ""
    died: bool = False


@dataclass(frozen=True)
class Machine:
    """Where jobs run.

    Attributes:
        workers: jobs at a time on this machine. None is one per core; with 1, jobs run
            in this process.
        ray: address of a Ray cluster, all of whose cores are used; empty for this
            machine.
        grid: an ``OrderedGrid`` of the clients, for one worker. With None, clients run
            in the jobs' processes.
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
        hear: called with a job and each of its messages, the last one an ``Ended``.
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
    engine = _Tasks(machine.ray) if machine.ray else _Processes(count)
    running = engine.running
    with closing(engine):
        while waiting or running:
            while waiting and len(running) < engine.places():
                engine.start(waiting.popleft())
            for place, message in engine.heard():
                job = running[place]
                if isinstance(message, Ended):
                    del running[place]
                hear(job, message)
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
    """Jobs in new processes, which wait for the next job on a pipe.

    ``running`` has the job of each busy process.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        self.running: dict[Connection, Job] = {}

    def places(self) -> int:
        return self._count

    def start(self, job: Job) -> None:
        for pipe in self._processes.keys() - self.running.keys():
            # An idle process may have died.
            with suppress(OSError):
                pipe.send(job)
                self.running[pipe] = job
                return
        pipe, other_end = self._spawn.Pipe()
        process = self._spawn.Process(target=_serve, args=(other_end,), daemon=True)
        with _no_interrupt():
            process.start()
            self._processes[pipe] = process
        other_end.close()  # Else this end would not see that the process has ended.
        self.running[pipe] = job
        pipe.send(job)

    def heard(self) -> Iterator[tuple[Any, Any]]:
        """Yield keys of ``running`` and messages of their jobs.

        It waits for ``PAUSE`` seconds at most.
        """
        for pipe in wait([*self.running], PAUSE):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                process = self._processes.pop(pipe)
                process.join()
                message = Ended(
                    f"The process of the job ended with code {process.exitcode}.",
                    died=True,
                )
            yield pipe, message

    def close(self) -> None:
        for pipe, process in self._processes.items():
            process.kill()
            process.join()
            pipe.close()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end.

    Processes that begin inside never get a terminal's Ctrl-C.
    """
    arrived = list[int]()
    resource_tracker.ensure_running()  # Its start would unblock the signal.
    # Processes inherit the mask: this one ends them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # The mask holds for one thread; another one's signal is handled in the main thread
    # all the same.
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    handlers = {
        number: signal.signal(number, lambda came, _: arrived.append(came))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for came in arrived:
            signal.raise_signal(came)


def _serve(pipe: Connection) -> None:
    """Run the jobs that come through a pipe until its other end is closed.

    The parent's death closes it, too.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    # tqdm's default lock is a semaphore of the system, which would remain after the
    # process is killed.
    tqdm.set_lock(threading.RLock())
    with suppress(EOFError, OSError):
        while True:
            attempt(pipe.recv(), pipe.send)


class _Tasks:
    """Jobs as tasks of a Ray cluster, which stream their messages."""

    def __init__(self, address: str) -> None:
        """Connect to a cluster; raises ``FedrotError`` if there is none."""
        import ray

        self._ray: Any = ray  # its types know no streams
        self.running = dict[Any, Job]()
        host, _, port = address.removeprefix("ray://").rpartition(":")
        plugins = os.environ.get(PLUGINS)
        # Nodes of a running cluster do not inherit this process's environment.
        environment = {"env_vars": {PLUGINS: plugins}} if plugins else None
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if host and port.isdecimal():  # Ray would try for minutes.
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(address=address, log_to_driver=False, runtime_env=environment)
        except (OSError, ValueError) as error:
            raise FedrotError(
                f"There is no Ray cluster at '{address}': {error} Start one with 'ray "
                "start --head', or leave ray out to use this machine."
            ) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own handler exits.
        remote = self._ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")
        self._task = remote(_messages)

    def places(self) -> int:
        # At most one job per core is submitted, so that jobs start in the order of the
        # list.
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def start(self, job: Job) -> None:
        self.running[self._task.remote(job)] = job

    def heard(self) -> Iterator[tuple[Any, Any]]:
        ready, _ = self._ray.wait(
            [*self.running],
            num_returns=1,
            timeout=PAUSE,
            fetch_local=False,
        )
        for stream in ready:
            try:
                message = self._ray.get(next(stream))
            except (StopIteration, self._ray.exceptions.RayError) as error:
                message = Ended(
                    f"The task of the job ended: {str(error) or 'it was stopped'}",
                    died=True,
                )
            yield stream, message

    def close(self) -> None:
        self._ray.shutdown()


def _messages(job: Job) -> Iterator[Any]:
    """Run a job in a thread, and yield its messages."""
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=attempt, args=(job, messages.put), daemon=True).start()
    message: Any = None
    while not isinstance(message, Ended):
        message = messages.get()
        yield message
