"""Nested matching of grouped queries: groups of heads first, then the query heads
inside each.
"""

import itertools

import pytest
import torch

from fedrot import Activations, AlignmentOptions, align, random_equivalent
from fedrot.symmetry.actions import InsideHeads, QueryPermutation
from fedrot.symmetry.groups import Move, apply_moves
from tests.families import state_of, symmetry_for
from tests.fedrot.oracles import eye
from tests.models import align_tensors, copied, near, squared_distance

NAMES = ["llama", "mistral", "qwen2", "gemma3", "phi3-partial", "falcon-40b"]


def _orders(symmetry):
    """Return the groups that order the key heads and the query heads of the first
    layer.
    """
    heads, queries = symmetry.select(("heads",), (0,))
    assert isinstance(queries.action, QueryPermutation)
    return heads, queries


def _best_by_trying_all(name, update, parts):
    """Return the least distance over all orders of the first layer's heads, the rest in
    closed form.
    """
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    heads, queries = _orders(symmetry)
    action = queries.action
    assert isinstance(action, QueryPermutation)
    orders = list(itertools.permutations(range(action.n)))
    best = float("inf")
    for outer in itertools.permutations(range(action.groups)):
        for inner in itertools.product(orders, repeat=action.groups):
            moves = [
                Move(heads, torch.tensor(outer)),
                Move(queries, torch.tensor(inner)),
            ]
            moved = apply_moves(update, moves)
            options = AlignmentOptions(parts=parts, layers=(0,), chance=0)
            found = align(moved, anchor, symmetry, options) if parts else None
            aligned = moved if found is None else found.apply(moved)
            best = min(best, squared_distance(aligned, anchor))
    return best


@pytest.mark.parametrize("parts", [("heads", "attention"), ("heads",)])
@pytest.mark.parametrize(("name", "scale"), [*zip(NAMES, [0.3, 1.0] * 3, strict=True)])
def test_hidden_orders_are_found_through_noise(name, scale, parts):
    """As good as trying every order, and the best phases and rotations for each."""
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    update = random_equivalent(near(anchor, scale), symmetry, 2, parts)
    options = AlignmentOptions(parts=parts, layers=(0,), chance=0)
    aligned = align_tensors(update, anchor, symmetry, options)
    best = _best_by_trying_all(name, update, parts[1:])
    assert squared_distance(aligned, anchor) <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_unrelated_models_never_lose_by_an_order(name, seed):
    """The scores of groups are bounds: an order is kept only if it is worth something
    in the end.
    """
    anchor, update, symmetry = state_of(name), state_of(name, seed), symmetry_for(name)
    without = AlignmentOptions(parts=("attention",), chance=0)
    ordered = AlignmentOptions(parts=("heads", "attention"), chance=0)
    distances = [
        squared_distance(align_tensors(update, anchor, symmetry, options), anchor)
        for options in (without, ordered)
    ]
    assert distances[1] <= distances[0] * (1 + 1e-12)
    assert max(distances) <= squared_distance(update, anchor) * (1 + 1e-12)


# Activations, which show what key heads have once


def _elements(
    name,
    update,
    anchor,
    seen,
    weight,
):
    """Return the orders that are found in the first layer, by group; activations
    correlate weakly.

    Args:
        seen: which key head of the client has the activations of each of the anchor's.
        weight: of the activations.
    """
    symmetry = symmetry_for(name)
    groups = symmetry.select(("attention",), (0,))
    matrices = {}
    for group in groups:
        assert isinstance(group.action, InsideHeads)
        each = eye(group.action.dim)
        heads = eye(group.action.heads)[seen]
        matrices[group.name] = (
            0.1 * torch.kron(heads, each) / (group.action.heads * group.action.dim)
        )
    activations = Activations(matrices, {group.name: group.within for group in groups})
    options = AlignmentOptions(
        parts=("heads", "attention"), layers=(0,), activation_weight=weight
    )
    alignment = align(update, anchor, symmetry, options, activations)
    return {
        m.group.name: m.element.tolist()
        for m in alignment.moves
        if m.group.part == "heads"
    }


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "mistral"]
)  # one key head
def test_activations_alone_order_key_heads_where_weights_have_no_say(name):
    """The weights of keys, values, queries and output all say that the heads are in
    their places.
    """
    anchor, (heads, _) = state_of(name), _orders(symmetry_for(name))
    exchanged = torch.tensor([1, 0])
    assert _elements(name, anchor, anchor, exchanged, 0.5) == {}
    assert _elements(name, anchor, anchor, exchanged, 1.0)[heads.name] == [1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_queries_order_them_where_those_of_keys_have_no_say(
    name,
):
    """Queries turn as activations say; by the weights of keys and values they would
    turn round.
    """
    anchor = state_of(name)
    heads, queries = _orders(symmetry_for(name))
    assert isinstance(queries.action, QueryPermutation)
    once = [slot for slot in heads.slots if slot not in queries.slots]
    assert len(once) >= 2
    for slot in once:
        # Larger than what the queries say, which several of them say together.
        slot.slice.write(
            anchor[slot.tensor], slot.axis, 10 * slot.of(anchor[slot.tensor])
        )
    order = torch.arange(queries.action.n).roll(1).repeat(queries.action.groups, 1)
    update = copied(apply_moves(anchor, [Move(queries, order)]))
    for slot in once:
        slot.slice.write(update[slot.tensor], slot.axis, -slot.of(update[slot.tensor]))
    found = _elements(name, update, anchor, torch.arange(heads.action.units), 1.0)
    assert found == {queries.name: queries.action.inverse(order).tolist()}
