"""Files of a saved model: their names, how their tensors are mapped, and how they are written."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedrot._io import read_json, refuse_pointer, replacing, write_tensors
from fedrot.errors import FedrotError
from fedrot.simulations.models.packaged import loading

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
    "adapter_config.json": "Average adapters by fedrot merge-adapters; or load it with peft, "
    "merge_and_unload it into its base model, and save that.",
    **dict.fromkeys(PICKLED, SAVE_AGAIN),
}

#: Names that data parallelism, compilation, sharding and adapters add to those of modules.
_WRAPPERS = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|base_model\.model|base_layer)\.(?=.)"
)

#: Names of the oldest BERT files on the hub, which transformers translates, too.
_OLD_NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
_NEW_NORM = {"gamma": "weight", "beta": "bias"}

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


def refuse_unwritten(file: Path) -> None:
    """Raise ``FedrotError`` if a file is empty, or only the pointer of git-lfs."""
    if not file.stat().st_size:
        raise FedrotError(f"'{file}' is empty. Copy it again, or save it again with save_pretrained.")
    refuse_pointer(file)


def refuse_empty(file: Path, shapes: Mapping[str, Iterable[int]]) -> None:
    """Raise ``FedrotError`` if a tensor of a file has no entries, as DeepSpeed's ZeRO-3 leaves them."""
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if empty:
        raise FedrotError(
            f"'{file}' holds '{empty[0]}' without entries ({len(empty)} of {len(shapes)} tensors are "
            "empty), as sharded training (ZeRO-3, FSDP) leaves weights that are not gathered. Gather "
            "them and save again: for DeepSpeed by stage3_gather_16bit_weights_on_model_save, or by its "
            "zero_to_fp32.py; for FSDP with a full state dict."
        )


