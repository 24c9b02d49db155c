"""The contract of every action: the laws of a group, and its definition as a dense
matrix.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrot.matching.descent import compact
from fedrot.matching.problem import SOLVERS
from fedrot.symmetry.actions import (
    HeadPermutation,
    HeadRotation,
    Orders,
    Permutation,
    QueryPermutation,
)
from fedrot.symmetry.describe.mixture import ExpertNeurons, ExpertPermutation
from fedrot.symmetry.groups import Move, apply_moves
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from fedrot.symmetry.signs import SignedOrders, SignedPermutation
from fedrot.symmetry.stream import StreamRotation, centred_basis
from tests import families
from tests.fedrot.oracles import along, dense, eye, gap, normal, seeded
from tests.models import EVERYTHING, largest_difference

SIZE = 12
#: Every action on an axis of ``SIZE``, with the largest entry of the mean of its random
#: matrices.
KINDS = {
    "permutation": (Permutation(SIZE), 1 / 12),
    "blocks": (Permutation(4), 1 / 4),
    "signed": (SignedPermutation(SIZE), 0),
    "heads": (HeadPermutation(3), 1 / 3),
    "queries": (QueryPermutation(2, 3), 1 / 3),
    "rotation": (HeadRotation(3, 4), 0),
    "stream": (StreamRotation(1, SIZE), 0),
    "centred stream": (StreamRotation(1, SIZE, centred=True), 1 / 12),
    "phases": (RotaryPhases(3, 4), 0),
    "interleaved phases": (RotaryPhases(3, 4, interleaved=True), 0),
    "signs": (RotarySigns(3, 4), 0),
    "interleaved signs": (RotarySigns(3, 4, interleaved=True), 0),
    "experts": (ExpertPermutation(4), 1 / 4),
    "experts' neurons": (ExpertNeurons(2, 6), 0),
}
ROTATIONS = [
    name for name, (action, _) in KINDS.items() if isinstance(action, HeadRotation)
]
KIND = pytest.mark.parametrize("name", KINDS)


def matrix(action, element):
    """Return the matrix of an element, written from the definition."""
    if isinstance(action, QueryPermutation | ExpertNeurons):
        one = (
            Permutation(action.n)
            if isinstance(action, QueryPermutation)
            else SignedPermutation(action.n)
        )
        return torch.block_diag(
            *(dense(one, row, SIZE // len(element)) for row in element)
        )
    if not isinstance(action, RotaryPhases | RotarySigns):
        return dense(action, element, SIZE)
    found = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for head, row in enumerate(element.tolist()):
        for f, value in enumerate(row):
            first, second = (
                (2 * f, 2 * f + 1) if action.interleaved else (f, f + action.dim // 2)
            )
            i = head * action.dim + first
            j = head * action.dim + second
            angle = (
                value if isinstance(action, RotaryPhases) else (1 - value) * math.pi / 2
            )
            found[i, i] = found[j, j] = math.cos(angle)
            found[j, i] = math.sin(angle)
            found[i, j] = -math.sin(angle)
    return found


def act(action, element, x, axis, contravariant=False):
    """Return what an action makes of an axis; experts have their number on an axis of
    its own.
    """
    if not isinstance(action, ExpertNeurons):
        return action.act(element, x, axis, contravariant)
    apart = x.movedim(axis, 0).unflatten(0, (action.experts, action.n))
    return action.act(element, apart, 1, contravariant).flatten(0, 1).movedim(0, axis)


def close(one, other):
    return bool(gap(one, other) <= 1e-12)


def test_every_action_has_a_case():
    assert {type(action) for action, _ in KINDS.values()} == set(SOLVERS)


@KIND
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), axis=st.integers(0, 1))
def test_actions_are_groups_of_matrices(name, seed, axis):
    action = KINDS[name][0]
    rng = seeded(seed)
    first = action.random(rng)
    second = action.random(rng)
    x = normal(rng, SIZE, SIZE)
    m, n, unit = (
        matrix(action, first),
        matrix(action, second),
        eye(SIZE),
    )
    for contravariant in (False, True):
        expected = along(torch.linalg.inv(m).T if contravariant else m, x, axis)
        assert close(act(action, first, x, axis, contravariant), expected)
    assert close(act(action, first, x[0], 0), m @ x[0])
    assert close(matrix(action, action.compose(second, first)), n @ m)
    assert close(matrix(action, action.inverse(first)), torch.linalg.inv(m))
    moved = (m - unit).reshape(action.units, SIZE // action.units, SIZE).abs().amax(
        (1, 2)
    ) > 1e-6
    assert torch.equal(action.moved(first), moved)
    assert not action.moved(action.compose(action.inverse(first), first)).any()
    on_fisher = action.on_fisher(first)
    assert (on_fisher is None) == isinstance(action, HeadRotation | RotaryPhases)
    if (
        on_fisher is not None
    ):  # gradients move by ``M^-T``; their squares follow without signs
        gradient = along(torch.linalg.inv(m).T, x, axis)
        assert close(act(action, on_fisher, x.square(), axis), gradient.square())


@KIND
def test_random_elements_are_spread_over_the_whole_group(name):
    """The mean of many is what every element of the group keeps."""
    (action, kept), rng = KINDS[name], seeded(4)
    mean = torch.stack([matrix(action, action.random(rng)) for _ in range(500)]).mean(0)
    assert float(mean.abs().max()) == pytest.approx(kept, abs=0.19)
    if kept:
        assert float(mean.sum(1).mean()) == pytest.approx(max(kept, 1), abs=0.1)


@KIND
def test_elements_from_elsewhere_are_checked(name):
    action = KINDS[name][0]
    rng = seeded(5)
    element = action.random(rng)
    assert action.contains(element)
    wrong = [element[..., :-1], element[None], element.half()]
    if isinstance(action, Orders | RotarySigns):
        wrong += [
            torch.zeros_like(element),
            2 * element,
            element.double(),
            element.int(),
        ]
    if isinstance(action, SignedOrders):
        assert action.contains(-element)
        wrong += [element.clamp(min=2)]
    elif isinstance(action, Orders):
        wrong += [-element, element + 1]
    if isinstance(action, HeadRotation | RotaryPhases):
        assert action.contains(element.float())
        wrong += [element * torch.nan, element / 0]
    if isinstance(action, HeadRotation):
        wrong += [1.01 * element, 0 * element]
    if name == "centred stream":
        wrong.append(StreamRotation(1, SIZE).random(rng))
    assert not any(map(action.contains, wrong))


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_have_tangents_angles_and_a_fisher_where_they_are_orders(
    name,
):
    action = KINDS[name][0]
    assert isinstance(action, HeadRotation)
    shape = (action.heads, action.dim, action.dim)
    directions = eye(math.prod(shape)).reshape(-1, *shape)
    elements = [action.exponential(0.3 * direction) for direction in directions]
    assert all(map(action.contains, elements))
    tangents = torch.stack([action.exponential(1e-4 * d).flatten() for d in directions])
    still = eye(action.dim).expand(shape)
    assert (
        torch.linalg.matrix_rank(tangents - still.flatten(), atol=1e-6) == action.free
    )
    signs = {
        round(float(torch.det(action.random(seeded(seed))[0]))) for seed in range(8)
    }
    assert signs == {-1, 1}
    order = still[:, torch.randperm(action.dim, generator=seeded(1))]
    assert torch.equal(action.on_fisher(order), order)
    assert action.on_fisher(still * 1.0) is not None
    assert action.angle(still) == 0
    plane = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    turned = torch.block_diag(*[plane] * (action.dim // 2)).expand(shape)
    assert action.angle(turned) == pytest.approx(math.degrees(math.acos(0.8)))


def test_phases_have_angles_and_a_fisher_where_they_stand_still():
    action = RotaryPhases(2, 4)
    turn = torch.tensor([[0.5, 2 * math.pi], [0.0, -1.5]]).double()
    assert action.angle(turn) == pytest.approx(math.degrees(2.0 / 4))
    assert action.moved(turn).tolist() == [True, True]
    assert torch.equal(
        action.on_fisher(math.pi * torch.ones(2, 2).double()), torch.zeros(2, 2)
    )
    assert KINDS["phases"][0].free == 6
    basis = centred_basis(5)
    assert close(basis.mT @ basis, torch.eye(4))
    assert close(basis.sum(0), torch.zeros(4))


# Sequences of moves


@pytest.mark.parametrize("name", ["bert", "llama", "mixtral"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), length=st.integers(0, 30))
def test_compacted_moves_are_the_same_motion(name, seed, length):
    """Any sequence of any parts becomes one move per group, the same motion there and
    back.
    """
    state = families.state_of(name)
    rng = seeded(seed)
    groups = families.symmetry_for(name).select(EVERYTHING)
    chosen = [
        groups[int(torch.randint(len(groups), (), generator=rng))]
        for _ in range(length)
    ]
    raw = [Move(group, group.action.random(rng)) for group in chosen]
    moves = compact(raw)
    assert len(moves) == len({group.name for group in chosen})
    expected = apply_moves(state, raw)
    assert largest_difference(apply_moves(state, moves), expected) <= 1e-10
    undone = apply_moves(expected, [move.inverse for move in reversed(moves)])
    assert largest_difference(undone, state) <= 1e-10
    # Heads trade places before what is inside them is moved.
    inside = [bool(move.group.within) for move in moves]
    assert inside == sorted(inside)
