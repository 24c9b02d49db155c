"""Files of a saved model: names, readers and writers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedrot._io import as_os_error, read_json, refuse_pointer, replacing
from fedrot.errors import FedrotError
from fedrot.simulations.models.packaged import no_bars

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SUFFIX = ".safetensors"

#: Files of a tokenizer; one of them is enough.
TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
#: Files that are copied with a model.
BESIDE = (
    *TOKENIZER,
    *("tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("merges.txt", "chat_template.jinja", "generation_config.json"),
)
#: Files of weights from older versions of transformers.
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

SAVE_AGAIN = "Load it with transformers and save it with save_pretrained."
_MERGE_ADAPTERS = "Merge the adapters into the model (peft: merge_and_unload) and save it again."
_DEQUANTISE = "Give the model before quantisation, or dequantize() it with transformers and save it."

#: Files of folders that hold no whole model, with advice.
_INSTEAD = {
    "adapter_config.json": "Average adapters with fedrot merge; or load it with peft, "
    "merge_and_unload it into its base model, and save that.",
}

#: Prefixes that data parallelism, compilation, sharding and adapters add to names of modules.
WRAPPERS = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|base_model\.model|base_layer)\.(?=.)"
)

#: Names in the oldest BERT files on the hub; transformers translates them, too.
_OLD_NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
_NEW_NORM = {"gamma": "weight", "beta": "bias"}

#: Names of tensors that adapters and quantised models have, with advice.
_NOT_PLAIN = (
    (re.compile(r"(^|\.)(lora_[A-Za-z_]+|ia3_l)(\.|$)"), "an adapter", _MERGE_ADAPTERS),
    (
        re.compile(r"\.(qweight|qzeros|SCB|absmax|quant_map|weight_packed|quant_state\..+)$"),
        "a quantised model",
        _DEQUANTISE,
    ),
)

#: Dtypes of weights that are not quantised. Weights of 8 bits or fewer need scales in other tensors.
_WEIGHTS_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Add the name of a file or folder to the front of every ``FedrotError``."""
    try:
        yield
    except FedrotError as error:
        raise type(error)(f"'{path}': {error}") from error


def refuse_unwritten(file: Path) -> None:
    """Raise ``FedrotError`` if a file is empty, or only the pointer of git-lfs."""
    if not file.stat().st_size:
        raise FedrotError(f"'{file}' is empty. Copy it again, or save it again with save_pretrained.")
    refuse_pointer(file)


