"""``Checkpointing``: a folder of checkpoints, each written completely or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
from filelock import FileLock, Timeout
from flwr.common import log
from flwr.serverapp.strategy import Result
from safetensors import SafetensorError, safe_open

from fedrot._io import NO_LOCKS, replacing, sync
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.resume.state import RunState, State
from fedrot.strategies.resume.values import NamedArrays, decode, encode
from fedrot.strategies.wire.arrays import TIED, from_arrays, model_hash, to_arrays
from fedrot.tensors import TensorDict, Tensors

_FORMAT = 1
_MODEL = "model.safetensors"
_STATE = "state.safetensors"
#: The entry of ``_STATE`` that holds, as JSON, all that is no array.
_ABOUT = "checkpoint"
#: Beside the checkpoints: the metrics of all rounds, a line a round.
_LINES = "checkpoint-metrics.jsonl"
_LOCK = ".lock"
_NAME = re.compile(r"round-([0-9]{6}|[1-9][0-9]{6,})")
#: The temporary names of ``replacing``.
_UNFINISHED = re.compile(r"\.round-\d{6,}\.\d+")
_METRICS = (
    "train_metrics_clientapp",
    "evaluate_metrics_clientapp",
    "evaluate_metrics_serverapp",
)


@dataclass(frozen=True)
class Checkpoint:
    """The result after a round, and arguments of ``RunState.restore``."""

    folder: Path
    round: int
    result: Result
    state: State
    state_arrays: NamedArrays


class Checkpointing:
    """Writes and reads the checkpoints of one run, ``folder/round-000001`` and so on.

    If the folder has checkpoints, the run resumes after the newest valid one, see
    docs/how-to/checkpoints.md.

    Example: ``FedRot(config, checkpoints=Checkpointing("runs/tuesday"))``.

    A checkpoint is a folder of two files: ``model.safetensors`` with the global model
    under its own names and in C order, and ``state.safetensors`` with the run's state.
    All rounds' metrics are in ``folder/checkpoint-metrics.jsonl``, which grows by a
    line a round. The state contains the SHA-256 of the model, of the metrics so far and
    of itself.

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
        self._written = (0, 0, hashlib.sha256())

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, valid or damaged, in order."""
        if not self.folder.is_dir():
            return []
        try:
            names = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        except OSError as error:
            raise FedrotError(
                f"The folder of checkpoints cannot be read: {error}."
            ) from error
        return sorted(int(name[1]) for name in names if name)

    def used(self) -> bool:
        """Return whether any run has locked the folder to write checkpoints."""
        return (self.folder / _LOCK).exists()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make and lock the folder, and remove a killed run's unfinished checkpoint.

        Raises:
            FedrotError: the folder cannot be made or written to, another run writes to
                it, or a file or link has the name of a checkpoint.
        """
        path = self.folder / _LOCK
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise FedrotError(
                f"'{path}' is a link or a folder, not a lock file of fedrot. Remove it."
            )
        lock = FileLock(path, timeout=0, fallback_to_soft=False)
        try:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                _acquire(lock, path)
                self._clear()
            except OSError as error:
                raise FedrotError(
                    f"Checkpoints cannot be written to '{self.folder}': {error}. "
                    "Choose another folder, or make this one writable."
                ) from error
            #: The next round, and the length and digest of the lines of the rounds
            #: before it.
            self._written = (0, 0, hashlib.sha256())
            yield
        finally:
            lock.release()

    def _clear(self) -> None:
        """Remove unfinished checkpoints, and check that all checkpoints are folders."""
        for path in self.folder.iterdir():
            unfinished = _UNFINISHED.fullmatch(path.name)
            ours = unfinished or _NAME.fullmatch(path.name)
            if ours and (path.is_symlink() or not path.is_dir()):
                raise FedrotError(
                    f"'{path}' has the name of a checkpoint, but is a file or a link. "
                    "Move it, or write to another folder."
                )
            if unfinished:
                shutil.rmtree(path)

    def save(self, number: int, result: Result, state: RunState) -> Path:
        """Write the checkpoint of a round inside ``writing``; remove old checkpoints.

        Raises:
            FedrotError: the checkpoint cannot be written, and nothing of it is left; or
                old checkpoints cannot be removed.
        """
        target = self.path(number)
        try:
            with replacing(target) as temporary:
                temporary.mkdir()
                lines = self._write_lines(number, result, temporary)
                _write(temporary, result, state, {"round": number, "lines": lines})
                if (
                    target.exists()
                ):  # A damaged checkpoint: the run resumed from an earlier one.
                    shutil.rmtree(target)
            for old in [r for r in self.rounds() if r <= number][: -self.keep]:
                shutil.rmtree(self.path(old))
        except (OSError, SafetensorError, UpdateError) as error:
            raise FedrotError(
                f"The checkpoint of round {number} cannot be written to "
                f"'{self.folder}': {error}. The run stops here. Earlier checkpoints "
                "are complete; resume from them."
            ) from error
        return target

    def _write_lines(
        self, number: int, result: Result, temporary: Path
    ) -> tuple[int, str]:
        """Write the metrics of the rounds so far; return their bytes and digest.

        The first call replaces the file, which begins with the same lines as before;
        others append.
        """
        path = self.folder / _LINES
        first, length, digest = self._written
        lines = "".join(
            _line(done, result) for done in range(first, number + 1)
        ).encode()
        if first == 0:
            (temporary / _LINES).write_bytes(lines)
            (temporary / _LINES).replace(path)
        else:
            with path.open("ab") as file:
                file.write(lines)
        sync(path)
        digest.update(lines)
        self._written = (number + 1, length + len(lines), digest)
        return length + len(lines), digest.hexdigest()

    def newest(self) -> Checkpoint:
        """Return the newest valid checkpoint; warn of each newer, damaged one.

        Raises:
            FedrotError: there is no valid checkpoint in this format.
        """
        for number in reversed(self.rounds()):
            try:
                return self.read(number)
            except FedrotError as error:
                log(
                    WARNING,
                    "The checkpoint '%s' cannot be used: %s",
                    self.path(number),
                    error,
                )
        raise FedrotError(
            f"There is no usable checkpoint in '{self.folder}'. Give a folder with "
            "checkpoints, or a new folder to start from round 1."
        )

    def read(self, number: int) -> Checkpoint:
        """Return a round's checkpoint.

        Raises:
            FedrotError: a file is changed, missing or a link.
        """
        folder = self.path(number)
        model = folder / _MODEL
        state = folder / _STATE
        lines = folder.with_name(_LINES)
        for path in (folder, model, state, lines):
            if path.is_symlink() or path.is_fifo():
                raise FedrotError(
                    f"'{path.name}' is a link or a pipe; put the file itself there."
                )
        try:
            with safe_open(state, "numpy") as file:
                bulk = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                _check(state, _arrays_digest(bulk), file.metadata()["sha256"])
            about = json.loads(bulk.pop(_ABOUT).tobytes())
            if (about["format"], about["round"]) != (_FORMAT, number):
                raise FedrotError(
                    f"It is of round {about['round']} in format {about['format']}, but "
                    f"this is round {number} in format {_FORMAT}."
                )
            _check(model, _digest(model), about["sha256"])
            tensors = safetensors.torch.load_file(model)
            shared = {name: tensors[tied] for name, tied in about["tied"].items()}
            untied = {name for name, tied in about["tied"].items() if name == tied}
            _check(model, model_hash(tensors, untied), model_hash(shared, untied))
            result = Result(to_arrays(shared))
            length, digest = about["lines"]
            with lines.open("rb") as file:
                data = file.read(length)
            _check(lines, hashlib.sha256(data).hexdigest(), digest)
            for metrics in map(json.loads, data.splitlines()):
                for name in metrics.keys() & _METRICS:
                    getattr(result, name)[metrics["round"]] = decode(metrics[name], {})
            return Checkpoint(folder, number, result, about["state"], bulk)
        except FedrotError:
            raise
        except Exception as error:
            raise FedrotError(
                f"'{_STATE}', or what it refers to, cannot be read, "
                f"{type(error).__name__}: {error}"
            ) from error

    def path(self, number: int) -> Path:
        """Return the folder of a round's checkpoint, which need not exist."""
        return self.folder / f"round-{number:06d}"


