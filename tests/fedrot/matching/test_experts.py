"""Matching of a mixture's experts against all orders of the experts."""

from functools import cache
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from fedrot import AlignmentOptions, align
from fedrot.matching import experts
from fedrot.matching.anchor import Anchor
from fedrot.matching.problem import Problem
from fedrot.symmetry.describe.mixture import ExpertNeurons, ExpertPermutation
from fedrot.symmetry.groups import Move, apply_moves
from tests.families import state_of, symmetry_for
from tests.fedrot.oracles import seeded
from tests.models import (
    align_tensors,
    largest_difference,
    near,
    squared_distance,
)

NAME, EXPERTS, NEURONS = "mixtral", 3, 20
FFN = AlignmentOptions(parts=("ffn",), chance=0)


def _groups(action):
    return [
        group for group in symmetry_for(NAME).groups if isinstance(group.action, action)
    ]


def _neuron_rows(state, expert):
    """Return the gate's rows, and the rows of up beside the columns of down, of layer
    0.
    """
    gate_up = state["model.layers.0.mlp.experts.gate_up_proj"][expert].numpy()
    down = state["model.layers.0.mlp.experts.down_proj"][expert].numpy()
    return gate_up[:NEURONS], np.concatenate([gate_up[NEURONS:], down.T], 1)


def _worth(anchor, client, i, j):
    """Return what client expert ``j`` has in common with anchor expert ``i`` at
    best.
    """
    (gate, rest), (theirs, others) = _neuron_rows(anchor, i), _neuron_rows(client, j)
    scores = gate @ theirs.T + np.abs(rest @ others.T)
    router = "model.layers.0.mlp.gate.weight"
    return float(
        scores[linear_sum_assignment(-scores)].sum()
        + anchor[router][i] @ client[router][j]
    )


@cache
def _best(scale, seed):
    """Return the best order of the experts of layer 0 by trying all, and what it is
    worth.
    """
    anchor = state_of(NAME)
    client = state_of(NAME, seed) if scale is None else near(anchor, scale, seed)
    client = apply_moves(
        client, [Move(_groups(ExpertPermutation)[0], torch.tensor([2, 0, 1]))]
    )
    worths = {
        order: sum(_worth(anchor, client, i, j) for i, j in enumerate(order))
        for order in permutations(range(EXPERTS))
    }
    order = max(worths, key=worths.__getitem__)
    return order, worths[order], anchor, client


@pytest.mark.parametrize(
    ("scale", "seed"), [(0.1, 1), (1.0, 2), (1.0, 3), (None, 1), (None, 2)]
)
def test_experts_are_in_the_best_of_all_orders(scale, seed):
    order, worth, anchor, client = _best(scale, seed)
    alignment = align(client, anchor, symmetry_for(NAME), FFN)
    moves = {move.group.name: move.element for move in alignment.moves}
    assert tuple(moves.get("layers.0.experts", torch.arange(EXPERTS)).tolist()) == order
    aligned = alignment.apply(client)
    tensors = {k for k in anchor if k.startswith("model.layers.0.mlp.")}
    norms = sum(
        float(state[k].square().sum()) for k in tensors for state in (anchor, client)
    )
    assert squared_distance({k: anchor[k] for k in tensors}, aligned) == pytest.approx(
        norms - 2 * worth
    )


def test_few_pairs_of_experts_are_solved(monkeypatch):
    """Bounds say of most pairs that the best order does not use them."""
    _, _, anchor, client = _best(0.1, 1)
    solved = []
    worth = experts._Pool.worth

    def counted(pool, i, j):
        solved.append((i, j))
        return worth(pool, i, j)

    monkeypatch.setattr(experts._Pool, "worth", counted)
    group = _groups(ExpertPermutation)[0]
    problem = Problem(Anchor(anchor), client, symmetry_for(NAME), FFN)
    (match,) = experts.match_experts([group], problem)
    assert match.element is not None
    assert set(solved) == {(i, i) for i in range(EXPERTS)} | {(0, 1), (1, 2), (2, 0)}
    assert len(solved) == len(set(solved))


def test_a_near_client_is_certified_without_an_assignment(
    monkeypatch,
):
    anchor = state_of(NAME)
    client = near(anchor, 1e-3)
    monkeypatch.setattr(experts, "_best_order", None)
    alignment = align(client, anchor, symmetry_for(NAME), FFN)
    assert all(row["certified"] for row in alignment.report.rows())
    assert not alignment.moves


def test_router_rows_in_place_certify_no_order_while_neurons_are_elsewhere():
    anchor = state_of(NAME)
    order = torch.tensor([2, 0, 1])
    neurons = [
        f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down")
    ]
    client = {**anchor, **{name: anchor[name][order] for name in neurons}}
    aligned = align_tensors(client, anchor, symmetry_for(NAME), FFN)
    assert all(torch.equal(aligned[name], anchor[name]) for name in neurons)


@pytest.mark.parametrize("action", [ExpertNeurons, ExpertPermutation])
def test_neurons_and_experts_move_without_each_other(action):
    anchor = state_of(NAME)
    rng = seeded(3)
    moves = [Move(group, group.action.random(rng)) for group in _groups(action)[1:]]
    client = apply_moves(anchor, moves)
    alignment = align(client, anchor, symmetry_for(NAME), FFN)
    assert [move.group.name for move in alignment.moves] == [
        move.group.name for move in moves
    ]
    assert largest_difference(alignment.apply(client), anchor) == 0
    assert alignment.report.after == pytest.approx(
        0, abs=1e-9 * alignment.report.before
    )
    moved = {
        row["group"]: row["moved"] for row in alignment.report.rows() if row["moved"]
    }
    assert moved == {
        m.group.name: int(m.group.action.moved(m.element).sum()) for m in moves
    }


def test_expert_neurons_of_a_moving_anchor_keep_their_certificate():
    """The bounds of the anchor before hold for one that has come nearer to its last
    client.
    """
    first = state_of(NAME)
    symmetry = symmetry_for(NAME)
    anchor = Anchor(first)
    client = near(first, 1e-3)
    align(client, anchor, symmetry, FFN)
    moved = anchor.towards_last({k: (first[k] + client[k]) / 2 for k in first}, 0.5)
    known = {name for name, _ in moved._known.bounds}
    assert known >= {group.name for group in _groups(ExpertNeurons)}
    for (name, columns), bound in moved._known.bounds.items():
        group = next(group for group in symmetry.groups if group.name == name)
        exact = Anchor(moved.tensors).separation(group, columns)
        assert (bound.separation <= exact + 1e-9).all()
