"""Files of a saved model: their names, the tensors in them, and how they are written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrot._io import replacing
from fedrot.errors import FedrotError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SUFFIX = ".safetensors"

#: Any of these is a tokenizer; the others belong to one, or to the model.
TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
BESIDE = (
    *TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

SAVE_AGAIN = "Load it with transformers and save it with save_pretrained."

#: Weights that cannot be mapped, of older versions of transformers.
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

#: What else a folder may hold instead of a model's files, and what to do with it.
_INSTEAD = {
    "adapter_config.json": "Load it with peft, merge_and_unload it into its base model, and save that.",
    **dict.fromkeys(PICKLED, SAVE_AGAIN),
}

#: Modules that data parallelism, compilation, sharding and adapters wrap around others.
_WRAPPERS = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|base_model\.model|base_layer)\.(?=.)"
)

_MERGE_ADAPTERS = "Merge the adapters into the model (peft: merge_and_unload) and save it again."
_DEQUANTISE = "Give the model before quantisation, or dequantize() it with transformers and save it."

#: Tensors that are not a model's own, by name, and what to do about them.
_NOT_PLAIN = (
    (re.compile(r"(^|\.)(lora_[A-Za-z_]+|ia3_l)(\.|$)"), "an adapter", _MERGE_ADAPTERS),
    (
        re.compile(r"\.(qweight|qzeros|SCB|absmax|quant_map|weight_packed|quant_state\..+)$"),
        "a quantised model",
        _DEQUANTISE,
    ),
)

#: What weights are stored in; 8 bits and fewer need scales that lie elsewhere.
_WEIGHTS_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Say in every ``FedrotError`` which file or folder it is about."""
    try:
        yield
    except FedrotError as error:
        raise type(error)(f"'{path}': {error}") from error


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; tensors read from it stay views of it after it is closed.

    Raises:
        FedrotError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise FedrotError(f"'{file}' is damaged or no safetensors file: {error}") from error


def refuse_quantised(settings: Mapping[str, Any], where: object) -> None:
    """Raise ``FedrotError`` if a configuration says that its model's weights are quantised."""
    described = settings.get("quantization_config")
    if described:
        method = described.get("quant_method") if isinstance(described, Mapping) else None
        raise FedrotError(
            f"'{where}' is quantised{f' ({method})' if method else ''}: its weights cannot be moved. "
            f"{_DEQUANTISE}"
        )


def stored_tensors(path: Path) -> dict[str, tuple[Path, str]]:
    """Return the file of every tensor of a bare safetensors file or a folder, and its name there.

    Keys are the model's own names: without what wrappers (``module.``, ``_orig_mod.``,
    ``_fsdp_wrapped_module.``, ``base_model.model.``, ``base_layer.``) put into them.

    Raises:
        FedrotError: a file is missing or damaged, a shard lacks a tensor of the index, or the tensors
            are those of an adapter, of a quantised model or of several models.
    """
    found: dict[str, tuple[Path, str]] = {}
    for name, file in _files(path).items():
        for pattern, what, advice in _NOT_PLAIN:
            if pattern.search(name):
                raise FedrotError(f"'{file}' holds '{name}', a tensor of {what}. {advice}")
        clean = _WRAPPERS.sub("", name)
        if clean in found:
            raise FedrotError(
                f"'{path}' holds both '{found[clean][1]}' and '{name}', which differ only in a wrapper. "
                f"Save one model. {SAVE_AGAIN}"
            )
        found[clean] = (file, name)
    _check_dtypes(found)
    return found


def _check_dtypes(stored: Mapping[str, tuple[Path, str]]) -> None:
    for file in dict.fromkeys(file for file, _ in stored.values()):
        with opened(file) as handle:
            for place, name in stored.values():
                if place != file or not name.endswith(".weight"):
                    continue
                dtype = handle.get_slice(name).get_dtype()
                if dtype not in _WEIGHTS_DTYPES:
                    raise FedrotError(
                        f"'{file}' holds '{name}' as {dtype}, so it is quantised and cannot be moved. "
                        f"{_DEQUANTISE}"
                    )


def _files(path: Path) -> dict[str, Path]:
    """Return the file of every tensor, by its name there."""
    single, index = (path, None) if path.is_file() else (path / WEIGHTS, path / INDEX)
    if single.is_file():
        return dict.fromkeys(_names(single), single)
    if index is None or not index.is_file():
        raise FedrotError(f"'{path}' has no {WEIGHTS} and no {INDEX}. {instead(path)}")
    try:
        listed = {n: path / f for n, f in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FedrotError(f"'{index}' is damaged: it has no readable 'weight_map'.") from error
    there = {file: _names(file) for file in dict.fromkeys(listed.values()) if file.is_file()}
    for name, file in listed.items():
        if name not in there.get(file, ()):
            raise FedrotError(
                f"'{index}' lists '{name}' in '{file}', which is not there. Copy all shards."
            )
    return listed


def instead(folder: Path) -> str:
    """Return what a folder holds instead of a saved model, and what to do."""
    for name, advice in _INSTEAD.items():
        if (folder / name).is_file():
            return f"There is '{name}' instead. {advice}"
    return SAVE_AGAIN


def _names(file: Path) -> frozenset[str]:
    with opened(file) as handle:
        return frozenset(handle.keys())


def refuse_filled(out: Path) -> None:
    """Raise ``FileExistsError`` unless a model can be written there; see ``write_model``."""
    if out.exists() and (out.suffix == SUFFIX or not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"'{out}' is there already and not an empty folder. Choose another --out.")


def write_model(
    out: Path,
    tensors: Mapping[str, Tensor],
    config_file: Path,
    beside: Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model whole or not at all.

    Args:
        out: a name that ends in ``.safetensors`` becomes a bare file, any other a folder that
            ``from_pretrained`` loads.
        tensors: contiguous, tied ones once.
        config_file: copied into the folder as ``config.json``.
        beside: the folder whose tokenizer and generation configuration are copied too.
        dtype: what the configuration says from now on; None leaves it as it is.

    Raises:
        OSError: there is something already, or it cannot be written.
    """
    refuse_filled(out)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as target:
        if out.suffix == SUFFIX:
            _save(tensors, target)
            return
        target.mkdir()
        _save(tensors, target / WEIGHTS)
        (target / CONFIG).write_text(_config_text(config_file, dtype), encoding="utf-8")
        for file in (beside / name for name in BESIDE) if beside else ():
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def _config_text(file: Path, dtype: torch.dtype | None) -> str:
    text = file.read_text(encoding="utf-8")
    if dtype is None:
        return text
    settings = json.loads(text)
    # Older versions of transformers know the other name only.
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    return json.dumps({**settings, key: str(dtype).removeprefix("torch.")}, indent=2) + "\n"


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"'{file}' cannot be written: {error}") from error
