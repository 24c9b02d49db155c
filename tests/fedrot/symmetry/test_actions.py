"""The group laws of every kind of element, against dense matrices."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedrot.matching.descent import compact
from fedrot.symmetry.actions import (
    HeadPermutation,
    HeadRotation,
    Kind,
    Permutation,
    Rescale,
    SignedPermutation,
)
from fedrot.symmetry.moves import Move, apply_moves
from tests.fedrot.oracles import along, dense, moved_densely, random_moves, seeded
from tests.models import EVERYTHING, largest_difference, state_of, symmetry_for

#: Every kind with the length of the axis it acts on.
KINDS: dict[str, tuple[Kind, int]] = {
    "permutation": (Permutation(6), 6),
    "signed": (SignedPermutation(6), 6),
    "heads": (HeadPermutation(3), 6),
    "rotation": (HeadRotation(3, 2), 6),
    "rescale": (Rescale(3), 6),
}
KIND = pytest.mark.parametrize(("kind", "size"), KINDS.values(), ids=KINDS)
SEEDS = given(one=st.integers(0, 2**31), two=st.integers(0, 2**31), axis=st.integers(0, 1))


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-12)


@KIND
@settings(max_examples=40, deadline=None)
@SEEDS
def test_group_laws(kind: Kind, size: int, one: int, two: int, axis: int) -> None:
    """Act, inverse and compose are those of matrices, on either side and on vectors too."""
    first, second = (kind.random(seeded(seed)) for seed in (one, two))
    x = torch.randn(size, size, generator=seeded(one ^ two), dtype=torch.float64)
    m, n = dense(kind, first, size), dense(kind, second, size)
    for contravariant in (False, True):
        expected = along(torch.linalg.inv(m).T if contravariant else m, x, axis)
        assert _close(kind.act(first, x, axis, contravariant), expected)
        back = kind.act(kind.inverse(first), expected, axis, contravariant)
        assert _close(back, x)
    assert _close(kind.act(first, x[0], 0), m @ x[0])
    assert _close(dense(kind, kind.compose(second, first), size), n @ m)
    assert _close(dense(kind, kind.inverse(first), size), torch.linalg.inv(m))
    third = kind.random(seeded(one + two))
    left = kind.compose(third, kind.compose(second, first))
    assert _close(
        dense(kind, left, size), dense(kind, kind.compose(kind.compose(third, second), first), size)
    )
    assert not kind.moved(kind.compose(kind.inverse(first), first)).any()
    blocks = m.reshape(kind.units, size // kind.units, size)
    eye = torch.eye(size, dtype=torch.float64).reshape(blocks.shape)
    assert torch.equal(kind.moved(first), (blocks - eye).abs().amax((1, 2)) > 1e-6)


@KIND
@settings(max_examples=40, deadline=None)
@SEEDS
def test_a_fisher_moves_by_the_squares_of_the_inverse(
    kind: Kind, size: int, one: int, two: int, axis: int
) -> None:
    """Gradients move by ``M^-T``; their squares follow where a row of ``M`` has one entry."""
    element = kind.random(seeded(one))
    on_fisher = kind.on_fisher(element)
    if isinstance(kind, HeadRotation):
        assert on_fisher is None
        return
    assert on_fisher is not None
    gradient = torch.randn(size, size, generator=seeded(two), dtype=torch.float64)
    moved = along(torch.linalg.inv(dense(kind, element, size)).T, gradient, axis)
    assert _close(kind.act(on_fisher, gradient.square(), axis), moved.square())


def test_random_signed_permutations_reach_the_whole_group() -> None:
    kind = SignedPermutation(3)
    found = {tuple(kind.random(seeded(seed)).tolist()) for seed in range(600)}
    orders = itertools.permutations((1, 2, 3))
    signs = list(itertools.product((1, -1), repeat=3))
    expected = {tuple(s * v for s, v in zip(ss, o, strict=True)) for o in orders for ss in signs}
    assert found == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_keep_the_dtype(dtype: torch.dtype) -> None:
    kind = SignedPermutation(5)
    x = torch.randn(5, 3, generator=seeded(0)).to(dtype)
    moved = kind.act(kind.random(seeded(1)), x, 0)
    assert moved.dtype == dtype
    assert sorted(moved.abs().flatten().tolist()) == sorted(x.abs().flatten().tolist())


# Sequences of moves


@pytest.mark.parametrize("name", ["bert-classifier", "electra-discriminator", "distilbert-mlm"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), length=st.integers(1, 30))
def test_compacted_moves_are_the_same_motion(name: str, seed: int, length: int) -> None:
    """Any sequence of any parts becomes one move per group, the same motion there and back."""
    state = state_of(name)
    rng = seeded(seed)
    groups = symmetry_for(name).select(EVERYTHING)
    chosen = [groups[int(torch.randint(len(groups), (), generator=rng))] for _ in range(length)]
    raw = [Move(group, group.kind.random(rng)) for group in chosen]
    moves = compact(raw)
    assert len(moves) == len({group.name for group in chosen})
    expected = apply_moves(state, raw)
    assert largest_difference(apply_moves(state, moves), expected) <= 1e-10
    undone = apply_moves(expected, [move.inverse for move in reversed(moves)])
    assert largest_difference(undone, state) <= 1e-10
    # Heads trade places before what is inside them is moved.
    inside = [bool(move.group.within) for move in moves]
    assert inside == sorted(inside)


@pytest.mark.parametrize("repeats", [2, 3])
def test_moves_inside_heads_are_carried_along_by_every_order_of_the_heads(repeats: int) -> None:
    """Rotate, reorder, rotate, reorder: the worst case for compacting, on all parts at once."""
    name = "bert-classifier"
    state, symmetry = state_of(name), symmetry_for(name)
    raw = []
    for seed in range(repeats):
        raw += [*random_moves(symmetry, seed, EVERYTHING)][:: 1 if seed % 2 else -1]
    moves = compact(raw)
    assert len(moves) == len(symmetry.select(EVERYTHING))
    assert largest_difference(apply_moves(state, moves), apply_moves(state, raw)) <= 1e-10


def test_nothing_compacts_to_nothing() -> None:
    assert compact([]) == ()


@pytest.mark.parametrize("name", ["bert-mlm", "roberta-choice", "electra-mlm", "distilbert-classifier"])
def test_moves_act_like_dense_matrices(name: str) -> None:
    state = state_of(name)
    moves = random_moves(symmetry_for(name), 4, EVERYTHING)
    moved = apply_moves(state, moves)
    assert largest_difference(moved, state) > 0.1
    assert largest_difference(moved, moved_densely(state, moves)) <= 1e-12
