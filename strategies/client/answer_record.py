"""``Record``: a client's file of what it has answered, a line of JSON each."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
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
    old file or the new one.

    Args:
        path: of the file, for one site. A lock file ``PATH.lock`` stands beside it.

    Example: ``with record.locked(): record.append({"stage": "sum"})``
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file against other processes, and wait for them.

        Raises:
            FedrotError: the folder cannot be written to.
        """
        lock = FileLock(f"{self.path}.lock", fallback_to_soft=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            raise self._refused(error) from error
        try:
            yield
        finally:
            lock.release()

    def lines(self) -> list[Line]:
        """Return the lines after the first one; none without a file.

        Raises:
            FedrotError: the file is damaged, or no record.
        """
        return self._all()[1:]

    def salt(self) -> bytes:
        """Return the random bytes of this record, which no other record has."""
        return bytes.fromhex(self._all()[0][SALT])

    def append(self, line: Mapping[str, Any]) -> None:
        """Write the file anew, with a further line.

        Raises:
            FedrotError: the file is damaged, or cannot be written.
        """
        self._write([*self._all(), line])

    def _all(self) -> list[Line]:
        """Return all lines; a file that is not there is made, with its first line."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            first = {SALT: secrets.token_hex(16)}
            self._write([first])
            return [first]
        except OSError as error:
            raise self._refused(error) from error
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

    def _write(self, lines: list[Mapping[str, Any]]) -> None:
        try:
            with replacing(self.path) as temporary:
                temporary.touch(0o600)
                temporary.write_text("".join(map(json_line, lines)), encoding="utf-8")
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> FedrotError:
        return FedrotError(
            f"The record cannot be read or written: {error}. Nothing is sent. Choose "
            "another record of Privacy, or make its folder writable."
        )
