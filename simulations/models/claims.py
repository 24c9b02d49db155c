"""What the files of a saved model claim, checked before anything is built of them."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedrot._io import read_json, refuse_pointer
from fedrot.errors import FedrotError

#: Largest numbers and sizes of lists in a configuration, by a part of the name of a field.
MOST = {"theta": math.inf, "label": 100_000, "layer": 1000, "group": 1000, "expert": 1000, "": 2**24}
#: Largest size in bytes of all headers of a model's weights, which name the tensors.
HEADERS = 2**23
#: Parameters that a model may have beside those in its files, such as those of a new task head.
NEW = 2**27


def refuse_claims(folder: Path) -> None:
    """Raise ``FedrotError`` if a file of a model claims what no model has, or is compressed.

    Refused are also indices of files that the folder does not have.
    """
    config = folder / "config.json"
    for name, number in _numbers(read_json(config)) if config.is_file() else ():
        most = next(most for part, most in MOST.items() if part in name)
        if number > most:
            raise FedrotError(
                f"'{config}' has {number} as {name}; at most {most} is allowed. Correct it."
            )
    files = {file.name: file for file in folder.glob("*")}
    for index in folder.glob("*.index.json"):
        listed = read_json(index).get("weight_map")
        absent = set(map(str, listed.values() if isinstance(listed, dict) else ["?"])) - files.keys()
        if absent:
            raise FedrotError(
                f"'{folder}' cannot be loaded: {index.name} lists '{min(absent)}', which is not in the "
                f"folder ({len(absent)} missing in all). Copy or save the model again."
            )
    headers = {file: _header(file) for file in files.values() if file.suffix in (".bin", ".safetensors")}
    if sum(headers.values()) > HEADERS:
        file = max(headers, key=lambda file: headers[file])
        raise FedrotError(
            f"'{file}' names tensors in {headers[file]} bytes; all files of a model may use {HEADERS}. "
            "Check that it is a model."
        )


def refuse_larger(name: str, build: Callable[[], Any]) -> None:
    """Raise ``FedrotError`` if a configuration describes a larger model than the files of a folder."""
    import torch

    stored = sum(file.stat().st_size for file in Path(name).glob("*"))
    with torch.device("meta"):
        claimed = sum(parameter.numel() for parameter in build().parameters())
    if stored and claimed > stored + NEW:
        raise FedrotError(
            f"'{name}' cannot be loaded: config.json describes {claimed} parameters, and the files have "
            f"{stored} bytes. Check that they belong together."
        )


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers and the sizes of lists of a configuration, and of those in it, by name."""
    for name, value in settings.items():
        if isinstance(value, int | list | dict):
            yield name, value if isinstance(value, int) else len(value)
        if isinstance(value, dict) and name.endswith("_config"):
            yield from _numbers(value)


def _header(file: Path) -> int:
    """Return the number of bytes that name the tensors of a file; 0 for those of old versions."""
    refuse_pointer(file)
    if file.suffix == ".safetensors":
        with file.open("rb") as opened:
            return min(int.from_bytes(opened.read(8), "little"), file.stat().st_size)
    if not zipfile.is_zipfile(file):
        return 0
    with zipfile.ZipFile(file) as packed:
        entries = packed.infolist()
    if sum(entry.file_size for entry in entries) > file.stat().st_size:
        raise FedrotError(f"'{file}' is compressed: it holds more bytes than it has. Save it again.")
    return sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
