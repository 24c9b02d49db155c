"""A federation of real processes, started by the commands of docs/how-to/deploy.md."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
#: Seconds until a slow machine counts as a broken one.
PATIENCE = 300


def documented_commands():
    """Return the page's commands by their titles."""
    text = (ROOT / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8")
    blocks = re.findall(
        r'^```bash title="([\w-]+)"\n(.*?)^```$', text, flags=re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == text.count("```bash"), "A command of the page has no name."
    return dict(blocks)


class Federation:
    """The commands of the page, run in one folder; leaving it kills whatever they
    started.

    Every node has a Flower home of its own below the folder, by which its processes are
    found, the ones included that Flower detaches.
    """

    def __init__(self, folder, nodes=4):
        self.folder = folder
        self.nodes = " ".join(map(str, range(nodes)))  # the page has two
        self.commands = documented_commands()
        self.used: set[str] = set()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port, self.spare_port, *self.node_ports = free_ports(6)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def command(self, name, node=0, port=None):
        """Return a command of the page, for the given node, our nodes and free
        ports.
        """
        changes = {
            "8000": str(self.port),
            "$((9094 + NODE))": str(port or self.node_ports[node]),
            "NODE=0": f"NODE={node}",
            "node in 0 1;": f"node in {self.nodes};",
            "num-partitions=2": f"num-partitions={len(self.nodes.split())}",
        }
        command = self.commands[name]
        self.used.add(name)
        for old, new in changes.items():
            command = command.replace(old, new)
        return command

    def start(self, name, command):
        """Start a command that stays; its output goes to a log."""
        environment = {
            **os.environ,
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(self.folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ["bash", "-e", "-c", command],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.processes[name]

    def run(self, name, command=None):
        """Run a command that ends, one of the page if none is given, and return its
        output.
        """
        code = self.wait(name, command or self.command(name))
        assert code == 0, f"'{name}' ended with {code}.\n{self.logs()}"
        return self.log(name)

    def wait(self, name, command):
        """Run a command that ends and return its exit code."""
        process = self.start(name, command)
        self.until(lambda: process.poll() is not None, f"'{name}' ends")
        return process.returncode

    def until(self, condition, what):
        """Wait for a condition.

        Raises:
            AssertionError: it did not come true in time.
        """
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, (
                f"Not within {PATIENCE} s: {what}.\n{self.logs()}"
            )
            time.sleep(0.1)

    def listens(self):
        """Tell whether the SuperLink takes connections."""
        assert self.processes["superlink"].poll() is None, (
            f"The SuperLink ended.\n{self.logs()}"
        )
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1),
        ):
            return True
        return False

    def kill(self, name):
        """Kill a process and all it started, as if its machine lost power."""
        root = psutil.Process(self.processes[name].pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def stop(self):
        """Kill everything that runs in this federation's Flower homes, until nothing is
        left.

        Raises:
            AssertionError: something cannot be killed.
        """
        deadline = time.monotonic() + PATIENCE
        while left := list(self.left()):
            assert time.monotonic() < deadline, f"Cannot be killed: {left}"
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for started in self.processes.values():
                started.poll()
            time.sleep(0.05)

    def left(self):
        """Return what still runs; a process shows its home until it is gone."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FLWR_HOME", "").startswith(str(self.folder)):
                    yield process

    def log(self, name):
        """Return what a command has printed, without colours."""
        text = (self.folder / f"{name}.log").read_text(
            encoding="utf-8", errors="replace"
        )
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def logs(self, lines=40):
        """Return the ends of all logs."""
        tails = []
        for name in self.processes:
            tail = "\n".join(self.log(name).splitlines()[-lines:])
            tails.append(f"----- {name}\n{tail}")
        return "\n".join(tails)


def free_ports(count):
    """Return ports that nothing listens on, all different because all are held at
    once.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
