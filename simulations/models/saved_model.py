"""Models on disk, opened without being loaded."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.simulations.models.barrier_models import ARCHITECTURE
from fedrot.simulations.models.model_files import (
    CONFIG,
    SAVE_AGAIN,
    SUFFIX,
    TOKENIZER,
    about,
    instead,
    opened,
    refuse_quantised,
    stored_tensors,
)


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk whose tensors are read when they are asked for.

    Attributes:
        path: a folder written by ``save_pretrained``, or a bare ``.safetensors`` file.
        name: the same, or the model's name on the hub.
        config_file: its configuration, ``config`` the same as an object of transformers.
        model_class: the class of transformers that the configuration names.
        beside: the folder of its tokenizer and generation configuration, if there is one.
        shapes: of every tensor of the state dict.
        first: for every name of the state dict, the first of those that share its tensor.
        places: the file and the name in it, by first name.
        unknown: what is stored beside the tensors of the state dict.
    """

    path: Path
    name: str
    config_file: Path
    config: Any
    model_class: Any
    beside: Path | None
    shapes: Mapping[str, tuple[int, ...]]
    first: Mapping[str, str]
    places: Mapping[str, tuple[Path, str]]
    unknown: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which ``save_pretrained`` stores the tensors: tied ones once."""
        return tuple(self.places)

    @property
    def tokenizer(self) -> Path | None:
        """The folder to load the tokenizer from, if it has one."""
        folder = self.beside
        return folder if folder and any((folder / name).is_file() for name in TOKENIZER) else None

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return tensors by name, those of the whole state dict if no names are given.

        They are views of the mapped files, which stay mapped as long as one of them is kept; tied
        names hold one and the same tensor.
        """
        wanted = list(self.first if names is None else names)
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            handles: dict[Path, Any] = {}
            for name in dict.fromkeys(self.first[name] for name in wanted):
                file, stored = self.places[name]
                if file not in handles:
                    handles[file] = stack.enter_context(opened(file))
                found[name] = handles[file].get_tensor(stored)
        return {name: found[self.first[name]] for name in wanted}

    def build(self) -> nn.Module:
        """Return a float32 model of this class, in evaluation mode; its weights are not these."""
        return self.model_class(self.config).float().eval()


def open_checkpoint(path: Path, config: Path | None = None, name: str | None = None) -> Checkpoint:
    """Open a model on disk: names and shapes are read and checked, values are not.

    Args:
        path: a folder with ``config.json`` and ``model.safetensors`` (or its index and shards), or a
            bare ``.safetensors`` file.
        config: for a bare file, its ``config.json`` or a folder with one, whose tokenizer is the
            model's too.
        name: the model's name in reports; ``path`` if not given.

    Raises:
        FedrotError: a file is missing or damaged, the family is not supported, the weights are
            quantised or an adapter's, or not those of the class that the configuration names.
    """
    config_file, beside = _belongings(path, config)
    settings = read_config(config_file)
    model_class = _model_class(settings, config_file)
    with torch.device("meta"):
        state = model_class(settings).state_dict(keep_vars=True)
    firsts: dict[int, str] = {}
    first = {name: firsts.setdefault(id(tensor), name) for name, tensor in state.items()}
    stored = stored_tensors(path)
    checkpoint = Checkpoint(
        path,
        name or str(path),
        config_file,
        settings,
        model_class,
        beside,
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        first=first,
        places=_places(path, stored, first, model_class.__name__),
        unknown=tuple(sorted(stored.keys() - first.keys())),
    )
    for name, tensor in checkpoint.read().items():
        if tuple(tensor.shape) != checkpoint.shapes[name]:
            raise FedrotError(
                f"'{path}': the tensor '{name}' has shape {list(tensor.shape)}, but should have "
                f"{list(checkpoint.shapes[name])} by '{config_file}'. Check that they belong together."
            )
    return checkpoint


def _belongings(path: Path, config: Path | None) -> tuple[Path, Path | None]:
    """Return a model's configuration, and the folder of what else belongs to it."""
    if path.is_dir():
        folder, file = path, path / CONFIG
    elif not path.is_file():
        raise FedrotError(f"'{path}' does not exist. Give a folder of a saved model or a {SUFFIX} file.")
    elif config is None:
        raise FedrotError(
            f"'{path}' is a bare file. Give its configuration with --config, a {CONFIG} or a folder "
            "with one."
        )
    elif config.is_dir():
        folder, file = config, config / CONFIG
    else:
        folder, file = None, config
    if not file.is_file():
        raise FedrotError(
            f"'{file}' does not exist. A model needs its configuration. {instead(file.parent)}"
        )
    return file, folder


