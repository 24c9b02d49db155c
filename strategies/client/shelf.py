"""``Shelf``: a client's folder of bodies, kept between requests.

A body is a model. Its key is a hash in which the task head's values do not count: two
models with one body and different heads are one body.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from logging import WARNING
from pathlib import Path

from flwr.common import log
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedrot._io import replacing, write_tensors
from fedrot.strategies.wire.fitting_messages import half_way, hash_of
from fedrot.tensors import TensorDict, Tensors

#: Bodies of other runs are deleted after so many seconds.
_OLD = 24 * 3600


class Shelf:
    """A client's folder of bodies.

    Other clients of the same run and user may share it.

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

    def read(self, key: str, between: Iterable[str] = ()) -> Tensors | None:
        """Return a body, from its file or from the two bodies that it is between."""
        body = self._file(key)
        if body is not None:
            return body
        halves = [*filter(None, map(self._file, between))]
        if len(halves) < 2:
            return None
        return self.keep_right(key, half_way(*halves))

    def keep_right(self, key: str, tensors: Tensors) -> Tensors | None:
        """Write a body and return it if it has this key; None if it has another one."""
        right = hash_of(tensors, self._task_head) == key
        return self.keep(key, tensors) if right else None

    def keep(self, key: str, tensors: Tensors) -> Tensors:
        """Write a body, unless it is there, and return it; a full disk is a warning."""
        path = self._path(key)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                # Tied tensors share memory, which safetensors refuses.
                copies = {name: value.clone() for name, value in tensors.items()}
                with replacing(path) as temporary:
                    write_tensors(temporary, copies)
        except OSError as error:
            log(
                WARNING,
                "The model is not kept for the next request and will be sent again: %s",
                error,
            )
        return tensors

    def drop_others(self, keys: Iterable[str]) -> None:
        """Delete the run's other bodies, and old ones of other runs."""
        kept = {self._path(key) for key in keys}
        for path in self._runs.glob("*/*.safetensors"):
            with suppress(OSError):
                if path.parent == self._folder:
                    drop = path not in kept
                else:
                    drop = path.stat().st_mtime < time.time() - _OLD
                if drop:
                    path.unlink()

    def _file(self, key: str) -> TensorDict | None:
        path = self._path(key)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError):
            return None
        if hash_of(tensors, self._task_head) == key:
            return tensors
        path.unlink(missing_ok=True)
        return None

    def _path(self, key: str) -> Path:
        digest = hashlib.sha256(key.encode())
        return self._folder / f"{digest.hexdigest()}.safetensors"
