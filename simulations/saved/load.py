"""``load`` and ``writing``: saved models, read and written by transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedrot._io import as_os_error, replacing
from fedrot.errors import FedrotError
from fedrot.simulations.data.tokenizers import fast_tokenizer
from fedrot.simulations.model_labels import labels_of
from fedrot.simulations.pretrained import (
    loading,
    pretrained_settings,
    source_of,
    tokenizer_of,
)
from fedrot.simulations.scenario import Scenario
from fedrot.symmetry import check_family
from fedrot.symmetry.resolve import tied_tensors
from fedrot.tensors import Tensors, check_finite


@dataclass(frozen=True)
class SavedModel:
    """A transformers model in evaluation mode, and the user's name for it."""

    name: str
    model: Any

    @property
    def tensors(self) -> Tensors:
        """The tensors by name; those of tied names are the same."""
        return dict(self.model.state_dict())

    @property
    def labels(self) -> list[str]:
        """The names of the task head's outputs, in their order."""
        return labels_of(self.model.config)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None without its files."""
        from fedrot.strategies.stored_model import optional_file

        source = source_of(self.name)
        with loading(self.name):
            for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
                if optional_file(source, file):
                    return tokenizer_of(self.name)
        return None

    def build(self) -> Any:
        """Return a float32 model of the class with random weights, in evaluation
        mode.
        """
        return type(self.model)(copy.deepcopy(self.model.config)).float().eval()


def load(name: str, whole: bool = False) -> SavedModel:
    """Load a model in its own dtype, as the class that its configuration names.

    Without a name of a class it is an ``AutoModel``.

    Args:
        name: a folder that ``save_pretrained`` wrote, a name on the hub, or a packaged
            model.
        whole: whether tensors are refused that the class does not have.

    Raises:
        FedrotError: the model is missing, damaged or quantised, is of a family that is
            not supported, or the files lack tensors of its class, or have them in other
            shapes.
    """
    import transformers

    from fedrot.strategies.pooled_classifier import PooledClassifier

    config = pretrained_settings(name)
    with loading(name), about(name):
        class_name = (config.architectures or ["AutoModel"])[0]
        model_class: Any = getattr(transformers, class_name, None)
        if class_name == PooledClassifier.__name__:
            model_class = PooledClassifier
        check_family(config.to_dict())
    what = ""
    if model_class is None:
        what = f"a {class_name}, which transformers does not have"
    if getattr(config, "quantization_config", None):
        what = "quantised"
    if what:
        raise FedrotError(
            f"'{name}' is {what}: its weights cannot be moved. dequantize() it with "
            "transformers and save it; for a class of your own use "
            "fedrot.check_function and fedrot.align in Python."
        )
    with loading(name):
        model, info = model_class.from_pretrained(
            source_of(name),
            config=config,
            dtype="auto",
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    unexpected = info["unexpected_keys"]
    wrong = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    if whole:
        wrong.update(unexpected)
    if wrong:
        raise FedrotError(
            f"'{name}' is no whole {class_name}: {len(wrong)} tensors are missing, "
            "left over or of another shape, see "
            f"{min(unexpected or wrong)}. Load the model with "
            "transformers, without wrappers, and save it with save_pretrained."
        )
    return SavedModel(name, model)


def tensors_of_base(base: SavedModel, tuned: SavedModel) -> Tensors:
    """Return the tensors of the model from which one was fine-tuned, by its names.

    The base may be of another class, such as an encoder. Tensors of task head and
    pooler that it lacks, or has in other shapes, are left out.

    Raises:
        FedrotError: the base lacks another tensor of ``tuned``, or has it in another
            shape.
    """
    whole = tuned.model.base_model is tuned.model
    prefix = "" if whole else f"{tuned.model.base_model_prefix}."
    body = base.model.base_model.state_dict()
    stored = base.model.state_dict() | {f"{prefix}{key}": body[key] for key in body}
    # An encoder has one of two tied tables.
    sources = {twin: tied[0] for tied in tied_tensors(tuned.tensors) for twin in tied}
    tensors = {}
    for key, like in tuned.tensors.items():
        source = sources.get(key, key)
        if source in stored and stored[source].shape == like.shape:
            tensors[key] = stored[source]
        elif key.startswith(prefix) and "pooler." not in key:
            raise FedrotError(
                f"--base '{base.name}' does not fit '{tuned.name}': it has no tensor "
                f"'{key}' of shape {[*like.shape]}. Give the model from which all were "
                "fine-tuned, or leave --base out."
            )
    with about(base.name):
        check_finite(tensors)
    return tensors


def save_model(model: Any, scenario: Scenario, out: Path) -> None:
    """Write a model of a simulation and its tokenizer to a new or empty folder.

    An adapter is merged into its base, which changes ``model``.
    """
    if hasattr(model, "peft_config"):
        model = model.merge_and_unload()
    settings = model.config.get_text_config()
    with writing(out) as folder:
        model.save_pretrained(folder)
        if hasattr(settings, "vocab_size"):
            tokenizer = fast_tokenizer(scenario)
            tokenizer.model_max_length = scenario.max_length
            if getattr(settings, "type_vocab_size", 0) < 2:
                tokenizer.model_input_names = ["input_ids", "attention_mask"]
            tokenizer.save_pretrained(folder)


@contextmanager
def writing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``out`` if the block succeeds.

    ``out`` is a new or empty folder.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as folder, as_os_error(folder):
        folder.mkdir()
        yield folder


@contextmanager
def about(name: object) -> Iterator[None]:
    """Add the name of a model to the front of every ``FedrotError``."""
    try:
        yield
    except FedrotError as error:
        raise type(error)(f"'{name}': {error}") from error