def clean_names(path: Path, names: Iterable[str], wrappers: re.Pattern[str]) -> dict[str, str]:
    """Return the names in a file or folder by what they are without wrappers.

    Raises ``FedrotError`` if two of them differ in nothing else.
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


def read_pickle(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle, mapped where its format allows; no code in it is run.

    Raises:
        FedrotError: it is empty or damaged, or holds anything but tensors by name.
    """
    refuse_unwritten(file)
    try:
        # Before PyTorch 1.6 files were no archives: they cannot be mapped.
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except Exception as error:  # of many kinds
        raise FedrotError(
            f"'{file}' cannot be loaded: it is damaged, or holds more than tensors, which is not safe. "
            "Where you trust it, load it and save it as safetensors, with save_pretrained."
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise FedrotError(f"'{file}' holds no tensors by name. {SAVE_AGAIN}")
    refuse_empty(file, {name: tensor.shape for name, tensor in found.items()})
    return dict(found)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; raises ``FedrotError`` if it is damaged."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        refuse_unwritten(file)
        raise FedrotError(
            f"'{file}' is damaged or no safetensors file: {error}. Copy or save it again."
        ) from error


def refuse_quantised(settings: Mapping[str, Any], where: object) -> None:
    """Raise ``FedrotError`` if a configuration describes a quantised model."""
    if described := settings.get("quantization_config"):
        method = described.get("quant_method") if isinstance(described, Mapping) else None
        raise FedrotError(
            f"'{where}' is quantised{f' ({method})' if method else ''}: its weights cannot be moved. "
            f"{_DEQUANTISE}"
        )


def stored_tensors(path: Path) -> dict[str, Place]:
    """Return where each tensor of a bare safetensors file or a folder is stored.

    Keys are the model's own names, without the additions of wrappers such as ``module.``.

    Raises:
        FedrotError: a file is missing or damaged, a shard lacks a tensor of the index, or the tensors
            are those of an adapter, of a quantised model or of several models.
    """
    listed = _listed(path)
    for name, (file, dtype) in listed.items():
        for pattern, owner, advice in _NOT_PLAIN:
            if pattern.search(name):
                raise FedrotError(f"'{file}' holds '{name}', a tensor of {owner}. {advice}")
        if name.endswith(".weight") and dtype not in _WEIGHTS_DTYPES:
            raise FedrotError(
                f"'{file}' holds '{name}' as {dtype}, so it is quantised and cannot be moved. "
                f"{_DEQUANTISE}"
            )
    names = clean_names(path, listed, _WRAPPERS)
    return {clean: (listed[name][0], name) for clean, name in names.items()}


def unwrapped(folder: Path) -> dict[str, Tensor] | None:
    """Return all tensors of a folder by names without wrappers; None if no name has one.

    Raises as ``stored_tensors`` does; pickles are read, too, see ``read_pickle``.
    """
    there = [file for file in (WEIGHTS, INDEX, *PICKLED) if (folder / file).is_file()]
    if not there or there[0] not in PICKLED:
        stored = stored_tensors(folder)
        wrapped = any(name != as_stored for name, (_, as_stored) in stored.items())
        return read_places(stored) if wrapped else None
    index = folder / PICKLED[1]
    files = [folder / there[0]] if there[0] == PICKLED[0] else [*dict.fromkeys(_shards(index).values())]
    missing = next((file for file in files if not file.is_file()), None)
    if missing:
        raise FedrotError(f"'{index}' lists '{missing}', which is not there. Copy all shards.")
    tensors = {name: tensor for file in files for name, tensor in read_pickle(file).items()}
    names = clean_names(folder, tensors, _WRAPPERS)
    return (
        None
        if all(map(str.__eq__, names, names.values()))
        else {c: tensors[n] for c, n in names.items()}
    )


def _listed(path: Path) -> dict[str, tuple[Path, str]]:
    """Return the file and the dtype of every tensor, by its name there."""
    single, index = (path, None) if path.is_file() else (path / WEIGHTS, path / INDEX)
    if single.is_file():
        return {name: (single, dtype) for name, dtype in _dtypes(single).items()}
    if index is None or not index.is_file():
        raise FedrotError(f"'{path}' has no {WEIGHTS} and no {INDEX}. {instead(path)}")
    files = _shards(index)
    dtypes = {file: _dtypes(file) for file in dict.fromkeys(files.values()) if file.is_file()}
    for name, file in files.items():
        if name not in dtypes.get(file, ()):
            raise FedrotError(
                f"'{index}' lists '{name}' in '{file}', which is not there. Copy all shards."
            )
    return {name: (file, dtypes[file][name]) for name, file in files.items()}


def _shards(index: Path) -> dict[str, Path]:
    """Return the file of every tensor that an index lists."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise FedrotError(f"'{index}' is damaged: it has no readable 'weight_map'.")
    outside = next((file for file in shards.values() if Path(file).name != file), None)
    if outside is not None:
        raise FedrotError(f"'{index}' is damaged: '{outside}' is no file of its folder.")
    return {name: index.parent / file for name, file in shards.items()}


def read_places(places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Return the tensors at these places, as views of the mapped files.

    A file and the pages that were read stay in memory as long as one of its tensors is kept.
    """
    with ExitStack() as stack:
        files = dict.fromkeys(file for file, _ in places.values())
        handles = {file: stack.enter_context(_opened(file)) for file in files}
        return {name: handles[file].get_tensor(stored) for name, (file, stored) in places.items()}


def _dtypes(file: Path) -> dict[str, str]:
    with _opened(file) as handle:
        names = handle.keys()
        slices = {name: handle.get_slice(name) for name in names}
        refuse_empty(file, {name: own.get_shape() for name, own in slices.items()})
        return {name: own.get_dtype() for name, own in slices.items()}


def instead(folder: Path) -> str:
    """Return advice on a folder that holds no saved model."""
    broken = next((p for p in sorted(folder.glob("*")) if p.is_symlink() and not p.exists()), None)
    if broken is not None:
        return (
            f"'{broken.name}' is a link to '{broken.readlink()}', which is not there. Download it again."
        )
    found = (
        f"There is '{n}' instead. {advice}" for n, advice in _INSTEAD.items() if (folder / n).is_file()
    )
    return next(found, None) or (
        f"There are shards, but not the {INDEX} that lists them. Copy it, too."
        if any(folder.glob("model-*-of-*.safetensors"))
        else below(folder, CONFIG) or SAVE_AGAIN
    )


def below(folder: Path, name: str) -> str:
    """Return advice if a file lies one or two folders deeper (checkpoints, the hub's cache), else ''."""
    deeper = sorted([*folder.glob(f"*/{name}"), *folder.glob(f"*/*/{name}")])
    given = ", ".join(f"'{file.parent}'" for file in deeper[:3])
    return f"There is one below it: give {given}{', ...' if deeper[3:] else ''}." if deeper else ""


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
        out: a bare file if it ends in ``.safetensors``, else a folder that ``from_pretrained`` loads.
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
            write_tensors(target, tensors, {"format": "pt"})
            return
        target.mkdir()
        write_tensors(target / WEIGHTS, tensors, {"format": "pt"})
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


@dataclass(frozen=True)
class MappedTensors:
    """The tensors of a model on disk by the names of its state dict; values are read on demand.

    Attributes:
        first: for every name, the first of the names that share its tensor.
        places: where each tensor is stored, by first name.
        unknown: stored names that the state dict does not have.
    """

    shapes: Mapping[str, tuple[int, ...]]
    first: Mapping[str, str]
    places: Mapping[str, Place]
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, config_file: Path, model_class: Any, config: Any) -> MappedTensors:
        """Find the tensors of a class with a configuration in a folder or file.

        Raises ``FedrotError`` if one is missing or of another shape, or if tied tensors differ.
        """
        with loading(config_file), torch.device("meta"):
            model = model_class(config)
        first = first_names(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        stored = stored_tensors(path)
        unknown = tuple(sorted(stored.keys() - first.keys()))
        found = cls(shapes, first, _places(path, stored, first, model_class.__name__), unknown)
        for name, tensor in found.read().items():
            if tuple(tensor.shape) != shapes[name]:
                raise FedrotError(
                    f"'{path}': the tensor '{name}' has shape {list(tensor.shape)}, but should have "
                    f"{list(shapes[name])} by '{config_file}'. Check that they belong together."
                )
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which ``save_pretrained`` stores the tensors: tied ones once."""
        return tuple(self.places)

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return tensors by name, all by default; tied names share one. See ``read_places``."""
        wanted = list(self.first if names is None else names)
        first = dict.fromkeys(self.first[name] for name in wanted)
        found = read_places({name: self.places[name] for name in first})
        return {name: found[self.first[name]] for name in wanted}


def first_names(model: nn.Module) -> dict[str, str]:
    """Return for every name of a state dict the first of the names that share its tensor."""
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: names.setdefault(id(tensor), name) for name, tensor in state.items()}


