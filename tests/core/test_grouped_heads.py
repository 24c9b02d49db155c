"""Nested matching of grouped queries: groups of heads first, then the query heads inside each."""

from __future__ import annotations

import itertools

import pytest
import torch

import fedrot
from fedrot.moves import Move, apply_moves
from fedrot.symmetry.kinds import QueryPermutation
from tests.families import state_of, symmetry_for
from tests.models import near, squared_distance

NAMES = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "phi3-partial"]


def _best_by_trying_all(name: str, update: dict[str, torch.Tensor], parts: tuple[str, ...]) -> float:
    """Return the least distance over all orders of the first layer's heads, the rest in closed form."""
    anchor, symmetry = state_of(name), symmetry_for(name)
    inside = [g for g in symmetry.select(("heads",), (0,)) if g.layer == 0]
    heads = next(g for g in inside if not isinstance(g.kind, QueryPermutation))
    queries = next(g for g in inside if isinstance(g.kind, QueryPermutation))
    kind = queries.kind
    assert isinstance(kind, QueryPermutation)
    orders = list(itertools.permutations(range(kind.n)))
    best = float("inf")
    for outer in itertools.permutations(range(kind.groups)):
        for inner in itertools.product(orders, repeat=kind.groups):
            moves = [Move(heads, torch.tensor(outer)), Move(queries, torch.tensor(inner))]
            moved = apply_moves(update, moves)
            options = fedrot.AlignmentOptions(parts=parts, layers=(0,))
            found = fedrot.align(moved, anchor, symmetry, options) if parts else None
            aligned = moved if found is None else found.apply(moved)
            best = min(best, squared_distance(aligned, anchor))
    return best


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_hidden_orders_are_found_through_noise(name: str, scale: float) -> None:
    """As good as trying every order, and the best phases and rotations for each."""
    anchor, symmetry = state_of(name), symmetry_for(name)
    update = fedrot.random_equivalent(near(anchor, scale), symmetry, 2, ("heads", "attention"))
    options = fedrot.AlignmentOptions(parts=("heads", "attention"), layers=(0,))
    found = fedrot.align(update, anchor, symmetry, options)
    reached = squared_distance(found.apply(update), anchor)
    assert reached <= _best_by_trying_all(name, update, ("attention",)) * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_unrelated_models_never_lose_by_an_order(name: str, seed: int, ridge: float) -> None:
    """The scores of groups are bounds: an order is kept only if it is worth something in the end."""
    anchor, update, symmetry = state_of(name), state_of(name, seed), symmetry_for(name)
    without = fedrot.AlignmentOptions(parts=("attention",), ridge=ridge)
    ordered = fedrot.AlignmentOptions(parts=("heads", "attention"), ridge=ridge)
    distances = [
        squared_distance(fedrot.align(update, anchor, symmetry, options).apply(update), anchor)
        for options in (without, ordered)
    ]
    if not ridge:
        assert distances[1] <= distances[0] * (1 + 1e-12)
    assert max(distances) <= squared_distance(update, anchor) * (1 + 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_orders_alone_are_found_too(name: str) -> None:
    anchor, symmetry = state_of(name), symmetry_for(name)
    update = fedrot.random_equivalent(near(anchor, 0.3), symmetry, 2, ("heads",))
    options = fedrot.AlignmentOptions(parts=("heads",), layers=(0,))
    aligned = fedrot.align(update, anchor, symmetry, options).apply(update)
    assert squared_distance(aligned, anchor) <= _best_by_trying_all(name, update, ()) * (1 + 1e-9)
