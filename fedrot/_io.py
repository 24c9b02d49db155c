"""Files: atomic replacement, JSON, safetensors, and checks of pointers and links."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fedrot.errors import FedrotError, safe

if TYPE_CHECKING:
    from fedrot.tensors import TensorDict

#: Deepest nesting of JSON that is read.
DEEPEST = 200
# The steps of quotes and brackets in depth, as int8; all other bytes are left out.
_NO_MARKS = bytes({*range(256)} - {*b'"[]{}'})
_STEPS = bytes.maketrans(b'"[]{}', bytes([0, 1, 255, 1, 255]))
#: Errors of file systems that have no locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; it is renamed to ``path`` if the block succeeds.

    A file is flushed to the disk before the rename: a power cut leaves the old or the
    new file. A link at ``path`` is replaced, not followed. An ``OSError`` names
    ``path``, not the temporary path.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _naming(path, temporary):
            yield temporary
            if temporary.is_file():
                sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path, temporary: Path) -> Iterator[None]:
    """Name ``path`` in an ``OSError`` that names no file or the temporary one."""
    try:
        yield
    except OSError as error:
        named = str(error.filename or temporary)
        if error.errno is None or not named.startswith(str(temporary)):
            raise
        final = str(path) + named.removeprefix(str(temporary))
        raise OSError(error.errno, error.strerror, final) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, without what could steer a terminal."""
    with replacing(path) as temporary:
        temporary.write_text(safe(text), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk; does nothing on Windows."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a JSON-lines file, all or none; create it and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json_line(row) for row in rows).encode()
    with _naming(path, path), path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(end)
            raise


def write_tensors(
    path: Path, tensors: TensorDict, metadata: dict[str, str] | None = None
) -> None:
    """Write contiguous tensors as safetensors; raises ``OSError`` if that fails."""
    from safetensors.torch import save_file

    with as_os_error(path):
        save_file(tensors, path, metadata)


@contextmanager
def as_os_error(path: Path) -> Iterator[None]:
    """Turn an error of safetensors into an ``OSError`` that names ``path``."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def shallow(data: bytes) -> bytes:
    """Return JSON; raises ``ValueError`` if it is too deep for parsers."""
    import numpy as np

    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    steps = np.frombuffer(unescaped.translate(_STEPS, _NO_MARKS), np.int8)
    in_text = np.logical_xor.accumulate(steps == 0)
    if (steps * ~in_text).cumsum(dtype=np.int32).max(initial=0) > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ``FedrotError`` if the file holds something else."""
    try:
        value = json.loads(shallow(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise FedrotError(
            f"'{path}' is damaged: it is not JSON ({error}). Copy or save it again."
        ) from error
    if not isinstance(value, dict):
        raise FedrotError(
            f"'{path}' is damaged: it holds a {type(value).__name__}, not a JSON "
            "object."
        )
    return value


def refuse_pointer(file: Path) -> None:
    """Raise ``FedrotError`` if a file is a pointer: git-lfs missed at the checkout."""
    start = b"version https://git-lfs"
    with file.open("rb") as opened:
        if opened.read(len(start)) == start:
            raise FedrotError(
                f"'{file}' is a pointer of git-lfs, not the file itself. Run git lfs "
                "pull in its folder, or download it again."
            )


def refuse_links(folder: Path) -> None:
    """Raise ``FedrotError`` if a link leads out of a folder, which may be a link."""
    inside = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise FedrotError(
                f"'{path}' is a link to '{path.resolve()}', outside of the folder: "
                "results would be written there. Remove the link, or choose another "
                "folder."
            )


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as JSON; non-finite numbers become null, unknown types text."""
    return json.dumps(_finite(row), allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def inner(name: str, file: object) -> str:
    """Return a path that a model's file names; raise ``FedrotError`` if it leads out.

    Links are followed: the hub's cache consists of links.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise FedrotError(
            f"'{file}' names '{name}'. Files outside of its folder are not read: "
            "copy that file into the folder, and name it without its path."
        )
    return name
