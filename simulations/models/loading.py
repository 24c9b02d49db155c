"""A saved model found on disk or on the hub, and loaded as its owner loads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.simulations.models.model_files import (
    BESIDE,
    CONFIG,
    INDEX,
    PICKLED,
    SUFFIX,
    WEIGHTS,
    instead,
    opened,
    stored_tensors,
)
from fedrot.simulations.models.saved_model import read_config

#: ``name`` or ``owner/name``, as the hub has them.
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def find_model(name: str, pickles: bool = False) -> Path:
    """Return where a saved model is; one of the hub is downloaded into the hub's cache.

    Its configuration comes first, so that nothing else of a model that cannot be moved is downloaded.

    Args:
        name: a folder or file, or a name on the hub.
        pickles: whether a model of the hub may be without safetensors files.

    Raises:
        FedrotError: it is neither, the hub cannot be reached, the model's family is not supported, or
            its weights are quantised.
    """
    if Path(name).exists():
        return Path(name)
    if not _HUB_NAME.fullmatch(name):
        raise FedrotError(f"'{name}' does not exist. Give the folder of a saved model, or a hub name.")
    folder = _downloaded(name, CONFIG)
    _folder_config(folder)
    _downloaded(name, "model*.safetensors", INDEX, *BESIDE)
    if pickles and not any((folder / file).is_file() for file in (WEIGHTS, INDEX)):
        _downloaded(name, "pytorch_model*.bin", *PICKLED)
    return folder


def _downloaded(name: str, *files: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        raise FedrotError(
            f"'{name}' is no folder, and the hub has no model of that name or cannot be reached "
            f"({_first_line(error)}). Give the folder of a saved model."
        ) from error


def load_model(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Load a model as the class that its configuration names, or bare if it names none.

    Names of tensors may carry those of wrappers, see ``stored_tensors``. Files are read safely:
    safetensors, or pickles of nothing but tensors; no code that comes with a model is run.

    Args:
        name: a folder of a saved model, or a name on the hub.

    Returns the model in evaluation mode, its tensors as they were saved, and what was odd, in
    sentences.

    Raises:
        FedrotError: it cannot be found or loaded, its family is not supported, its weights are
            quantised or an adapter's, or most of them are missing.
    """
    if Path(name).is_file():
        advice = f" '{SUFFIX}' files lie beside their {CONFIG}." if name.endswith(SUFFIX) else ""
        raise FedrotError(f"'{name}' is a file. Give the folder of a saved model.{advice}")
    folder = find_model(name, pickles=True)
    config = _folder_config(folder)
    model_class = _class_of(config, name)
    stored = _unwrapped(folder)
    with _loading(name):
        model, found = model_class.from_pretrained(
            None if stored else folder, config=config, state_dict=stored, output_loading_info=True
        )
    missing = sorted(found["missing_keys"])
    if 2 * len(missing) > len(model.state_dict()):
        raise FedrotError(
            f"'{name}' lacks {len(missing)} tensors of a {model_class.__name__}, the first "
            f"'{missing[0]}': most of the model would be random. Save it, without wrappers, with "
            "save_pretrained."
        )
    unknown = sorted(found["unexpected_keys"])
    return model.eval(), tuple(_remarks(missing, unknown, model_class.__name__))


def _remarks(missing: Sequence[str], unknown: Sequence[str], model_class: str) -> Iterator[str]:
    if missing:
        yield f"Not stored, so random: {', '.join(missing)}"
    if unknown:
        yield f"Stored beside a {model_class}, and left out: {', '.join(unknown)}"


def _folder_config(folder: Path) -> Any:
    if not (folder / CONFIG).is_file():
        raise FedrotError(f"'{folder}' has no {CONFIG}. {instead(folder)}")
    return read_config(folder / CONFIG)


def _class_of(config: Any, name: str) -> Any:
    import transformers

    named = config.architectures or []
    if not named:
        with torch.device("meta"):
            return type(transformers.AutoModel.from_config(config))
    found = getattr(transformers, named[0], None)
    if found is None:
        raise FedrotError(
            f"'{name}' is a {named[0]}, which transformers does not have. Check a class of your own in "
            "Python, with fedrot.check_function."
        )
    return found


def _unwrapped(folder: Path) -> dict[str, Tensor] | None:
    """Return all tensors by their own names, or None if transformers finds them under these."""
    there = [file for file in (WEIGHTS, INDEX, *PICKLED) if (folder / file).is_file()]
    if there and there[0] in PICKLED:
        return None
    stored = stored_tensors(folder)
    if all(name == as_stored for name, (_, as_stored) in stored.items()):
        return None
    with ExitStack() as stack:
        files = dict.fromkeys(file for file, _ in stored.values())
        handles = {file: stack.enter_context(opened(file)) for file in files}
        return {name: handles[file].get_tensor(as_stored) for name, (file, as_stored) in stored.items()}


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Load without progress bars, and say what could not be loaded."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except (OSError, RuntimeError, ValueError, ImportError, UnpicklingError) as error:
        raise FedrotError(f"'{name}' cannot be loaded: {_first_line(error)}") from error
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
