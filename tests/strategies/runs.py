"""Child processes to kill, see ``killed_run``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a child ended: what it marked, when (seconds since it was started), and its exit code."""

    marks: tuple[str, ...]
    times: tuple[float, ...]
    code: int


@dataclass(frozen=True)
class Kill:
    """Kill a child so many seconds after a mark, after its start if None."""

    seconds: float
    mark: str | None = None


class Server:
    """A process that forks children, so that only the first pays for imports."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.strategies.resume.killed_run"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._line() == "ready"

    def run(self, what: str, kill: Kill | None = None, **arguments: Any) -> Ended:
        """Let a child do something, kill it if that is said, and return how it ended."""
        self._tell(json.dumps({"do": what, **arguments}))
        started = time.monotonic()
        child = int(self._line())
        marks: list[str] = []
        times: list[float] = []

        def read_until(last: str) -> None:
            while (line := self._line()) != "ended":
                marks.append(line)
                times.append(time.monotonic() - started)
                if line == last:
                    return
            assert last == "ended", f"'{last}' was never marked"

        if kill is not None:
            if kill.mark is not None:
                read_until(kill.mark)
            time.sleep(kill.seconds)
            # The server keeps the child's id from being used again.
            os.kill(child, signal.SIGKILL)
        read_until("ended")
        self._tell("reap")
        return Ended(tuple(marks), tuple(times), int(self._line()))

    def close(self) -> None:
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log.read_text(encoding="utf-8")[-5000:]
        return line.strip()