#: Beginnings of the names of classes that transformers stores under other names than in memory.
_RENAMED = ("ViT", "DeiT", "GPTNeoX", "Mixtral")


def _places(
    path: Path, stored: Mapping[str, Place], first: Mapping[str, str], model_class: str
) -> dict[str, Place]:
    """Return the place of each tensor; of tied tensors the first copy, after a check of the others."""
    copies: dict[str, list[str]] = defaultdict(list)
    for name, one in first.items():
        copies[one] += [name] if name in stored else []
    missing = [name for name, names in copies.items() if not names]
    unknown = sorted(stored.keys() - first.keys())
    if missing and unknown and model_class.startswith(_RENAMED):
        raise FedrotError(
            f"'{path}' has '{unknown[0]}' where a {model_class} in memory has '{missing[0]}': such "
            "models (ViT, DeiT, GPT-NeoX, Mixtral) are stored by transformers under other names, which "
            "this command does not translate. Load them with from_pretrained, and use fedrot.align in "
            "Python."
        )
    if missing and unknown:
        raise FedrotError(
            f"'{path}' stores '{unknown[0]}', which a {model_class} does not have, and lacks "
            f"'{missing[0]}' ({len(missing)} missing in all). Check that it and its configuration "
            f"belong together. {_prefixed(unknown, missing) or _TRANSLATED}"
        )
    if missing:
        raise FedrotError(
            f"'{path}' has no tensor '{missing[0]}' ({len(missing)} missing in all), which a "
            f"{model_class} has. Check that it and its configuration belong together. {SAVE_AGAIN}"
        )
    for one, *others in copies.values():
        for other in others:
            if not torch.equal(*read_places({name: stored[name] for name in (one, other)}).values()):
                raise FedrotError(
                    f"'{path}' holds different values in '{one}' and '{other}', which its configuration "
                    "ties. Set its 'tie_word_embeddings' to what the model was trained with."
                )
    return {one: stored[names[0]] for one, names in copies.items()}


_TRANSLATED = (
    "Some classes (ViT, DeiT) are stored by transformers under other names than they have in memory, "
    "which this command does not translate: load them with from_pretrained, merge with fedrot.align and "
    "save the result."
)


def _prefixed(stored: Sequence[str], wanted: Sequence[str]) -> str:
    """Return a sentence if the stored names have a prefix more, or less, than those of the class."""
    for longer, shorter in ((stored, wanted), (wanted, stored)):
        endings = {name.partition(".")[2]: name.partition(".")[0] for name in longer}
        same = [endings[name] for name in shorter if name in endings]
        if same and longer is stored:
            return (
                f"The stored names have a prefix '{same[0]}.': save the model inside of the wrapper "
                f"(wrapper.{same[0]}.save_pretrained)."
            )
        if same:
            return (
                f"The stored names lack '{same[0]}.': it is the bare model, without this class's head. "
                f"Name the bare model's class under 'architectures' in its {CONFIG}."
            )
    return ""
