"""``Shelf``: a client's folder of bodies, kept between requests.

A body is all tensors of a model but those of its task head.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from logging import WARNING
from pathlib import Path

from flwr.common import log
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedrot._io import replacing, write_tensors
from fedrot.strategies.wire.fitting_messages import half_way, hash_of

#: Bodies of other runs are deleted after so many seconds.
_OLD = 24 * 3600


class Shelf:
    """A client's folder of bodies, which other clients of the same run and user may
    share.

    Args:
        folder: holds a folder ``fedrot-bodies`` for all runs; None is the user's folder
            of caches (``XDG_CACHE_HOME``, else ``~/.cache``).
        run: the number of the run.
        task_head: the name of the task head.
    """

    def __init__(self, folder: str | Path | None, run: int, task_head: str) -> None:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._runs = Path(folder or caches) / "fedrot-bodies"
        self._folder = self._runs / f"{run:x}"
        self._task_head = task_head

    def read(
        self, key: str, between: Iterable[str] = ()
    ) -> Mapping[str, Tensor] | None:
        """Return a body, from its file or from the two bodies that it is ``half_way``
        between.
        """
        found = self._file(key)
        if found is not None:
            return found
        halves = [half for half in map(self._file, between) if half is not None]
        if (
            len(halves) < 2
            or hash_of(mean := half_way(*halves), self._task_head) != key
        ):
            return None
        return self.keep(key, mean)

    def keep(self, key: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Write a body, unless it is there, and return it; a full disk is a warning."""
        path = self._path(key)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                with replacing(path) as temporary:
                    # Tied tensors share memory, which safetensors refuses.
                    write_tensors(
                        temporary,
                        {name: value.clone() for name, value in tensors.items()},
                    )
        except OSError as error:
            log(
                WARNING,
                "The model is not kept for the next request and will be sent again: %s",
                error,
            )
        return tensors

    def drop_others(self, keys: Iterable[str]) -> None:
        """Delete the run's other bodies, and those that other runs have written a day
        ago.
        """
        kept = {self._path(key) for key in keys}
        for path in self._runs.glob("*/*.safetensors"):
            with suppress(OSError):
                old = (
                    path.parent != self._folder
                    and path.stat().st_mtime < time.time() - _OLD
                )
                if old or (path.parent == self._folder and path not in kept):
                    path.unlink()

    def _file(self, key: str) -> dict[str, Tensor] | None:
        path = self._path(key)
        try:
            found = load_file(path)
        except (OSError, SafetensorError):
            return None
        if hash_of(found, self._task_head) == key:
            return found
        path.unlink(missing_ok=True)
        return None

    def _path(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"