def read_config(file: Path) -> Any:
    """Return a configuration on disk as an object of transformers.

    Raises:
        FedrotError: it is damaged, its family is not supported, or its model is quantised.
    """
    from transformers import AutoConfig

    from fedrot.symmetry import check_family

    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        with about(file):
            check_family(settings)
        refuse_quantised(settings, file)
    except json.JSONDecodeError as error:
        raise FedrotError(f"'{file}' is damaged: it is no JSON ({error}).") from error
    return AutoConfig.from_pretrained(file, local_files_only=True)


def _model_class(config: Any, file: Path) -> Any:
    import transformers

    named = config.architectures or []
    found = getattr(transformers, named[0], None) if len(named) == 1 else None
    if found is None:
        raise FedrotError(
            f"'{file}' names {named or 'nothing'} under 'architectures'; it should name one model class "
            f'of transformers, such as ["BertForMaskedLM"]. {SAVE_AGAIN}'
        )
    return found


def _places(
    path: Path, stored: Mapping[str, tuple[Path, str]], first: Mapping[str, str], model_class: str
) -> dict[str, tuple[Path, str]]:
    """Return where each tensor lies; of tied ones any copy will do."""
    copies: dict[str, list[str]] = defaultdict(list)
    for name, one in first.items():
        copies[one] += [name] if name in stored else []
    missing = [name for name, names in copies.items() if not names]
    unknown = sorted(stored.keys() - first.keys())
    if missing and unknown:
        raise FedrotError(
            f"'{path}' stores '{unknown[0]}', which a {model_class} does not have, and lacks "
            f"'{missing[0]}' ({len(missing)} missing in all). Check that it and its configuration "
            "belong together. Some classes (ViT, DeiT) are stored by transformers under other names "
            "than they have in memory, which this command does not translate: load them with "
            "from_pretrained, merge with fedrot.align and save the result."
        )
    if missing:
        raise FedrotError(
            f"'{path}' has no tensor '{missing[0]}' ({len(missing)} missing in all), which a "
            f"{model_class} has. Check that it and its configuration belong together. {SAVE_AGAIN}"
        )
    for one, *others in copies.values():
        for other in others:
            (file, here), (beside, there) = stored[one], stored[other]
            with opened(file) as a, opened(beside) as b:
                same = torch.equal(a.get_tensor(here), b.get_tensor(there))
            if not same:
                raise FedrotError(
                    f"'{path}' holds different values in '{one}' and '{other}', which its configuration "
                    "ties. Set its 'tie_word_embeddings' to what the model was trained with."
                )
    return {one: stored[names[0]] for one, names in copies.items()}


def check_alike(one: Checkpoint, other: Checkpoint) -> None:
    """Check that two models differ in nothing but the values of their tensors.

    Raises:
        FedrotError: naming what differs: the class, the architecture, a shape or the vocabulary.
    """
    a, b = one.path, other.path
    for name in ("architectures", *ARCHITECTURE):
        here, there = getattr(one.config, name, None), getattr(other.config, name, None)
        if here != there:
            raise FedrotError(
                f"Different architectures: {name} is {here} in '{a}' and {there} in '{b}'. Only models "
                "of one architecture can be merged."
            )
    for name, shape in one.shapes.items():
        if other.shapes.get(name) != shape:
            raise FedrotError(
                f"Different shapes: the tensor '{name}' is {shape} in '{a}' and "
                f"{other.shapes.get(name)} in '{b}'. Only models of one architecture can be merged."
            )
    folders = {folder for folder in (one.tokenizer, other.tokenizer) if folder}
    if len({_vocabulary(folder) for folder in folders}) > 1:
        raise FedrotError(
            f"Different vocabularies: the tokens of '{a}' and '{b}' are not the same. Only models that "
            "were trained with one tokenizer can be merged."
        )


def _vocabulary(folder: Path) -> frozenset[tuple[str, int]]:
    from transformers import AutoTokenizer

    return frozenset(AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab().items())
