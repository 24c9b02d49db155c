"""Rotary phases and signs against random elements, and scales of heads against dense grids."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedrot
from fedrot.matching.rotary import RotarySolver, best_scale
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from tests.fedrot.oracles import Array, seeded
from tests.models import CASES, DIM, HEADS, state_of, symmetry_for

KEY_HEADS, FREQUENCIES = 3, 4
#: One head of large evidence, one of ordinary and one of small.
SIZES = torch.tensor([100.0, 1.0, 0.01], dtype=torch.float64)[:, None]


@pytest.mark.parametrize("kind", [RotaryPhases, RotarySigns])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_best_turn_of_every_frequency_is_not_beaten(
    kind: type[RotaryPhases | RotarySigns], interleaved: bool
) -> None:
    """Evidence from blocks and from cross matrices agrees with what elements make of the blocks."""
    dim, options, rng = 2 * FREQUENCIES, fedrot.AlignmentOptions(), seeded(4)
    group, solver = kind(KEY_HEADS, dim, interleaved), RotarySolver()
    shape = (KEY_HEADS, dim, 5)
    a, c = torch.randn(2, KEY_HEADS * dim, 5, generator=rng, dtype=torch.float64)
    cross = a.reshape(shape) @ c.reshape(shape).mT
    evidence = solver.of_cross(group, cross)
    assert (solver.similarity(group, [(a, c)]) - evidence).abs().max() <= 1e-12

    def reached(element: Tensor) -> Tensor:
        return (a * group.act(element, c, 0)).reshape(KEY_HEADS, -1).sum(1)

    best = solver.best(group, evidence, options)
    for element in (best, *(group.random(rng) for _ in range(20))):
        assert torch.allclose(solver.value(group, element, evidence), reached(element))
        assert bool((reached(element) <= reached(best) + 1e-9).all())
    if kind is RotaryPhases:
        small = [best + 1e-3 * group.random(rng) for _ in range(20)]
        assert all(bool((reached(element) < reached(best)).all()) for element in small)
    still = group.compose(group.inverse(best), best)
    assert torch.allclose(solver.still(group, evidence), reached(still))
    other = solver.best(group, SIZES * evidence, options)
    assert torch.allclose(best.double(), other.double(), rtol=0, atol=1e-12)
    kept = solver.best(group, evidence, fedrot.AlignmentOptions(within_heads="permutation"))
    assert not group.moved(kept).any()


def _scale_cost(s: Array, u: Array, ua: Array, v: Array, va: Array) -> Array:
    """``|s u - u_a|^2 + |v / s - v_a|^2`` from the definition, for many ``s`` at once."""
    first = ((s[:, None] * u - ua) ** 2).sum(1)
    return np.asarray(first + ((v / s[:, None] - va) ** 2).sum(1))


_GRID = np.geomspace(1e-3, 1e3, 6001)
_GRID = np.concatenate([-_GRID[::-1], _GRID])


@settings(max_examples=80, deadline=None)
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
        ((1.0, 2.0, 1.0, 0.5), 2.0),  # |u|^2, <u, u_a>, |v|^2, <v, v_a>
        ((1.0, 4.0, 16.0, 16.0), 2.0),  # a triple root
        ((1.0, 1.0, 1.0, 1.0), 1.0),
        ((1.0, -1.0, 1.0, -1.0), -1.0),
        ((4.0, 2.0, 1.0, 2.0), 0.5),
        ((1.0, 0.0, 1.0, 0.0), 1.0),  # the anchor's head is zero: both signs are optimal
    ],
)
def test_scale_of_special_quartics(products: tuple[float, ...], expected: float) -> None:
    factor, _ = best_scale(*(torch.tensor([x], dtype=torch.float64) for x in products))
    assert float(factor) == pytest.approx(expected, abs=1e-4)


def test_rescaling_finds_the_scale_of_every_head() -> None:
    name = "bert-classifier"
    names, anchor, update = CASES[name].names, state_of(name), state_of(name, 9)
    options = fedrot.AlignmentOptions(parts=("rescale",), chance=0)
    alignment = fedrot.align(update, anchor, symmetry_for(name), options)
    aligned = alignment.apply(update)
    for layer, head in itertools.product(range(2), range(HEADS)):
        rows = slice(head * DIM, (head + 1) * DIM)
        for pair in (("query", "key"), ("value", "output")):
            sides = []
            for module, state in itertools.product(pair, (update, anchor, aligned)):
                weight = state[f"{names.of(layer, module)}.weight"]
                parts = [weight[:, rows].flatten()]
                if module != "output":
                    bias = state[f"{names.of(layer, module)}.bias"][rows]
                    parts = [weight[rows].flatten(), bias]
                sides.append(torch.cat(parts).numpy())
            u, ua, moved_u, v, va, moved_v = sides
            reached = ((moved_u - ua) ** 2).sum() + ((moved_v - va) ** 2).sum()
            assert reached <= _scale_cost(_GRID, u, ua, v, va).min() + 1e-9
