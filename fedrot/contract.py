"""Does a model really have the symmetry that its family describes? Asked of the model itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedrot.errors import SymmetryError
from fedrot.matching.activations import random_text
from fedrot.moves import Move, apply_moves
from fedrot.symmetry.description import WHOLE_MODEL, Group, Symmetry
from fedrot.symmetry.resolve import settings_of

#: Accepted change of an output, relative to the largest, in float64.
TOLERANCE = 1e-6

#: Size of the random numbers that are added to the parameters: zero biases and unit gains hide mistakes.
_NOISE = 0.05

#: How often an element is drawn again that happens to move nothing.
_DRAWS = 64


def check_function(
    model: nn.Module,
    config: Mapping[str, Any] | object,
    symmetry: Symmetry,
    parts: Sequence[str] = WHOLE_MODEL,
    seed: int = 0,
    batch: Mapping[str, Tensor] | None = None,
) -> float:
    """Move a model by a random element and compare its outputs.

    Names cannot tell what a model does with its tensors: a head that reads the hidden states
    differently than the family's is found only by running it.

    Args:
        model: a copy of it is run in evaluation mode and float64, with noise on its parameters.
        config: its transformers configuration, object or dictionary.
        symmetry: of this model.
        parts: what is moved.
        seed: of noise, element and tokens.
        batch: keyword arguments of the model's forward; random tokens if None.

    Returns the largest change of an output relative to the largest output.

    Raises:
        SymmetryError: the change exceeds ``TOLERANCE``, and the message says which part does it; or
            the model does not run on random tokens.
    """
    model = copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(_NOISE * torch.randn(parameter.shape, generator=generator).to(parameter))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = next(random_text(settings_of(config), rows=4, seed=seed)) if batch is None else batch
    before = _outputs(model, batch)
    moves = [Move(group, _drawn(group, generator)) for group in symmetry.select(tuple(parts))]

    def change(moved: Iterable[Move]) -> float:
        model.load_state_dict(apply_moves(state, moved))
        changes = [
            (a - b).abs().max() / b.abs().max().clamp_min(1e-30)
            for a, b in zip(_outputs(model, batch), before, strict=True)
        ]
        return float(torch.stack(changes).max())

    largest = change(moves)
    if not largest <= TOLERANCE:
        guilty = [
            part for part in parts if not change(m for m in moves if m.group.part == part) <= TOLERANCE
        ]
        raise SymmetryError(
            f"Moving {' and '.join(guilty) or 'all parts together'} changes this model's outputs by "
            f"{largest:.2g} of their size: it does something with these tensors that family "
            f"'{symmetry.family}' does not know. Align other parts only."
        )
    return largest


def _drawn(group: Group, generator: torch.Generator) -> Tensor:
    """Return a random element that moves something, if the group has any."""
    element = group.kind.random(generator)
    for _ in range(_DRAWS):
        if group.kind.moved(element):
            break
        element = group.kind.random(generator)
    return element


def _outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    try:
        with torch.no_grad():
            out = model(**batch)
    except Exception as error:
        raise SymmetryError(
            f"The model does not run on its inputs ({error}), so that its symmetry cannot be checked. "
            "If it takes other inputs than rows of tokens, call check_function with a batch of yours."
        ) from error
    values = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else (out,)
    return [value for value in values if isinstance(value, Tensor)]
