"""``load`` and ``writing``: saved models, read and written by transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedrot._io import as_os_error, replacing
from fedrot.errors import FedrotError
from fedrot.simulations.packaged import loading, loading_of, no_bars
from fedrot.symmetry import check_family
from fedrot.tensors import Tensors

#: Files of a tokenizer; one of them is enough.
_TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")


@dataclass(frozen=True)
class SavedModel:
    """A transformers model in evaluation mode, and the name by which the user gave it."""

    name: str
    model: Any

    @property
    def config(self) -> Any:
        """The configuration of transformers."""
        return self.model.config

    @property
    def tensors(self) -> Tensors:
        """The tensors by name; those of tied names are the same."""
        return dict(self.model.state_dict())

    @property
    def labels(self) -> list[str]:
        """The names of the task head's outputs, in their order."""
        return [str(name) for _, name in sorted((self.config.to_dict().get("id2label") or {}).items())]

    @cached_property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, or None without its files."""
        from transformers import AutoTokenizer
        from transformers.utils.hub import cached_file

        source = loading_of(self.name)
        place = source["pretrained_model_name_or_path"]
        with loading(self.name):
            optional = {"_raise_exceptions_for_missing_entries": False}
            found = any(cached_file(place, name, **optional) for name in _TOKENIZER)
            return AutoTokenizer.from_pretrained(**source) if found else None

    def build(self) -> Any:
        """Return a float32 model of the class with random weights, in evaluation mode."""
        return type(self.model)(copy.deepcopy(self.config)).float().eval()


def load(name: str, whole: bool = False) -> SavedModel:
    """Load a model in its own dtype as the class that its configuration names, else ``AutoModel``.

    Args:
        name: a folder that ``save_pretrained`` wrote, a name on the hub, or a packaged model.
        whole: whether tensors are refused that the class does not have.

    Raises:
        FedrotError: the model is missing, damaged or quantised, is of a family that is not supported, or
            the files lack tensors of its class, or have them in other shapes.
    """
    import transformers

    source = loading_of(name)
    with loading(name):
        stored, _ = transformers.PretrainedConfig.get_config_dict(**source)
        config = transformers.AutoConfig.from_pretrained(**source, **_labels(stored))
        class_name = (config.architectures or ["AutoModel"])[0]
        model_class = getattr(transformers, class_name, None)
    with about(name):
        check_family(config.to_dict())
    if getattr(config, "quantization_config", None):
        raise FedrotError(
            f"'{name}' is quantised: its weights cannot be moved. Give the model before quantisation, "
            "or dequantize() it with transformers and save it."
        )
    if model_class is None:
        raise FedrotError(
            f"'{name}' is a {class_name}, which transformers does not have. For your own class use "
            "fedrot.check_function and fedrot.align in Python."
        )
    with loading(name):
        how = {"config": config, "dtype": "auto", "ignore_mismatched_sizes": True}
        model, found = model_class.from_pretrained(**source, **how, output_loading_info=True)
    more = sorted(found["unexpected_keys"])
    shapes = [f"{key} {[*here]}, not {[*there]}" for key, here, there in found["mismatched_keys"]]
    has = f"; it has {more[0]}" if more else ""
    for what, keys, which in (
        ("no tensor", sorted(found["missing_keys"]), f"{class_name} needs{has}"),
        ("a tensor", sorted(shapes), f"{class_name} needs{has}"),
        ("the tensor", more if whole else [], f"{type(model).__name__} does not have"),
    ):
        if keys:
            raise FedrotError(
                f"'{name}' has {what} {keys[0]} ({len(keys)} in all), which a {which}. Load the model "
                "with transformers, without wrappers, and save it with save_pretrained."
            )
    return SavedModel(name, model)


def _labels(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels of a stored configuration if ``label2id`` alone names them; else nothing."""
    names, given = stored.get("id2label") or {}, stored.get("label2id") or {}
    found = {int(number): name for name, number in given.items()}
    unnamed = all(str(name) == f"LABEL_{number}" for number, name in names.items())
    if not unnamed or len(names) not in (0, len(found)) or {*found} != {*range(len(given))}:
        return {}
    return {"id2label": found, "label2id": {name: n for n, name in found.items()}} if found else {}


@contextmanager
def writing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``out``, a new or empty folder, if the block succeeds."""
    refuse_filled(out)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as folder, no_bars(), as_os_error(folder):
        folder.mkdir()
        yield folder


def refuse_filled(out: Path | None) -> None:
    """Raise ``FileExistsError`` unless ``out`` is None, absent or an empty folder."""
    if out and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"'{out}' exists and is not an empty folder. Choose another --out.")


@contextmanager
def about(name: object) -> Iterator[None]:
    """Add the name of a model to the front of every ``FedrotError``."""
    try:
        yield
    except FedrotError as error:
        raise type(error)(f"'{name}': {error}") from error