def _acquire(lock: FileLock, path: Path) -> None:
    """Hold a lock, which ends with the process; the lock file names the process."""
    try:
        lock.acquire()
        path.write_text(
            f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8"
        )
    except Timeout as error:
        if not path.exists():
            raise
        owner = path.read_text(encoding="utf-8", errors="replace")[:1000].strip()
        raise FedrotError(
            f"Another run ({owner}) is writing checkpoints to '{path.parent}'. End "
            "this run first, or choose another folder."
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log(WARNING, "'%s' cannot be locked against other runs: %s", path.parent, error)


def _line(number: int, result: Result) -> str:
    """Return a round's metrics as a line of JSON; empty if it has none."""
    rounds = {name: getattr(result, name) for name in _METRICS}
    metrics = {
        name: encode(records[number], name, {})
        for name, records in rounds.items()
        if number in records
    }
    return json.dumps({"round": number, **metrics}) + "\n" if metrics else ""


def _write(folder: Path, result: Result, state: RunState, about: State) -> None:
    arrays = result.arrays
    bulk = NamedArrays()
    safetensors.torch.save_file(_unshared(from_arrays(arrays)), folder / _MODEL)
    about |= {
        "format": _FORMAT,
        "tied": {
            name: a.data.decode() if a.stype == TIED else name
            for name, a in arrays.items()
        },
        "state": state.encoded(bulk),
        "sha256": _digest(folder / _MODEL),
    }
    bulk[_ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    safetensors.numpy.save_file(bulk, folder / _STATE, {"sha256": _arrays_digest(bulk)})
    for name in (_MODEL, _STATE):
        # safetensors makes its files private and ignores the umask.
        (folder / name).chmod(folder.stat().st_mode & 0o666)
        sync(folder / name)
    sync(folder)


def _check(path: Path, actual: str, digest: str) -> None:
    if actual != digest:
        raise FedrotError(f"'{path.name}' was changed after it was written.")


def _unshared(tensors: Tensors) -> TensorDict:
    """Return tensors that share no memory, as safetensors requires.

    Others are not copied.
    """
    separate: TensorDict = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        separate[name] = (
            tensor.clone().contiguous() if memory in taken else tensor.contiguous()
        )
        taken.add(memory)
    return separate


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _arrays_digest(arrays: NamedArrays) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
