"""Does a model really have the symmetry that its family describes? Asked of the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedrot.alignment import random_equivalent
from fedrot.errors import SymmetryError
from fedrot.matching.activations import random_text
from fedrot.symmetry.description import WHOLE_MODEL, Symmetry

#: Accepted change of an output, relative to the largest, in float64.
TOLERANCE = 1e-6

#: Size of the random numbers that are added to the parameters: zero biases and unit gains hide mistakes.
_NOISE = 0.05


def check_function(
    model: nn.Module,
    config: Mapping[str, Any],
    symmetry: Symmetry,
    parts: Sequence[str] = WHOLE_MODEL,
    seed: int = 0,
) -> float:
    """Move a model by a random element and compare its outputs on random tokens.

    Names cannot tell what a model does with its tensors: a head that reads the hidden states
    differently than the family's is found only by running it.

    Args:
        model: run in evaluation mode and float64; its parameters are overwritten.
        config: see ``random_text``.
        symmetry: of this model.
        parts: what is moved.
        seed: of noise, element and tokens.

    Returns the largest change of an output relative to the largest output.

    Raises:
        SymmetryError: the change exceeds ``TOLERANCE``; the message says which part does it.
    """
    model.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(_NOISE * torch.randn(parameter.shape, generator=generator).to(parameter))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = next(random_text(config, rows=4, seed=seed))
    before = _outputs(model, batch)

    def change(moved_parts: tuple[str, ...]) -> float:
        model.load_state_dict(random_equivalent(state, symmetry, seed, moved_parts))
        after = _outputs(model, batch)
        return max(
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
            for a, b in zip(after, before, strict=True)
        )

    largest = change(tuple(parts))
    if not largest <= TOLERANCE:
        guilty = [part for part in parts if not change((part,)) <= TOLERANCE]
        raise SymmetryError(
            f"Moving {' and '.join(guilty) or 'all parts together'} changes this model's outputs by "
            f"{largest:.2g} of their size: it does something with these tensors that family "
            f"'{symmetry.family}' does not know. Align other parts only."
        )
    return largest


def _outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        out = model(**batch)
    values = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else (out,)
    return [value for value in values if isinstance(value, Tensor)]
