"""``check_model``: a saved model moved by random elements of its symmetry group."""

from __future__ import annotations

import math
from typing import Any

from fedrot.check import TOLERANCE, output_change, suspects
from fedrot.errors import FedrotError
from fedrot.simulations.saved.load import about, load
from fedrot.simulations.saved.merge import options_of
from fedrot.symmetry import PARTS, symmetry_of


def check_model(name: str, parts: str | None = None) -> dict[str, Any]:
    """Move a saved model by random elements of every group, and compare its outputs.

    A residual stream that can be rotated is permuted first and then rotated. Returns plain data:
    ``model``, ``family``, ``parts``, the largest relative ``change`` of an output (None if it is not
    finite), ``holds`` and a ``sentence``.

    Args:
        name: see ``load``.
        parts: see ``options_of``; None: all parts that can be moved.

    Raises:
        FedrotError: the model cannot be loaded, a part cannot be moved, or the model does not run on
            random inputs.
    """
    options = None if parts is None else options_of(parts)
    saved = load(name)
    with about(name):
        symmetry = symmetry_of(saved.config, saved.tensors)
        movable = {group.part for group in symmetry.groups}
        chosen = tuple(options.parts if options else (part for part in PARTS if part in movable))
        if not symmetry.select(chosen):
            raise FedrotError(f"It has no groups of the parts {', '.join(chosen) or '(none)'}.")
        rotates = "residual" in chosen and symmetry.can_rotate
        for one in (symmetry, symmetry.rotated) if rotates else (symmetry,):
            change = output_change(saved.model, saved.config, one, chosen)
            largest = change(lambda group: True)
            sentence = (
                f"The function is preserved: outputs change by at most {largest:.1e} of their size."
            )
            holds = largest <= TOLERANCE
            if not holds:
                sentence = f"The outputs change by {largest:.2g} of their size. "
                sentence += suspects(one, change, chosen)
                break
    return {
        "model": name,
        "family": symmetry.family,
        "parts": chosen,
        "change": largest if math.isfinite(largest) else None,
        "holds": holds,
        "sentence": sentence,
    }
