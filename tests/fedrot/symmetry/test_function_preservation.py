"""A move of the claimed group never changes what the model computes; a wrong move does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrot
from tests.models import (
    CASES,
    DIM,
    EAGER,
    EVERY,
    EVERYTHING,
    FEW,
    FULL,
    HEADS,
    NEURONS,
    Names,
    State,
    largest_difference,
    logits,
    near,
    squared_distance,
    state_of,
    symmetry_for,
)

PARTS = pytest.mark.parametrize(
    "parts", [EVERYTHING, FULL, ("attention", "ffn")], ids=["everything", "full", "default"]
)


def _changed(one: State, other: State) -> set[str]:
    return {key for key in one if not torch.equal(one[key], other[key])}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", EVERY)
def test_random_element_keeps_every_output_in_float64(name: str, attention: str) -> None:
    """All parts together, of every family with every task head; all that may move does."""
    state, symmetry = state_of(name), symmetry_for(name)
    assert not symmetry.refused
    groups = symmetry.select(EVERYTHING)
    assert {group.part for group in groups} >= {*EVERYTHING} - {"output"}
    expected = logits(name, state, attention)
    for seed in range(2):
        moved = fedrot.random_equivalent(state, symmetry, seed, EVERYTHING)
        assert _changed(moved, state) == {slot.tensor for group in groups for slot in group.slots}
        assert (logits(name, moved, attention) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("name", EVERY)
def test_every_part_on_its_own_moves_weights_and_keeps_every_output(name: str) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    expected = logits(name, state)
    for part in EVERYTHING:
        moved = fedrot.random_equivalent(state, symmetry, 3, (part,))
        groups = symmetry.select((part,))
        assert _changed(moved, state) == {slot.tensor for group in groups for slot in group.slots}
        assert (logits(name, moved) - expected).abs().max() <= 1e-10, part
        # Heads with hidden units of their own; all others lead to outputs in one step.
        assert bool(groups) == (part != "output" or name in HIDDEN_UNITS), part


#: Cases whose task head has hidden units that are neither the residual stream nor the embeddings.
HIDDEN_UNITS = {
    *("bert-classifier", "bert-pretraining", "bert-choice", "bert-next"),
    *("roberta-classifier", "roberta-choice", "xlm-r-classifier", "xlm-r-choice"),
    *("electra-classifier", "electra-discriminator"),
    *("electra-wide-classifier", "electra-wide-discriminator"),
    *("distilbert-classifier", "distilbert-choice"),
}


@pytest.mark.parametrize("name", CASES)
@PARTS
def test_random_element_keeps_logits_in_float32(name: str, parts: tuple[str, ...]) -> None:
    state, symmetry = state_of(name, dtype=torch.float32), symmetry_for(name)
    expected = logits(name, state)
    moved = fedrot.random_equivalent(state, symmetry, 1, parts)
    assert largest_difference(moved, state) > 0.1
    error = (logits(name, moved) - expected).abs().max() / expected.abs().max()
    assert error <= 1e-4


@pytest.mark.parametrize("name", FEW)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), model_seed=st.integers(0, 3))
def test_any_seed_keeps_logits_and_aligns_back(name: str, seed: int, model_seed: int) -> None:
    state = state_of(name, model_seed)
    symmetry = symmetry_for(name)
    moved = fedrot.random_equivalent(state, symmetry, seed, EVERYTHING)
    assert (logits(name, moved) - logits(name, state)).abs().max() <= 1e-10
    back = fedrot.align(
        moved, state, symmetry, fedrot.AlignmentOptions(parts=EVERYTHING, canonical=False)
    ).apply(moved)
    assert largest_difference(back, state) <= 1e-8


def test_random_elements_are_reproducible_and_differ_by_seed() -> None:
    state = state_of("bert-classifier")
    symmetry = symmetry_for("bert-classifier")
    one, same, other = (fedrot.random_equivalent(state, symmetry, s, FULL) for s in (1, 1, 2))
    assert largest_difference(one, same) == 0
    assert largest_difference(one, other) > 0.1


def test_random_rotations_include_reflections() -> None:
    symmetry = symmetry_for("bert-classifier")
    group = next(g for g in symmetry.groups if g.part == "attention")
    signs = {
        round(float(value))
        for seed in range(4)
        for value in torch.linalg.det(group.kind.random(torch.Generator().manual_seed(seed)))
    }
    assert signs == {-1, 1}


# What is outside the group changes the model: the tolerance above is not met by accident.


def _orthogonal(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def _left(state: State, module: str, matrix: torch.Tensor, rows: slice) -> None:
    for leaf in ("weight", "bias"):
        state[f"{module}.{leaf}"][rows] = matrix @ state[f"{module}.{leaf}"][rows]


def _rotate_across_heads(state: State, names: Names) -> None:
    matrix, rows = _orthogonal(2 * DIM), slice(0, 2 * DIM)
    _left(state, names.of(0, "query"), matrix, rows)
    _left(state, names.of(0, "key"), matrix, rows)


def _rotate_query_without_key(state: State, names: Names) -> None:
    _left(state, names.of(0, "query"), _orthogonal(DIM), slice(0, DIM))


def _rotate_value_without_output(state: State, names: Names) -> None:
    _left(state, names.of(0, "value"), _orthogonal(DIM), slice(0, DIM))


def _rotate_query_key_without_biases(state: State, names: Names) -> None:
    for module in ("query", "key"):
        weight = state[f"{names.of(0, module)}.weight"]
        weight[:DIM] = _orthogonal(DIM) @ weight[:DIM]


def _swap_heads_of_query_and_key_only(state: State, names: Names) -> None:
    order = torch.arange(HEADS * DIM).reshape(HEADS, DIM)[[1, 0, *range(2, HEADS)]].flatten()
    for module in ("query", "key"):
        for leaf in ("weight", "bias"):
            state[f"{names.of(0, module)}.{leaf}"] = state[f"{names.of(0, module)}.{leaf}"][order]


def _scale_query_and_key_alike(state: State, names: Names) -> None:
    for module in ("query", "key"):
        _left(state, names.of(0, module), 2 * torch.eye(DIM, dtype=torch.float64), slice(0, DIM))


def _permute_up_without_down(state: State, names: Names) -> None:
    order = torch.arange(NEURONS).roll(1)
    for leaf in ("weight", "bias"):
        state[f"{names.of(0, 'up')}.{leaf}"] = state[f"{names.of(0, 'up')}.{leaf}"][order]


def _permute_neurons_without_bias(state: State, names: Names) -> None:
    order = torch.arange(NEURONS).roll(1)
    up, down = (f"{names.of(0, module)}.weight" for module in ("up", "down"))
    state[up], state[down] = state[up][order], state[down][:, order]


def _rotate_neurons(state: State, names: Names) -> None:
    matrix = _orthogonal(NEURONS)
    _left(state, names.of(0, "up"), matrix, slice(0, NEURONS))
    state[f"{names.of(0, 'down')}.weight"] = state[f"{names.of(0, 'down')}.weight"] @ matrix.T


def _embeddings(names: Names) -> str:
    return f"{names.stack.split('.')[0]}.embeddings"


def _permute_positions_without_words(state: State, names: Names) -> None:
    key = f"{_embeddings(names)}.position_embeddings.weight"
    state[key] = state[key].roll(1, 1)


def _stream_in_other_coordinates(state: State, name: str, matrix: torch.Tensor) -> None:
    """Apply a matrix to everything that reads or writes the residual stream, norms included."""
    residual = next(g for g in symmetry_for(name).groups if g.name == "residual")
    for slot in residual.slots:
        moved = (matrix @ state[slot.tensor].movedim(slot.axis, 0)).movedim(0, slot.axis)
        state[slot.tensor] = moved


def _rotate_the_stream(state: State, names: Names) -> None:
    _stream_in_other_coordinates(state, _name_of(names), _orthogonal(HEADS * DIM))


def _flip_a_sign_of_the_stream(state: State, names: Names) -> None:
    signs = torch.ones(HEADS * DIM, dtype=torch.float64)
    signs[3] = -1
    _stream_in_other_coordinates(state, _name_of(names), torch.diag(signs))


def _permute_the_stream_but_not_a_norm(state: State, names: Names) -> None:
    norm = f"{_embeddings(names)}.LayerNorm.weight"
    kept = state[norm].clone()
    permutation = torch.eye(HEADS * DIM, dtype=torch.float64).roll(1, 0)
    _stream_in_other_coordinates(state, _name_of(names), permutation)
    state[norm] = kept


def _name_of(names: Names) -> str:
    return next(name for name in FEW if CASES[name].names == names)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(
    "damage",
    [
        _permute_positions_without_words,
        _rotate_the_stream,
        _flip_a_sign_of_the_stream,
        _permute_the_stream_but_not_a_norm,
        _rotate_across_heads,
        _rotate_query_without_key,
        _rotate_value_without_output,
        _rotate_query_key_without_biases,
        _swap_heads_of_query_and_key_only,
        _scale_query_and_key_alike,
        _permute_up_without_down,
        _permute_neurons_without_bias,
        _rotate_neurons,
    ],
)
def test_a_wrong_move_changes_the_logits(name: str, damage: Callable[[State, Names], None]) -> None:
    state = state_of(name)
    damaged = state_of(name)
    damage(damaged, CASES[name].names)
    assert (logits(name, damaged) - logits(name, state)).abs().max() > 1e-4


# Degenerate weights: nothing is determined there, and still the function must not move.


def _rank_deficient(state: State, names: Names) -> None:
    for layer in range(2):
        for module in ("query", "key", "value"):
            state[f"{names.of(layer, module)}.weight"][DIM // 2 : DIM] = 0
            state[f"{names.of(layer, module)}.bias"][DIM // 2 : DIM] = 0
        state[f"{names.of(layer, 'output')}.weight"][:, 3:] *= 1e-14


def _rank_one(state: State, names: Names) -> None:
    for module in ("query", "key", "value", "output", "up", "down"):
        weight = state[f"{names.of(0, module)}.weight"]
        weight.copy_(torch.outer(weight[:, 0], weight[0]))


def _zero_attention(state: State, names: Names) -> None:
    for module in ("query", "key", "value", "output"):
        state[f"{names.of(0, module)}.weight"].zero_()
        state[f"{names.of(0, module)}.bias"].zero_()


def _zero_head(state: State, names: Names) -> None:
    for module in ("query", "key", "value"):
        state[f"{names.of(1, module)}.weight"][:DIM] = 0
        state[f"{names.of(1, module)}.bias"][:DIM] = 0


def _zero_query(state: State, names: Names) -> None:
    state[f"{names.of(0, 'query')}.weight"].zero_()
    state[f"{names.of(0, 'query')}.bias"].zero_()


def _equal_heads(state: State, names: Names) -> None:
    for module in ("query", "key", "value"):
        for leaf in ("weight", "bias"):
            tensor = state[f"{names.of(0, module)}.{leaf}"]
            tensor.copy_(tensor[:DIM].repeat(HEADS, *[1] * (tensor.ndim - 1)))
    weight = state[f"{names.of(0, 'output')}.weight"]
    weight.copy_(weight[:, :DIM].repeat(1, HEADS))


def _zero_and_equal_neurons(state: State, names: Names) -> None:
    up, down = names.of(0, "up"), names.of(0, "down")
    state[f"{up}.weight"][:10], state[f"{up}.bias"][:10], state[f"{down}.weight"][:, :10] = 0, 0, 0
    state[f"{up}.weight"][10:30] = state[f"{up}.weight"][10]
    state[f"{up}.bias"][10:30] = state[f"{up}.bias"][10]
    state[f"{down}.weight"][:, 10:30] = state[f"{down}.weight"][:, 10:11]


def _all_zero(state: State, names: Names) -> None:
    for tensor in state.values():
        tensor.zero_()


def _huge_and_tiny(state: State, names: Names) -> None:
    for leaf in ("weight", "bias"):
        state[f"{names.of(0, 'query')}.{leaf}"] *= 1e6
        state[f"{names.of(0, 'key')}.{leaf}"] *= 1e-9
    state[f"{names.of(0, 'up')}.weight"] *= 1e-12


_DEGENERATE = [
    _rank_deficient,
    _rank_one,
    _zero_attention,
    _zero_head,
    _zero_query,
    _equal_heads,
    _zero_and_equal_neurons,
    _all_zero,
    _huge_and_tiny,
]


@pytest.mark.parametrize("where", ["client", "anchor", "both"])
@pytest.mark.parametrize("degrade", _DEGENERATE)
@PARTS
def test_degenerate_weights_keep_the_function(
    degrade: Callable[[State, Names], None], where: str, parts: tuple[str, ...]
) -> None:
    name = "bert-classifier"
    anchor = state_of(name)
    client = near(anchor, 0.3)
    symmetry = symmetry_for(name)
    for which, state in (("client", client), ("anchor", anchor)):
        if where in (which, "both"):
            degrade(state, CASES[name].names)
    aligned = fedrot.align(client, anchor, symmetry, replace(EAGER, parts=parts)).apply(client)
    assert all(bool(torch.isfinite(t).all()) for t in aligned.values())
    assert (logits(name, aligned) - logits(name, client)).abs().max() <= 1e-10
    before = squared_distance(client, anchor)
    assert squared_distance(aligned, anchor) <= before * (1 + 1e-12)


@pytest.mark.parametrize("degrade", _DEGENERATE)
def test_degenerate_weights_in_float32_keep_the_function(
    degrade: Callable[[State, Names], None],
) -> None:
    name = "bert-classifier"
    anchor = state_of(name, dtype=torch.float32)
    client = near(anchor, 0.3)
    degrade(client, CASES[name].names)
    symmetry = symmetry_for(name)
    aligned = fedrot.align(client, anchor, symmetry, EAGER).apply(client)
    assert all(bool(torch.isfinite(t).all()) for t in aligned.values())
    assert (logits(name, aligned) - logits(name, client)).abs().max() <= 1e-4


@pytest.mark.parametrize("degrade", [_rank_deficient, _zero_attention, _equal_heads, _all_zero])
def test_degenerate_client_equal_to_its_anchor_does_not_move(
    degrade: Callable[[State, Names], None],
) -> None:
    name = "bert-classifier"
    anchor = state_of(name)
    degrade(anchor, CASES[name].names)
    symmetry = symmetry_for(name)
    alignment = fedrot.align(anchor, anchor, symmetry, replace(EAGER, parts=FULL))
    assert largest_difference(alignment.apply(anchor), anchor) <= 1e-12
    assert alignment.report.after <= 1e-20
