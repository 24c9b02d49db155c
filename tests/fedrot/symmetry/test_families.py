"""Every family: the contract on real models, in all attention implementations, and its way back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedrot
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.describe.mixture import ExpertNeurons, ExpertPermutation
from fedrot.symmetry.moves import Move, apply_moves
from fedrot.symmetry.rotary_actions import RotaryPhases
from tests.families import (
    ALIBI,
    FIXED,
    KINDS,
    MEMBERS,
    inputs,
    model_of,
    outputs,
    state_of,
    symmetry_for,
)
from tests.models import EAGER, EVERYTHING, FULL, largest_difference, near, squared_distance

BOTH = [(name, attention) for name, member in MEMBERS.items() for attention in member.attention]


def _parts(symmetry: fedrot.Symmetry, asked: tuple[str, ...] = EVERYTHING) -> tuple[str, ...]:
    return tuple(part for part in asked if part not in symmetry.refused)


def test_every_family_has_a_member_and_every_member_a_family() -> None:
    found = {model_of(name).config.model_type for name in MEMBERS}
    assert found | {"xlm-roberta", "distilbert"} == set(fedrot.supported())


@pytest.mark.parametrize("name", MEMBERS)
def test_members_are_tried_in_every_attention_that_they_have(name: str) -> None:
    model = model_of(name)
    assert ("sdpa" in MEMBERS[name].attention) == bool(model._supports_sdpa)


@pytest.mark.parametrize(("name", "attention"), BOTH)
def test_a_random_element_of_the_full_group_preserves_the_function(name: str, attention: str) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    before = outputs(name, state, attention)
    parts = _parts(symmetry)
    for chosen in (*((part,) for part in parts), parts):
        moved = fedrot.random_equivalent(state, symmetry, 3, chosen)
        assert (outputs(name, moved, attention) - before).abs().max() <= 1e-9 * before.abs().max()
    assert squared_distance(moved, state) > 0.1 * squared_distance(state_of(name, 1), state)


@pytest.mark.parametrize("name", MEMBERS)
def test_only_bare_models_fixed_positions_and_alibi_refuse_anything(name: str) -> None:
    stays = MEMBERS[name].bare or name in FIXED
    refused = {"residual"} if stays else {"heads"} if name in ALIBI else set()
    assert set(symmetry_for(name).refused) == refused


@pytest.mark.parametrize("name", ALIBI)
def test_heads_with_slopes_of_their_own_keep_their_order_and_say_so(name: str) -> None:
    symmetry = symmetry_for(name)
    assert not [group for group in symmetry.groups if group.part == "heads"]
    with pytest.raises(fedrot.SymmetryError, match=r"heads.* order, .* slope per head"):
        fedrot.random_equivalent(state_of(name), symmetry, 3, fedrot.WHOLE_MODEL)


@pytest.mark.parametrize("name", FIXED)
def test_streams_with_fixed_positions_stay_and_say_so(name: str) -> None:
    with pytest.raises(fedrot.SymmetryError, match=r"'residual' cannot be moved: .* positions"):
        fedrot.random_equivalent(state_of(name), symmetry_for(name), 3, fedrot.WHOLE_MODEL)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "parts", [fedrot.AlignmentOptions().parts, ("heads", *fedrot.AlignmentOptions().parts), FULL]
)
def test_hidden_coordinates_inside_the_layers_are_recovered(name: str, parts: tuple[str, ...]) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    parts = _parts(symmetry, parts)
    moved = fedrot.random_equivalent(state, symmetry, 4, parts)
    alignment = fedrot.align(moved, state, symmetry, fedrot.AlignmentOptions(parts=parts))
    assert largest_difference(alignment.apply(moved), state) <= 1e-8
    assert largest_difference(alignment.inverse().apply(alignment.apply(moved)), moved) <= 1e-8


@pytest.mark.parametrize("name", KINDS)
def test_hidden_coordinates_of_the_whole_model_are_recovered(name: str) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    parts = _parts(symmetry, fedrot.WHOLE_MODEL)
    moved = fedrot.random_equivalent(state, symmetry, 5, parts)
    alignment = fedrot.align(
        moved, state, symmetry, fedrot.AlignmentOptions(parts=parts, canonical=False)
    )
    assert largest_difference(alignment.apply(moved), state) <= 1e-8


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scale", [0.02, 0.5, None])
def test_distance_never_grows_and_is_reported_as_it_is(name: str, scale: float | None) -> None:
    anchor, symmetry = state_of(name), symmetry_for(name)
    update = state_of(name, 1) if scale is None else near(anchor, scale)
    whole = _parts(symmetry, fedrot.WHOLE_MODEL)
    before = squared_distance(update, anchor)
    for parts in (("attention", "ffn"), _parts(symmetry, FULL), whole):
        alignment = fedrot.align(update, anchor, symmetry, replace(EAGER, parts=parts, canonical=False))
        after = squared_distance(alignment.apply(update), anchor)
        assert after <= before * (1 + 1e-12)
        report = alignment.report
        assert report.before - report.after == pytest.approx(before - after, abs=1e-9 * before)


@pytest.mark.parametrize("name", KINDS)
def test_the_function_of_an_aligned_model_is_the_update_s(name: str) -> None:
    anchor, update, symmetry = state_of(name), state_of(name, 1), symmetry_for(name)
    parts = _parts(symmetry)
    alignment = fedrot.align(update, anchor, symmetry, replace(EAGER, parts=parts))
    aligned = outputs(name, alignment.apply(update))
    expected = outputs(name, update)
    assert (aligned - expected).abs().max() <= 1e-9 * expected.abs().max()


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize("name", [name for name in KINDS if not MEMBERS[name].bare])
def test_activations_recover_whole_models(name: str, weight: float) -> None:
    """Beside the weights and alone; what does not show in activations is left to the weights."""
    state, symmetry = state_of(name), symmetry_for(name)
    parts = _parts(symmetry, fedrot.WHOLE_MODEL)
    moved = fedrot.random_equivalent(state, symmetry, 6, parts)
    anchor, client = model_of(name, state), model_of(name, moved)
    activations = fedrot.collect_activations(anchor, client, [inputs(name, rows=128)], symmetry)
    options = fedrot.AlignmentOptions(parts=parts, activation_weight=weight, canonical=False)
    alignment = fedrot.align(moved, state, symmetry, options, activations)
    assert largest_difference(alignment.apply(moved), state) <= 1e-4  # moments are float32
    matched = {group.name for group in symmetry.groups if group.name in activations.matrices}
    asked = ("residual", "attention", "ffn")
    # Experts are no modules of their own, in which hooks could see them.
    hidden = (ExpertPermutation, ExpertNeurons)
    seen = [g for g in symmetry.groups if g.part in asked and not isinstance(g.kind, hidden)]
    assert matched >= {group.name for group in seen}


@pytest.mark.parametrize(("share", "accepted"), [(0.5e-12, False), (2e-12, True)])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_turn_inside_heads_must_gain_more_than_rounding(
    name: str, share: float, accepted: bool
) -> None:
    """All heads turn by one angle ``t``, which takes ``2 - 2 cos t`` of the trace: about its square."""
    anchor, symmetry = state_of(name), symmetry_for(name)
    turn = share**0.5
    moves = []
    for group in symmetry.select(("attention",)):
        kind = group.kind
        assert isinstance(kind, HeadRotation | RotaryPhases)
        if isinstance(kind, RotaryPhases):
            moves.append(Move(group, torch.full((kind.heads, kind.dim // 2), turn).double()))
        else:
            plane = torch.tensor([[0.0, -turn], [turn, 0.0]], dtype=torch.float64)
            element = torch.matrix_exp(torch.kron(torch.eye(kind.dim // 2), plane))
            moves.append(Move(group, element.expand(kind.heads, -1, -1)))
    update = apply_moves(anchor, moves)
    alignment = fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=("attention",)))
    moved = {move.group.name for move in alignment.moves}
    assert moved == ({move.group.name for move in moves} if accepted else set())
    assert len(moves) == 4


#: The layers of models of two stacks, those of the second after those of the first.
STACKS = {
    "t5": ("encoder.block.{}.", "decoder.block.{}."),
    "bart": ("model.encoder.layers.{}.", "model.decoder.layers.{}."),
    "clip": ("text_model.encoder.layers.{}.", "vision_model.encoder.layers.{}."),
    "albert-groups": tuple(f"encoder.albert_layer_groups.{i}.albert_layers.{{}}." for i in range(2)),
}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", (0, 1, 2, 3)), ("first:2", (0, 1)), ("first:3", (0, 1, 2)), ("last:1", (3,)), ([2], (2,))],
)
@pytest.mark.parametrize("name", STACKS)
def test_layers_of_a_second_stack_follow_those_of_the_first(
    name: str, layers: str | list[int], expected: tuple[int, ...]
) -> None:
    """In what is moved, and in the rows of the report."""
    anchor, update, symmetry = state_of(name), state_of(name, 1), symmetry_for(name)
    alignment = fedrot.align(update, anchor, symmetry, replace(EAGER, layers=layers))
    aligned = alignment.apply(update)
    changed = {key for key in update if not torch.equal(aligned[key], update[key])}
    prefix = "albert." if name == "albert-groups" else ""
    places = [prefix + stack.format(layer) for stack in STACKS[name] for layer in range(2)]
    moved = {i for key in changed for i, place in enumerate(places) if key.startswith(place)}
    assert moved == {*expected}
    assert all(key.startswith(tuple(places)) for key in changed)
    rows = alignment.report.rows()
    assert {row["layer"] for row in rows} == {*expected}
    groups = [place.removeprefix("model.").removeprefix("albert.") for place in places]
    assert all(row["group"].startswith(groups[row["layer"]]) for row in rows)


def test_phases_beat_random_phases_and_reflections_are_no_option() -> None:
    """The closed form is the best element of the group, and stays inside it."""
    anchor, update, symmetry = state_of("llama"), state_of("llama", 1), symmetry_for("llama")
    group = next(g for g in symmetry.select(("attention",)) if g.name.endswith("qk"))
    options = fedrot.AlignmentOptions(parts=("attention",), layers=(group.layer,), chance=0)
    alignment = fedrot.align(update, anchor, symmetry, options)
    aligned = alignment.apply(update)
    names = {slot.tensor for slot in group.slots}

    def distance(tensors: dict[str, torch.Tensor]) -> float:
        return squared_distance({n: tensors[n] for n in names}, anchor)

    best = distance(aligned)
    generator = torch.Generator().manual_seed(0)
    for size in [10.0] * 50 + [1e-3] * 50:
        element = size * (torch.rand(group.kind.heads, group.kind.dim // 2, generator=generator) - 0.5)
        other = apply_moves(aligned, [Move(group, element.double())])
        assert distance(other) >= best
