"""``Checkpointing``: a folder of checkpoints; a checkpoint is written completely or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch
from filelock import FileLock, Timeout
from flwr.common import log
from flwr.serverapp.strategy import Result
from safetensors import SafetensorError
from torch import Tensor

from fedrot._io import NO_LOCKS, replacing, sync
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.resume.state import RunState
from fedrot.strategies.resume.values import decode, encode
from fedrot.strategies.wire.arrays import TIED, from_arrays, to_arrays

_FORMAT = 1
_MODEL, _STATE, _ABOUT = "model.safetensors", "state.safetensors", "checkpoint.json"
_LOCK = ".lock"
_NAME = re.compile(r"round-(\d{6,})")
#: The temporary names of ``replacing``.
_UNFINISHED = re.compile(r"\.round-\d{6,}\.\d+")
_METRICS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


@dataclass(frozen=True)
class Checkpoint:
    """The result after a round, with the model, and arguments of ``RunState.restore``."""

    folder: Path
    round: int
    result: Result
    state: dict[str, Any]
    state_arrays: dict[str, np.ndarray]


class Checkpointing:
    """Writes and reads the checkpoints of one run, ``folder/round-000001`` and so on.

    If the folder has checkpoints, the run resumes after the newest valid one, see
    docs/how-to/checkpoints.md.

    Example: ``FedRot(config, checkpoints=Checkpointing("runs/tuesday"))``.

    A checkpoint is a folder of three files: ``model.safetensors`` with the global model under its own
    names and in C order, ``state.safetensors`` with the arrays of the run's state, and
    ``checkpoint.json`` with the metrics of all rounds, the other state, which tensors are tied, and the
    SHA-256 digests of all three.

    Args:
        folder: the folder for a checkpoint after every round; may be empty or missing.
        keep: number of newest checkpoints to keep.

    Raises:
        FedrotError: ``keep`` is below 1.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise FedrotError(f"keep is {keep}; at least 1 checkpoint must be kept.")
        self.folder = Path(folder)
        self.keep = keep

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, valid or damaged, in order."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in _entries(self.folder))
        return sorted(int(name[1]) for name in names if name)

    def used(self) -> bool:
        """Return whether any run has locked the folder to write checkpoints."""
        return (self.folder / _LOCK).exists()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make and lock the folder, and remove the unfinished checkpoint of a killed run.

        Raises:
            FedrotError: the folder cannot be made or written to, another run writes to it, or a file or
                link has the name of a checkpoint.
        """
        with _locked(self.folder):
            self._clear()
            yield

    def _clear(self) -> None:
        """Remove unfinished checkpoints, and check that all checkpoints are folders."""
        for path in _entries(self.folder):
            unfinished = _UNFINISHED.fullmatch(path.name)
            if not unfinished and not _NAME.fullmatch(path.name):
                continue
            if path.is_symlink() or not path.is_dir():
                raise FedrotError(
                    f"'{path}' has the name of a checkpoint, but is a file or a link. Move it, or write "
                    "to another folder."
                )
            if unfinished:
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    raise _not_writable(self.folder, error) from error

    def save(self, number: int, result: Result, state: RunState) -> Path:
        """Write the checkpoint of a round, then remove old checkpoints; call it inside ``writing``.

        Raises:
            FedrotError: the checkpoint cannot be written, and nothing of it is left; or old checkpoints
                cannot be removed.
        """
        target = self._path(number)
        try:
            with replacing(target) as temporary:
                temporary.mkdir()
                _write(temporary, number, result, state)
                if target.exists():  # A damaged checkpoint: the run resumed from an earlier one.
                    shutil.rmtree(target)
            for old in [r for r in self.rounds() if r <= number][: -self.keep]:
                shutil.rmtree(self._path(old))
        except (OSError, SafetensorError, UpdateError) as error:
            raise FedrotError(
                f"The checkpoint of round {number} cannot be written to '{self.folder}': {error}. The "
                "run stops here. Earlier checkpoints are complete; resume from them."
            ) from error
        return target

    def newest(self) -> Checkpoint:
        """Return the newest valid checkpoint; log a warning for each newer, damaged one.

        Raises:
            FedrotError: there is no valid checkpoint in this format.
        """
        for number in reversed(self.rounds()):
            try:
                return _read(self._path(number), number)
            except _DamagedError as error:
                log(WARNING, "The checkpoint '%s' cannot be used: %s", self._path(number), error)
        raise FedrotError(
            f"There is no usable checkpoint in '{self.folder}'. Give a folder with checkpoints, or a "
            "new folder to start from round 1."
        )

    def _path(self, number: int) -> Path:
        return self.folder / f"round-{number:06d}"


class _DamagedError(Exception):
    """A checkpoint is damaged."""


def _entries(folder: Path) -> list[Path]:
    """Return the files and folders in a folder."""
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise FedrotError(f"The folder of checkpoints '{folder}' cannot be read: {error}.") from error


def _not_writable(folder: Path, error: OSError) -> FedrotError:
    return FedrotError(
        f"Checkpoints cannot be written to '{folder}': {error}. Choose another folder, or make this one "
        "writable."
    )


def _write(folder: Path, number: int, result: Result, state: RunState) -> None:
    arrays = result.arrays
    tensors = _unshared(from_arrays(arrays))
    bulk: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {
        "format": _FORMAT,
        "round": number,
        "metrics": {name: encode(getattr(result, name), name, bulk) for name in _METRICS},
        "tied": {name: a.data.decode() if a.stype == TIED else name for name, a in arrays.items()},
        "state": state.encoded(bulk),
    }
    safetensors.torch.save_file(tensors, folder / _MODEL)
    safetensors.numpy.save_file(bulk, folder / _STATE)
    about["sha256"] = {name: _digest(folder / name) for name in (_MODEL, _STATE)}
    (folder / _ABOUT).write_text(
        json.dumps({"checkpoint": about, "sha256": _json_digest(about)}) + "\n", encoding="utf-8"
    )
    for name in (_MODEL, _STATE, _ABOUT):
        # safetensors makes its files private and ignores the umask.
        (folder / name).chmod((folder / _ABOUT).stat().st_mode)
        sync(folder / name)
    sync(folder)


def _read(folder: Path, number: int) -> Checkpoint:
    """Return a checkpoint; raises ``_DamagedError`` if a file is changed, missing or a link."""
    try:
        about = _verified(folder)
        if about["format"] != _FORMAT:
            raise _DamagedError(f"It is in format {about['format']}; this fedrot reads {_FORMAT}.")
        bulk = safetensors.numpy.load_file(folder / _STATE)
        tensors = safetensors.torch.load_file(folder / _MODEL)
        result = Result(to_arrays({name: tensors[tied] for name, tied in about["tied"].items()}))
        for name in _METRICS:
            setattr(result, name, decode(about["metrics"][name], bulk))
        state = {key: about["state"][key] for key in ("strategy", "entries", "random")}
        if about["round"] != number:
            raise _DamagedError(f"It is of round {about['round']!r:.60}.")
        return Checkpoint(folder, number, result, state, bulk)
    except OSError as error:
        raise _DamagedError(f"{error}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise _DamagedError(f"'{_ABOUT}' is damaged ({error!r}).") from error


def _verified(folder: Path) -> dict[str, Any]:
    """Return the contents of ``checkpoint.json`` after a check of all digests."""
    for path in (folder, *(folder / name for name in (_ABOUT, _MODEL, _STATE))):
        if path.is_symlink():
            raise _DamagedError(
                f"'{path.name}' is a link; a checkpoint and its files must not be links."
            )
    written = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    about: dict[str, Any] = written["checkpoint"]
    if written["sha256"] != _json_digest(about):
        raise _DamagedError(f"'{_ABOUT}' was changed after it was written.")
    for name in (_MODEL, _STATE):
        if _digest(folder / name) != about["sha256"][name]:
            raise _DamagedError(f"'{name}' was changed after it was written.")
    return about


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no memory, as safetensors requires; others are not copied."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone().contiguous() if memory in taken else tensor.contiguous()
        taken.add(memory)
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a folder, and hold its lock, which ends with the process; the lock file names the process."""
    path = folder / _LOCK
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise FedrotError(f"'{path}' is a link or a folder, not a lock file of fedrot. Remove it.")
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        path.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
    except Timeout as error:
        if not path.exists():
            raise _not_writable(folder, error) from error
        owner = path.read_text(encoding="utf-8", errors="replace")[:1000].strip()
        raise FedrotError(
            f"Another run ({owner}) is writing checkpoints to '{folder}'. End this run first, or choose "
            "another folder."
        ) from error
    except OSError as error:
        lock.release()
        if error.errno not in NO_LOCKS:
            raise _not_writable(folder, error) from error
        log(WARNING, "'%s' cannot be locked against other runs: %s", folder, error)
    try:
        yield
    finally:
        lock.release()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, allow_nan=False).encode()).hexdigest()
