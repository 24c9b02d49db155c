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
#: Parameters that a model may have beside those of its files, such as those of a new task head.
NEW = 2**27
_SAVE_AGAIN = "Load the model with transformers, and save it with save_pretrained."


def refuse_claims(folder: Path) -> None:
    """Raise ``FedrotError`` if a file of a model is damaged, or claims what no model has.

    Refused are a configuration with a number above ``MOST``, an index of files that the folder does not
    have, headers above ``HEADERS``, and ``.bin`` files with compressed or overlapping tensors.
    """
    config = folder / "config.json"
    for name, number in _numbers(read_json(config)) if config.is_file() else ():
        most = next(most for part, most in MOST.items() if part in name)
        if number > most:
            raise FedrotError(
                f"'{config}' has {number} as {name}; at most {most} is allowed. Correct it."
            )
    files = {file.name for file in folder.glob("*")}
    for index in sorted(folder.glob("*.index.json")):
        listed = read_json(index).get("weight_map")
        absent = {str(name) for name in listed.values()} - files if isinstance(listed, dict) else {"?"}
        if absent:
            raise FedrotError(
                f"'{folder}' cannot be loaded: {index.name} lists '{min(absent)}', which is not in the "
                f"folder ({len(absent)} missing in all). Copy the file there. {_SAVE_AGAIN}"
            )
    weights = sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", ".bin"))
    headers = {file: _header(file) for file in weights}
    if sum(headers.values()) > HEADERS:
        file = max(headers, key=lambda file: headers[file])
        raise FedrotError(
            f"'{file}' has a header of {headers[file]} bytes; all headers of a model have at most "
            f"{HEADERS}. {_SAVE_AGAIN}"
        )


def refuse_larger(name: str, build: Callable[[], Any]) -> None:
    """Raise ``FedrotError`` if a configuration describes a larger model than the files of a folder."""
    import torch

    stored = sum(file.stat().st_size for file in Path(name).glob("*") if file.is_file())
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
        if isinstance(value, int):
            yield name, value
        elif isinstance(value, list | dict):
            yield name, len(value)
        if isinstance(value, dict) and name.endswith("_config"):
            yield from _numbers(value)


def _header(file: Path) -> int:
    """Return the number of bytes that name the tensors of a file; 0 for pickles of old versions."""
    refuse_pointer(file)
    with file.open("rb") as opened:
        start = opened.read(8)
    if file.suffix == ".safetensors":
        return int.from_bytes(start, "little")
    if not start.startswith(b"PK\3\4"):
        return 0
    try:
        with zipfile.ZipFile(file) as packed:
            entries = packed.infolist()
    except zipfile.BadZipFile as error:
        raise FedrotError(f"'{file}' is damaged: {error}. Copy or save it again.") from error
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > file.stat().st_size:
        raise FedrotError(f"'{file}' has compressed or overlapping tensors. {_SAVE_AGAIN}")
    return sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
