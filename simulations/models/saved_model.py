"""``SavedModel``: a saved model on disk or on the hub, its configuration and its tensors."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrot._io import read_json
from fedrot.errors import FedrotError
from fedrot.simulations.models.model_files import (
    BESIDE,
    CONFIG,
    INDEX,
    PICKLED,
    SAVE_AGAIN,
    SUFFIX,
    TOKENIZER,
    WEIGHTS,
    about,
    first_names,
    instead,
    read_model,
    refuse_missing,
    refuse_quantised,
    refuse_unwritten,
)
from fedrot.simulations.models.packaged import PACKAGED, loading, no_bars, source_of
from fedrot.symmetry import check_family
from fedrot.tensors import Tensors

#: ``name`` or ``owner/name`` of a model on the hub.
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Outline:
    """Names and shapes of a saved model's tensors.

    Attributes:
        shapes: shapes by the names of the state dict.
        first: for every name, the first of the names with the same tensor.
        unknown: stored names that the class does not have.
    """

    shapes: Mapping[str, tuple[int, ...]]
    first: Mapping[str, str]
    unknown: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors; tied tensors once."""
        return tuple(dict.fromkeys(self.first.values()))


@dataclass(frozen=True)
class SavedModel:
    """A model on disk, of which only the configuration has been read.

    Attributes:
        path: a folder written by ``save_pretrained``.
        name: the path or hub name that the user gave.
        config: the configuration of transformers.
    """

    path: Path
    name: str
    config: Any

    @property
    def config_file(self) -> Path:
        """The file of the configuration."""
        return self.path / CONFIG

    @property
    def tokenizer(self) -> Path | None:
        """The folder with the tokenizer, or None."""
        return self.path if any((self.path / name).is_file() for name in TOKENIZER) else None

    @cached_property
    def vocabulary(self) -> frozenset[tuple[str, int]] | None:
        """The tokenizer's tokens with their ids, or None without a tokenizer."""
        if self.tokenizer is None:
            return None
        from transformers import AutoTokenizer

        for file in (self.tokenizer / name for name in TOKENIZER):
            if file.is_file():
                refuse_unwritten(file)
        with loading(self.tokenizer):
            tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True)
        return frozenset(tokenizer.get_vocab().items())

    @cached_property
    def model_class(self) -> Any:
        """The class of transformers in ``architectures``; if that is empty, that of ``AutoModel``."""
        import transformers

        named = self.config.architectures or []
        if not named:
            return self.class_for("AutoModel")
        found = getattr(transformers, named[0], None)
        if found is None:
            raise FedrotError(
                f"'{self.name}' is a {named[0]}, which transformers does not have. For your own class "
                "use fedrot.check_function and fedrot.align in Python."
            )
        return found

    def class_for(self, auto_model: str) -> Any:
        """Return the class that an ``AutoModel...`` class chooses for the configuration."""
        import transformers

        try:
            with torch.device("meta"):
                # Some classes change their configuration.
                config = copy.deepcopy(self.config)
                return type(getattr(transformers, auto_model).from_config(config))
        except ValueError as error:
            raise FedrotError(
                f"'{self.name}' is of type '{self.config.model_type}', for which transformers has no "
                f"{auto_model}. Choose another task."
            ) from error

    @cached_property
    def outline(self) -> Outline:
        """The names and shapes of the tensors; raises ``FedrotError`` as ``read`` does."""
        model, unknown = self._whole()
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return Outline(shapes, first_names(model), tuple(unknown))

    def read(self) -> Tensors:
        """Return the tensors by the names of the state dict; tied names have the same tensor.

        Files are memory-mapped: pages are read on demand, and stay mapped as long as a tensor is kept.

        Raises:
            FedrotError: the files cannot be loaded, or a tensor of the model's class is missing or of
                another shape.
        """
        return dict(self._whole()[0].state_dict())

    def _whole(self) -> tuple[nn.Module, list[str]]:
        named = self.config.architectures or []
        if len(named) != 1:
            raise FedrotError(
                f"'{self.config_file}' has {named or 'nothing'} in 'architectures'; it should have one "
                f'model class of transformers, such as ["BertForMaskedLM"]. {SAVE_AGAIN}'
            )
        model, missing, unknown = self.load(self.model_class)
        refuse_missing(self.path, model, missing, unknown)
        first, tied = first_names(model), first_names(self.shell())
        for name, one in first.items():
            if one != tied[name]:  # transformers ties no tensors that differ
                raise FedrotError(
                    f"'{self.path}' has different values in '{tied[name]}' and '{name}', which its "
                    "configuration ties. Set 'tie_word_embeddings' in its configuration to the value in "
                    "training."
                )
        return model, unknown

    def build(self) -> nn.Module:
        """Return a float32 model of the class with random weights, in evaluation mode."""
        return self.model_class(self.config).float().eval()

    def shell(self) -> Any:
        """Return a model of the class on the meta device: its tensors have no values."""
        with torch.device("meta"):
            return self.model_class(copy.deepcopy(self.config))

    def load(self, model_class: Any) -> tuple[nn.Module, list[str], list[str]]:
        """Load the model as a class of transformers; see ``read_model`` for names and errors.

        Files are safetensors, or pickles that contain only tensors. No code of the model is run. Returns
        the model in evaluation mode, in the saved dtypes; the names that the files lack, whose tensors
        are random; and the stored names that the class does not have.
        """
        stored = read_model(self.path)
        with loading(self.name), no_bars():
            model, found = model_class.from_pretrained(
                None,
                config=self.config,
                state_dict=dict(stored),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        for name, here, wanted in sorted(found["mismatched_keys"]):
            raise FedrotError(
                f"'{self.path}': the tensor '{name}' has shape {list(here)}, but needs shape "
                f"{list(wanted)} for '{self.config_file}'. Check that they belong together."
            )
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in stored and stored[name].dtype != tensor.dtype:
                tensor.data = stored[name]  # transformers casts to the dtype of the configuration
        return model, sorted(found["missing_keys"]), sorted(found["unexpected_keys"])


def open_saved_model(name: str | Path) -> SavedModel:
    """Find a saved model and read its configuration; models of the hub are downloaded into its cache.

    Args:
        name: a folder with ``config.json`` and weights, a hub name, or the name of a packaged model.

    Raises:
        FedrotError: the model is missing, damaged, quantised, or of a family that is not supported.
    """
    if Path(name).exists():
        return _with_config(Path(name), str(name))
    name = str(name)
    if name in PACKAGED:
        return _with_config(Path(source_of(name)), name)
    if not _HUB_NAME.fullmatch(name):
        raise FedrotError(f"'{name}' does not exist. Give the folder of a saved model, or a hub name.")
    folder = _downloaded(name, CONFIG)
    # The configuration is read first: an unsupported model is refused before its weights are downloaded.
    model = _with_config(folder, name)
    _downloaded(name, "model*.safetensors", INDEX, *BESIDE)
    if not any((folder / file).is_file() for file in (WEIGHTS, INDEX)):
        _downloaded(name, "pytorch_model*.bin", *PICKLED)
    return model


def _with_config(path: Path, name: str) -> SavedModel:
    if path.is_file():
        advice = f" Put {CONFIG} beside it, and name it {WEIGHTS}." if path.suffix == SUFFIX else ""
        raise FedrotError(f"'{path}' is a file. Give the folder of a saved model.{advice}")
    file = path / CONFIG
    if not file.is_file():
        raise FedrotError(f"'{file}' does not exist. A model needs its configuration. {instead(path)}")
    return SavedModel(path, name, _read_config(file))


def _downloaded(name: str, *files: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        raise FedrotError(
            f"'{name}' is no folder, and the hub has no model of that name or cannot be reached "
            f"({_first_line(error)}). Give the folder of a saved model."
        ) from error


def _read_config(file: Path) -> Any:
    from transformers import AutoConfig

    settings = read_json(file)
    with about(file):
        check_family(settings)
    refuse_quantised(settings, file)
    with loading(file):
        return AutoConfig.from_pretrained(file, local_files_only=True)


def longest_text(config: Any, otherwise: int) -> int:
    """Return the number of a model's positions; ``otherwise`` if it is not limited."""
    found = getattr(config, "max_position_embeddings", None)
    return otherwise if found is None else int(found)


def check_bundled(model: SavedModel) -> None:
    """Raise ``FedrotError`` for a model without a tokenizer and with another vocabulary size."""
    from fedrot.simulations.data.encoding import bundled_tokenizer

    size = bundled_tokenizer().get_vocab_size()
    if model.tokenizer is None and model.config.vocab_size != size:
        raise FedrotError(
            f"'{model.path}' has no tokenizer. The bundled one has {size} tokens, the model has "
            f"{model.config.vocab_size}. Save the model's tokenizer into that folder."
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
