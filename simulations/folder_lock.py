"""``only_writer``: a lock on a folder for one writing process at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fedrot._io import NO_LOCKS, refuse_links
from fedrot.errors import FedrotError


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make a folder if needed, and lock it against other writing processes.

    The lock ends with the process. On file systems without locks, the folder is not locked.

    Raises:
        FedrotError: another process holds the lock, or a link in the folder leads out of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links(folder)
    path = folder / ".lock"
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise FedrotError(
            f"Another run is writing to '{folder}'. Wait until it ends, or choose another folder."
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        lock.release()
