"""The order of the heads against brute force."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrot import WHOLE_MODEL, AlignmentOptions, align, random_equivalent
from fedrot.matching.heads import Inside, head_scores
from fedrot.matching.inside_heads import RotationSolver
from fedrot.matching.procrustes import best_orders
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.groups import Move, apply_moves
from tests import models
from tests.fedrot.oracles import Array, cross, eye, normal, seeded
from tests.models import (
    DIM,
    FEW,
    HEADS,
    Names,
    State,
    near,
    squared_distance,
    state_of,
    symmetry_for,
)


def _between(
    anchor: State, update: State, names: Names, layer: int, i: int, j: int, pair: str
) -> Array:
    """Return the cross matrix of anchor head ``i`` and client head ``j``."""
    order = torch.arange(HEADS * DIM).reshape(HEADS, DIM)
    order[[i, j]] = order[[j, i]]
    index = order.flatten()
    swapped = dict(update)
    for module in ("query", "key", "value"):
        for leaf in ("weight", "bias"):
            key = f"{names.of(layer, module)}.{leaf}"
            swapped[key] = update[key][index]
    key = f"{names.of(layer, 'output')}.weight"
    swapped[key] = update[key][:, index]
    return cross(anchor, swapped, names, layer, i, pair).numpy()


@pytest.mark.parametrize("regime", ["near", "scrambled", "unrelated"])
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (FEW[0], ("heads", "attention")),
        (FEW[0], ("heads",)),
        (FEW[1], ("heads", "attention")),
    ],
)
def test_head_order_equals_brute_force(name: str, regime: str, parts: Any) -> None:
    names = models.CASES[name].names
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    update = state_of(name, 8) if regime == "unrelated" else near(anchor, 0.4)
    if regime == "scrambled":
        update = random_equivalent(update, symmetry, 4, parts)
    options = AlignmentOptions(parts=parts, chance=0)
    alignment = align(update, anchor, symmetry, options)
    value = partial(np.linalg.norm, ord="nuc") if "attention" in parts else np.trace
    found = {
        m.group.layer: m.element for m in alignment.moves if m.group.part == "heads"
    }
    after = squared_distance(alignment.apply(update), anchor)
    expected = squared_distance(update, anchor)
    for layer in range(2):
        scores = np.zeros((HEADS, HEADS))
        for i, j in itertools.product(range(HEADS), repeat=2):
            for pair in ("qk", "vo"):
                scores[i, j] += value(
                    _between(anchor, update, names, layer, i, j, pair)
                )
        totals = {
            order: sum(scores[i, order[i]] for i in range(HEADS))
            for order in itertools.permutations(range(HEADS))
        }
        best = max(totals, key=lambda order: totals[order])
        identity = tuple(range(HEADS))
        assert tuple(found.get(layer, torch.arange(HEADS)).tolist()) == best
        assert regime == "unrelated" or (best == identity) == (regime == "near")
        stay = sum(
            np.trace(_between(anchor, update, names, layer, i, i, p))
            for i in range(HEADS)
            for p in ("qk", "vo")
        )
        expected -= 2 * (totals[best] - stay)
    assert after == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("parts", [("attention",), ("heads", "attention"), WHOLE_MODEL])
def test_permutations_within_heads_are_all_that_moves_there(
    parts: Any,
) -> None:
    """A client whose heads' units trade places comes back; what was rotated does
    not.
    """
    name = "bert-classifier"
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    options = AlignmentOptions(parts=parts, within_heads="permutation")
    rest = tuple(part for part in parts if part != "attention")
    update = random_equivalent(anchor, symmetry, 3, rest)
    moves = []
    for group in symmetry.select(("attention",)):
        orders = [torch.randperm(DIM, generator=seeded(h)) for h in range(HEADS)]
        moves.append(Move(group, torch.stack([eye(DIM)[order] for order in orders])))
    update = apply_moves(update, moves)
    alignment = align(update, anchor, symmetry, options)
    assert models.largest_difference(alignment.apply(update), anchor) <= 1e-12
    assert alignment.report.after <= 1e-12 * alignment.report.before
    turned = random_equivalent(anchor, symmetry, 3, ("attention",))
    alignment = align(turned, anchor, symmetry, options)
    inside = [
        move.element for move in alignment.moves if move.group.part == "attention"
    ]
    assert len(inside) == len(moves)
    for element in inside:
        assert set(element.unique().tolist()) == {0.0, 1.0}
        assert bool((element.sum(-1) == 1).all())
    assert 0 < alignment.report.after < alignment.report.before


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), d=st.integers(1, 4), heads=st.integers(1, 3))
def test_orders_and_scores_within_heads_equal_brute_force(
    seed: int, d: int, heads: int
) -> None:
    """The score of a pair of heads is what the best order of their units is worth."""
    rng = seeded(seed)
    pairs = [normal(rng, 2, heads * d, w) for w in (2, 4)]
    options = AlignmentOptions(within_heads="permutation")
    inside = Inside(
        HeadRotation(heads, d), RotationSolver(), [(a, c) for a, c in pairs]
    )
    scores = head_scores([inside], [], heads, options)
    for i, j in itertools.product(range(heads), repeat=2):
        m = sum(a[i * d : (i + 1) * d] @ c[j * d : (j + 1) * d].T for a, c in pairs)
        order = max(
            itertools.permutations(range(d)),
            key=lambda e: sum(m[k, e[k]] for k in range(d)),
        )
        expected = torch.zeros(1, d, d, dtype=torch.float64)
        expected[0, range(d), order] = 1
        assert torch.equal(best_orders(m[None]), expected)
        assert float(scores[i, j]) == pytest.approx(
            float((expected * m).sum()), rel=1e-12
        )
