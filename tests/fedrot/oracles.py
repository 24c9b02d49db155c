"""What the slow oracles of several topics share."""

import numpy as np
import torch

from fedrot.symmetry.actions import HeadRotation, Permutation
from fedrot.symmetry.groups import Move
from fedrot.symmetry.signs import SignedPermutation
from tests.models import DIM

Array = np.ndarray


def seeded(seed):
    """Return a generator of that seed."""
    return torch.Generator().manual_seed(seed)


def normal(generator, *shape):
    """Return standard normal numbers, float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def drawing(seed):
    """Return a function that draws standard normal numbers of a shape, float64."""
    generator = seeded(seed)
    return lambda *shape: normal(generator, *shape)


def eye(size):
    """Return a unit matrix, float64."""
    return torch.eye(size, dtype=torch.float64)


def gap(found, expected):
    """Return the largest absolute difference."""
    return (found - expected).abs().max()


def cross(state, other, names, layer, head, pair):
    """Return one head's cross matrix from the definition, anchor rows times client
    rows.
    """
    rows = slice(head * DIM, (head + 1) * DIM)
    total = torch.zeros(DIM, DIM, dtype=torch.float64)
    for module in ("query", "key") if pair == "qk" else ("value",):
        name = names.of(layer, module)
        a, c = (
            torch.cat([s[f"{name}.weight"], s[f"{name}.bias"][:, None]], 1)
            for s in (state, other)
        )
        total += a[rows].double() @ c[rows].double().T
    if pair == "vo":
        name = f"{names.of(layer, 'output')}.weight"
        total += state[name][:, rows].double().T @ other[name][:, rows].double()
    return total


def dense(action, element, size):
    """Return the matrix ``[size, size]`` of an element on the covariant side, entry by
    entry.
    """
    matrix = torch.zeros(size, size, dtype=torch.float64)
    width = size // action.units
    for unit in range(action.units):
        for i in range(width):
            row = unit * width + i
            if isinstance(action, HeadRotation):
                for j in range(width):
                    matrix[row, unit * width + j] = element[unit, i, j]
            elif isinstance(action, SignedPermutation):
                value = int(element[unit])
                matrix[row, (abs(value) - 1) * width + i] = 1 if value > 0 else -1
            else:
                assert isinstance(action, Permutation)
                matrix[row, int(element[unit]) * width + i] = 1
    return matrix


def along(matrix, tensor, axis):
    """Return a matrix applied to one axis of a tensor."""
    return torch.tensordot(matrix, tensor, dims=([1], [axis])).movedim(0, axis)


def random_moves(symmetry, seed, parts):
    """Return a random element of every group of the parts."""
    rng = seeded(seed)
    return tuple(
        Move(group, group.action.random(rng)) for group in symmetry.select(parts)
    )
