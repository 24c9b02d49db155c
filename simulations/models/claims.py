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
#: Largest size in bytes of the names of tensors in a file, and largest number of new parameters.
NAMES, NEW = 2**23, 2**27


def refuse_claims(folder: Path) -> None:
    """Raise ``FedrotError`` if a file of a model claims what no model has, or is compressed."""
    files = {file.name: file for file in folder.glob("*")}
    config = files.get("config.json")
    for name, number in _numbers(read_json(config)) if config else ():
        most = next(most for part, most in MOST.items() if part in name)
        if number > most:
            raise FedrotError(
                f"'{config}' has {number} as {name}; at most {most} is allowed. Correct it."
            )
    for index in folder.glob("*.index.json"):
        absent = set(map(str, dict(read_json(index).get("weight_map", {})).values())) - files.keys()
        if absent:
            raise FedrotError(
                f"'{folder}' cannot be loaded: {index.name} lists '{min(absent)}', which is not in the "
                f"folder ({len(absent)} missing in all). Copy or save the model again."
            )
    for file in files.values():
        if file.suffix in (".safetensors", ".bin"):
            _check_weights(file, file.stat().st_size)


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers and the sizes of lists of a configuration, and of those in it, by name."""
    for name, value in settings.items():
        if isinstance(value, int | list | dict):
            yield name, value if isinstance(value, int) else len(value)
        if isinstance(value, dict) and name.endswith("_config"):
            yield from _numbers(value)


def _check_weights(file: Path, size: int) -> None:
    refuse_pointer(file)
    names = 0
    if file.suffix == ".safetensors":
        with file.open("rb") as opened:
            names = min(int.from_bytes(opened.read(8), "little"), size)
    elif zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as packed:
            entries = [(entry.filename, entry.file_size) for entry in packed.infolist()]
        if sum(of for _, of in entries) > size:
            raise FedrotError(f"'{file}' is compressed: it holds more bytes than it has. Save it again.")
        names = sum(of for name, of in entries if name.endswith(".pkl"))
    if names > NAMES:
        raise FedrotError(f"'{file}' has {names} bytes of names, above {NAMES}. Save the model again.")


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