def _refuse_empty(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ``FedrotError`` if a tensor of a file has no entries, as after DeepSpeed's ZeRO-3."""
    empty = [name for name, tensor in tensors.items() if not tensor.numel()]
    if empty:
        raise FedrotError(
            f"'{file}' holds '{min(empty)}' without entries ({len(empty)} of {len(tensors)} tensors are "
            "empty). Sharded training (ZeRO-3, FSDP) saves such files if weights are not gathered. "
            "Gather them and save again: for DeepSpeed with stage3_gather_16bit_weights_on_model_save, "
            "or its zero_to_fp32.py; for FSDP with a full state dict."
        )


def clean_names(path: Path, names: Iterable[str], wrappers: re.Pattern[str]) -> dict[str, str]:
    """Return the names in a file or folder, by name without wrappers.

    Raises ``FedrotError`` if two names differ only in a wrapper.
    """
    found: dict[str, str] = {}
    for name in names:
        clean = _OLD_NORM.sub(lambda old: _NEW_NORM[old[0]], wrappers.sub("", name))
        if clean in found:
            raise FedrotError(
                f"'{path}' holds both '{found[clean]}' and '{name}', which differ only in a wrapper. "
                f"Save one model. {SAVE_AGAIN}"
            )
        found[clean] = name
    return found


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or a pickle, mapped if the format allows it.

    No code of a pickle is run.

    Raises:
        FedrotError: the file is empty or damaged, or holds other things than tensors by name.
    """
    refuse_unwritten(file)
    try:
        if file.suffix == SUFFIX:
            found = load_file(file)
        else:
            # Files from before PyTorch 1.6 are no zip archives and cannot be mapped.
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except SafetensorError as error:
        raise FedrotError(
            f"'{file}' is damaged or no safetensors file: {error}. Copy or save it again."
        ) from error
    except Exception as error:  # of many kinds
        raise FedrotError(
            f"'{file}' cannot be loaded: it is damaged, or holds more than tensors, which is not safe. "
            "If you trust it, load it and save it as safetensors, with save_pretrained."
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise FedrotError(f"'{file}' holds no tensors by name. {SAVE_AGAIN}")
    _refuse_empty(file, found)
    return dict(found)


def refuse_quantised(settings: Mapping[str, Any], where: object) -> None:
    """Raise ``FedrotError`` if a configuration describes a quantised model."""
    if described := settings.get("quantization_config"):
        method = described.get("quant_method") if isinstance(described, Mapping) else None
        raise FedrotError(
            f"'{where}' is quantised{f' ({method})' if method else ''}: its weights cannot be moved. "
            f"{_DEQUANTISE}"
        )


def read_model(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by the model's own names; see ``read_tensors``.

    Prefixes of wrappers such as ``module.`` are removed. Files stay mapped as long as one of their
    tensors is kept.

    Raises:
        FedrotError: a file is missing or damaged, a shard lacks a tensor of the index, or the tensors
            are those of an adapter, of a quantised model or of several models.
    """
    stored = read_files(path)
    return {clean: stored[name] for clean, name in clean_names(path, stored, WRAPPERS).items()}


def read_files(path: Path) -> dict[str, Tensor]:
    """Return the tensors of ``read_model`` by the stored names."""
    there = (path / name for name in (WEIGHTS, INDEX, *PICKLED))
    file = next(filter(Path.is_file, there), None)
    if file is None:
        raise FedrotError(f"'{path}' has no {WEIGHTS} and no {INDEX}. {instead(path)}")
    return _read_shards(file) if file.suffix == ".json" else _read_plain(file)


def _read_plain(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file; raises ``FedrotError`` for adapters and quantised models."""
    tensors = read_tensors(file)
    for name, tensor in tensors.items():
        for pattern, owner, advice in _NOT_PLAIN:
            if pattern.search(name):
                raise FedrotError(f"'{file}' holds '{name}', a tensor of {owner}. {advice}")
        if name.endswith(".weight") and tensor.dtype not in _WEIGHTS_DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise FedrotError(
                f"'{file}' holds '{name}' as {dtype}: it is quantised and cannot be moved. {_DEQUANTISE}"
            )
    return tensors


def _read_shards(index: Path) -> dict[str, Tensor]:
    files = _shards(index)
    held = {file: _read_plain(file) for file in dict.fromkeys(files.values()) if file.is_file()}
    for name, file in files.items():
        if name not in held.get(file, ()):
            raise FedrotError(
                f"'{index}' lists '{name}' in '{file}', which does not have it. Copy all shards."
            )
    return {name: held[file][name] for name, file in files.items()}


def _shards(index: Path) -> dict[str, Path]:
    """Return the file of every tensor that an index lists."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise FedrotError(f"'{index}' is damaged: it has no readable 'weight_map'.")
    outside = next((file for file in shards.values() if Path(file).name != file), None)
    if outside is not None:
        raise FedrotError(f"'{index}' is damaged: '{outside}' is not a file name in its folder.")
    return {name: index.parent / file for name, file in shards.items()}


def instead(folder: Path) -> str:
    """Return advice about a folder that holds no saved model."""
    broken = next((p for p in sorted(folder.glob("*")) if p.is_symlink() and not p.exists()), None)
    if broken is not None:
        return (
            f"'{broken.name}' links to '{broken.readlink()}', which does not exist. Download it again."
        )
    found = (
        f"There is '{n}' instead. {advice}" for n, advice in _INSTEAD.items() if (folder / n).is_file()
    )
    return next(found, None) or (
        f"There are shards, but {INDEX}, which lists them, is missing. Copy it, too."
        if any(folder.glob("model-*-of-*.safetensors"))
        else below(folder, CONFIG) or SAVE_AGAIN
    )


def below(folder: Path, name: str) -> str:
    """Return advice if a file is one or two folders deeper (checkpoints, the hub's cache), else ''."""
    deeper = sorted([*folder.glob(f"*/{name}"), *folder.glob(f"*/*/{name}")])
    given = ", ".join(f"'{file.parent}'" for file in deeper[:3])
    return f"There is one below it: give {given}{', ...' if deeper[3:] else ''}." if deeper else ""


def refuse_filled(out: Path) -> None:
    """Raise ``FileExistsError`` unless ``out`` is absent or an empty folder.

    Raises ``FedrotError`` for the name of a file: a model has files with its configuration, too.
    """
    if out.suffix == SUFFIX:
        raise FedrotError(f"'{out}' names a file, and a model is a folder of files. Leave {SUFFIX} out.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"'{out}' exists and is not an empty folder. Choose another --out.")


def write_model(out: Path, tensors: Mapping[str, Tensor], shell: Any, beside: Path) -> None:
    """Write a model completely or not at all.

    Args:
        out: a new or empty folder, for ``from_pretrained``.
        tensors: tensors by the names of the state dict; tied tensors once.
        shell: a model of the class without values; its ``save_pretrained`` writes the tensors.
        beside: the folder whose configuration and tokenizer are copied.

    Raises:
        OSError: ``out`` is not empty, or cannot be written.
        FedrotError: ``out`` is the name of a file.
    """
    refuse_filled(out)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as target, no_bars():
        with as_os_error(target):
            shell.save_pretrained(target, state_dict=dict(tensors))
        for file in (beside / name for name in (CONFIG, *BESIDE)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def first_names(model: nn.Module) -> dict[str, str]:
    """Return, for every name of a state dict, the first of the names with the same tensor."""
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: names.setdefault(id(tensor), name) for name, tensor in state.items()}


def refuse_missing(path: Path, model: nn.Module, missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Raise ``FedrotError`` if a saved model lacks tensors of its class."""
    if not missing:
        return
    name = type(model).__name__
    stored = f"'{path}' has '{unknown[0]}', which a {name} does not have. " if unknown else ""
    raise FedrotError(
        f"'{path}' has no tensor '{missing[0]}' ({len(missing)} missing in all), which a {name} has. "
        f"{stored}Check that weights and configuration belong together. "
        f"{_prefixed(unknown, missing) or SAVE_AGAIN}"
    )


def _prefixed(stored: Sequence[str], wanted: Sequence[str]) -> str:
    """Return advice if the stored names have an additional prefix, else ''."""
    wrappers = {name.partition(".")[2]: name.partition(".")[0] for name in stored}
    prefix = next((wrappers[name] for name in wanted if name in wrappers), "")
    return prefix and (
        f"The stored names have a prefix '{prefix}.': save the model inside of the wrapper "
        f"(wrapper.{prefix}.save_pretrained)."
    )
