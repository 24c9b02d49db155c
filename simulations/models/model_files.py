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

#: Files of a tokenizer: any one of these is enough.
TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
#: Files that are copied with a model.
BESIDE = (
    *TOKENIZER,
    *("tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("merges.txt", "chat_template.jinja", "generation_config.json"),
)
#: Weights as older versions of transformers save them; they cannot be mapped.
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

SAVE_AGAIN = "Load it with transformers and save it with save_pretrained."
_MERGE_ADAPTERS = "Merge the adapters into the model (peft: merge_and_unload) and save it again."
_DEQUANTISE = "Give the model before quantisation, or dequantize() it with transformers and save it."

#: Files of a folder that holds no model of its own, with advice.
_INSTEAD = {
    "adapter_config.json": "Load it with peft, merge_and_unload it into its base model, and save that.",
    **dict.fromkeys(PICKLED, SAVE_AGAIN),
}

#: Names that data parallelism, compilation, sharding and adapters add to those of modules.
_WRAPPERS = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|base_model\.model|base_layer)\.(?=.)"
)

#: Names of tensors that plain models do not have, with advice.
_NOT_PLAIN = (
    (re.compile(r"(^|\.)(lora_[A-Za-z_]+|ia3_l)(\.|$)"), "an adapter", _MERGE_ADAPTERS),
    (
        re.compile(r"\.(qweight|qzeros|SCB|absmax|quant_map|weight_packed|quant_state\..+)$"),
        "a quantised model",
        _DEQUANTISE,
    ),
)

#: Dtypes of weights that are not quantised: 8 bits and fewer need scales from another tensor.
_WEIGHTS_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

#: A file, and the name of a tensor in it.
Place = tuple[Path, str]


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Put the name of a file or folder in front of every ``FedrotError``."""
    try:
        yield
    except FedrotError as error:
        raise type(error)(f"'{path}': {error}") from error


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; raises ``FedrotError`` if it is damaged.

    Tensors that are read stay views of the mapped file after it is closed.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise FedrotError(f"'{file}' is damaged or no safetensors file: {error}") from error


def refuse_quantised(settings: Mapping[str, Any], where: object) -> None:
    """Raise ``FedrotError`` if a configuration describes a quantised model."""
    described = settings.get("quantization_config")
    if described:
        method = described.get("quant_method") if isinstance(described, Mapping) else None
        raise FedrotError(
            f"'{where}' is quantised{f' ({method})' if method else ''}: its weights cannot be moved. "
            f"{_DEQUANTISE}"
        )


def stored_tensors(path: Path) -> dict[str, Place]:
    """Return where each tensor of a bare safetensors file or a folder is stored.

    Keys are the model's own names, without the additions of wrappers (``module.``, ``_orig_mod.``,
    ``_fsdp_wrapped_module.``, ``base_model.model.``, ``base_layer.``).

    Raises:
        FedrotError: a file is missing or damaged, a shard lacks a tensor of the index, or the tensors
            are those of an adapter, of a quantised model or of several models.
    """
    found: dict[str, Place] = {}
    for name, (file, dtype) in _listed(path).items():
        for pattern, owner, advice in _NOT_PLAIN:
            if pattern.search(name):
                raise FedrotError(f"'{file}' holds '{name}', a tensor of {owner}. {advice}")
        if name.endswith(".weight") and dtype not in _WEIGHTS_DTYPES:
            raise FedrotError(
                f"'{file}' holds '{name}' as {dtype}, so it is quantised and cannot be moved. "
                f"{_DEQUANTISE}"
            )
        clean = _WRAPPERS.sub("", name)
        if clean in found:
            raise FedrotError(
                f"'{path}' holds both '{found[clean][1]}' and '{name}', which differ only in a wrapper. "
                f"Save one model. {SAVE_AGAIN}"
            )
        found[clean] = (file, name)
    return found


def _listed(path: Path) -> dict[str, tuple[Path, str]]:
    """Return the file and the dtype of every tensor, by its name there."""
    single, index = (path, None) if path.is_file() else (path / WEIGHTS, path / INDEX)
    if single.is_file():
        return {name: (single, dtype) for name, dtype in _dtypes(single).items()}
    if index is None or not index.is_file():
        raise FedrotError(f"'{path}' has no {WEIGHTS} and no {INDEX}. {instead(path)}")
    try:
        files = {n: path / f for n, f in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FedrotError(f"'{index}' is damaged: it has no readable 'weight_map'.") from error
    dtypes = {file: _dtypes(file) for file in dict.fromkeys(files.values()) if file.is_file()}
    for name, file in files.items():
        if name not in dtypes.get(file, ()):
            raise FedrotError(
                f"'{index}' lists '{name}' in '{file}', which is not there. Copy all shards."
            )
    return {name: (file, dtypes[file][name]) for name, file in files.items()}


def _dtypes(file: Path) -> dict[str, str]:
    with opened(file) as handle:
        names = handle.keys()
        return {name: handle.get_slice(name).get_dtype() for name in names}


def instead(folder: Path) -> str:
    """Return advice on a folder that holds no saved model."""
    for name, advice in _INSTEAD.items():
        if (folder / name).is_file():
            return f"There is '{name}' instead. {advice}"
    return SAVE_AGAIN


def refuse_filled(out: Path) -> None:
    """Raise ``FileExistsError`` unless ``out`` is absent or an empty folder."""
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
        dtype: written into the configuration unless None.

    Raises:
        OSError: ``out`` is not empty, or cannot be written.
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
    # Older versions of transformers write torch_dtype.
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    return json.dumps({**settings, key: str(dtype).removeprefix("torch.")}, indent=2) + "\n"


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"'{file}' cannot be written: {error}") from error
