"""The order of the heads against brute force."""

import itertools
from functools import partial

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
from tests.fedrot.oracles import cross, eye, normal, seeded
from tests.fedrot.pairs import recovered
from tests.models import (
    DIM,
    FEW,
    HEADS,
    near,
    squared_distance,
    state_of,
    symmetry_for,
)


def _between(anchor, update, names, layer, i, j):
    """Return the cross matrices of anchor head ``i`` and client head ``j``."""
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
    return [
        cross(anchor, swapped, names, layer, i, pair).numpy() for pair in ("qk", "vo")
    ]


@pytest.mark.parametrize("regime", ["near", "scrambled", "unrelated"])
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (FEW[0], ("heads", "attention")),
        (FEW[0], ("heads",)),
        (FEW[1], ("heads", "attention")),
    ],
)
def test_head_order_equals_brute_force(name, regime, parts):
    names = models.CASES[name].names
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    update = state_of(name, 8) if regime == "unrelated" else near(anchor, 0.4)
    if regime == "scrambled":
        update = random_equivalent(update, symmetry, 4, parts)
    alignment = align(update, anchor, symmetry, AlignmentOptions(parts=parts, chance=0))
    value = partial(np.linalg.norm, ord="nuc") if "attention" in parts else np.trace
    found = {
        m.group.layer: m.element for m in alignment.moves if m.group.part == "heads"
    }
    expected = squared_distance(update, anchor)
    identity = tuple(range(HEADS))
    for layer in range(2):
        pairs = {
            (i, j): _between(anchor, update, names, layer, i, j)
            for i, j in itertools.product(range(HEADS), repeat=2)
        }

        def total(order, of=value, pairs=pairs):
            return sum(of(m) for pair in enumerate(order) for m in pairs[pair])

        best = max(itertools.permutations(identity), key=total)
        assert tuple(found.get(layer, torch.arange(HEADS)).tolist()) == best
        assert regime == "unrelated" or (best == identity) == (regime == "near")
        expected -= 2 * (total(best) - total(identity, np.trace))
    after = squared_distance(alignment.apply(update), anchor)
    assert after == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("parts", [("attention",), ("heads", "attention"), WHOLE_MODEL])
def test_permutations_within_heads_are_all_that_moves_there(parts):
    """A client whose heads' units trade places comes back; what was rotated does
    not.
    """
    anchor = state_of(FEW[0])
    symmetry = symmetry_for(FEW[0])
    options = AlignmentOptions(parts=parts, within_heads="permutation")
    rest = tuple(part for part in parts if part != "attention")
    moves = []
    for group in symmetry.select(("attention",)):
        orders = [torch.randperm(DIM, generator=seeded(h)) for h in range(HEADS)]
        moves.append(Move(group, torch.stack([eye(DIM)[order] for order in orders])))
    update = apply_moves(random_equivalent(anchor, symmetry, 3, rest), moves)
    recovered(update, anchor, symmetry, options)
    turned = random_equivalent(anchor, symmetry, 3, ("attention",))
    alignment = align(turned, anchor, symmetry, options)
    inside = [m.element for m in alignment.moves if m.group.part == "attention"]
    assert len(inside) == len(moves)
    for element in inside:
        assert set(element.unique().tolist()) == {0.0, 1.0}
        assert bool((element.sum(-1) == 1).all())
    assert 0 < alignment.report.after < alignment.report.before


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), d=st.integers(1, 4), heads=st.integers(1, 3))
def test_orders_and_scores_within_heads_equal_brute_force(seed, d, heads):
    """The score of a pair of heads is what the best order of their units is worth."""
    rng = seeded(seed)
    pairs = [tuple(normal(rng, 2, heads * d, width)) for width in (2, 4)]
    options = AlignmentOptions(within_heads="permutation")
    inside = Inside(HeadRotation(heads, d), RotationSolver(), pairs)
    scores = head_scores([inside], [], heads, options)
    every = (
        sum(a @ c.T for a, c in pairs).unflatten(0, (heads, d)).unflatten(2, (heads, d))
    )
    for i, j in itertools.product(range(heads), repeat=2):
        m = every[i, :, j]
        order = max(
            itertools.permutations(range(d)),
            key=lambda order, m=m: float(m[range(d), order].sum()),
        )
        assert torch.equal(best_orders(m[None])[0], eye(d)[list(order)])
        expected = float(m[range(d), order].sum())
        assert float(scores[i, j]) == pytest.approx(expected, rel=1e-12)
