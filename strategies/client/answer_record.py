"""``Record``: a client's file of what it has answered, a line of JSON each."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedrot._io import json_line, replacing, shallow
from fedrot.errors import FedrotError

#: A line of a record.
Line = dict[str, Any]

#: The key of the first line, by which a file is known as a record.
SALT = "salt"


class Record:
    """A file of JSON lines: a first line with a salt, then a line for each answer.

    A line is on the disk when ``append`` returns. A process that is killed leaves the
    old file or the new one. Only its owner can read the file.

    Args:
        path: of the file, for one site. A lock file ``PATH.lock`` stands beside it.

    Example: ``with record.locked(): record.append({"stage": "sum"})``

    Raises:
        FedrotError: in all methods, if the file is damaged, or no record.
        OSError: in all methods, if it cannot be read or written.
    """

    def __init__(self, path: str | Path) -> None:
        # A link stays one: its file is replaced.
        self.path = Path(path).resolve()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and hold the file; wait for other processes that hold it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", fallback_to_soft=False):
            yield

    def lines(self) -> list[Line]:
        """Return the lines after the first one; none without a file."""
        return self._all()[1:]

    def salt(self) -> bytes:
        """Return the random bytes of this record, which no other record has."""
        return bytes.fromhex(self._all()[0][SALT])

    def append(self, line: Line) -> None:
        """Write the file anew, with a further line."""
        self._write(*self._all(), line)

    def _all(self) -> list[Line]:
        """Return all lines; a file that is not there is made, with its first line."""
        if not self.path.exists():
            self._write({SALT: secrets.token_hex(16)})
        data = self.path.read_bytes()
        try:
            lines = [json.loads(shallow(line)) for line in data.splitlines()]
            whole = data.endswith(b"\n") and {*map(type, lines)} == {dict}
            bytes.fromhex(lines[0][SALT])
        except (ValueError, RecursionError, LookupError, TypeError):
            whole = False
        if not whole:
            raise FedrotError(
                f"The record '{self.path}' is damaged, or no record of fedrot. Restore "
                "it from a copy. A new file forgets all earlier answers."
            )
        return lines

    def _write(self, *lines: Line) -> None:
        with replacing(self.path) as temporary:
            temporary.touch(0o600)
            temporary.write_text("".join(map(json_line, lines)), encoding="utf-8")
