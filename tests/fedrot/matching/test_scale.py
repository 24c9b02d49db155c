"""Scales of heads against dense grids."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrot
from fedrot.matching.inside_heads import best_scale
from tests.fedrot.oracles import Array
from tests.models import (
    CASES,
    DIM,
    HEADS,
    state_of,
    symmetry_for,
)


def _scale_cost(s: Array, u: Array, ua: Array, v: Array, va: Array) -> Array:
    """``|s u - u_a|^2 + |v / s - v_a|^2`` from the definition, for many ``s`` at once."""
    first = ((s[:, None] * u - ua) ** 2).sum(1)
    return np.asarray(first + ((v / s[:, None] - va) ** 2).sum(1))


_GRID = np.geomspace(1e-3, 1e3, 6001)
_GRID = np.concatenate([-_GRID[::-1], _GRID])


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.integers(1, 6),
    sizes=st.tuples(*[st.sampled_from([0.0, 1e-3, 0.1, 1.0, 30.0])] * 4),
    related=st.booleans(),
)
def test_scale_is_not_beaten_by_a_dense_grid(
    seed: int, width: int, sizes: tuple[float, ...], related: bool
) -> None:
    rng = np.random.default_rng(seed)
    u, ua, v, va = (size * rng.normal(size=width) for size in sizes)
    if related:
        ua, va = rng.choice([-3.0, 0.2, 2.0]) * u + 0.1 * ua, rng.choice([-2.0, 0.5]) * v + 0.1 * va
    products = [torch.tensor([float(x)], dtype=torch.float64) for x in (u @ u, u @ ua, v @ v, v @ va)]
    factor, gain = best_scale(*products)
    s = factor.numpy()
    assert np.isfinite(s).all()
    assert s[0] != 0
    if u @ u == 0 or v @ v == 0:
        assert (s[0], float(gain)) == (1, 0)
        return
    cost = partial(_scale_cost, u=u, ua=ua, v=v, va=va)
    start, reached = float(cost(np.ones(1))[0]), float(cost(s)[0])
    size = float(u @ u + ua @ ua + v @ v + va @ va)
    assert reached <= cost(_GRID).min() + 1e-9 * size
    assert float(gain) == pytest.approx(start - reached, rel=1e-6, abs=1e-9 * size)
    assert float(gain) >= 0


@pytest.mark.parametrize(
    ("products", "expected"),
    [
        ((1.0, 2.0, 1.0, 0.5), None),  # |u|^2, <u, u_a>, |v|^2, <v, v_a>
        ((1.0, 4.0, 16.0, 16.0), 2.0),  # a triple root
        ((1.0, 1.0, 1.0, 1.0), 1.0),
        ((1.0, -1.0, 1.0, -1.0), -1.0),
        ((4.0, 2.0, 1.0, 2.0), 0.5),
        ((1.0, 0.0, 1.0, 0.0), None),  # the anchor's head is zero: both signs are optimal
    ],
)
def test_scale_of_special_quartics(
    products: tuple[float, float, float, float], expected: float | None
) -> None:
    uu, ua, vv, va = products
    factor, gain = best_scale(*(torch.tensor([x], dtype=torch.float64) for x in products))

    def cost(s: Array) -> Array:
        return np.asarray(uu * s**2 - 2 * ua * s + vv / s**2 - 2 * va / s)

    s = factor.numpy()
    assert cost(s)[0] <= cost(_GRID).min() + 1e-12
    assert float(gain) == pytest.approx(float(cost(np.ones(1))[0] - cost(s)[0]), abs=1e-12)
    if expected is not None:
        assert s[0] == pytest.approx(expected, abs=1e-4)


def test_rescaling_finds_the_scale_of_every_head() -> None:
    name = "bert-classifier"
    names = CASES[name].names
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    update = state_of(name, 9)
    options = fedrot.AlignmentOptions(parts=("rescale",), chance=0)
    aligned = fedrot.align(update, anchor, symmetry, options).apply(update)
    for layer, head in itertools.product(range(2), range(HEADS)):
        rows = slice(head * DIM, (head + 1) * DIM)
        for first, second in (("query", "key"), ("value", "output")):
            sides = []
            for module in (first, second):
                parts = []
                for state in (update, anchor, aligned):
                    weight = state[f"{names.of(layer, module)}.weight"]
                    if module == "output":
                        parts.append(weight[:, rows].flatten().numpy())
                    else:
                        bias = state[f"{names.of(layer, module)}.bias"][rows]
                        parts.append(torch.cat([weight[rows].flatten(), bias]).numpy())
                sides.append(parts)
            (u, ua, moved_u), (v, va, moved_v) = sides
            reached = ((moved_u - ua) ** 2).sum() + ((moved_v - va) ** 2).sum()
            assert reached <= _scale_cost(_GRID, u, ua, v, va).min() + 1e-9
