"""Rotations of the residual stream: who has them, and what they leave as it was."""

from dataclasses import replace

import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from fedrot import (
    AlignmentOptions,
    SymmetryError,
    UpdateError,
    align,
    canonical,
    collect_activations,
    random_equivalent,
    symmetry_of,
)
from fedrot.symmetry import FAMILIES
from fedrot.symmetry.describe.family import ROTATED
from fedrot.symmetry.groups import Move, apply_moves
from fedrot.symmetry.stream import StreamRotation, centred_basis
from tests.families import MEMBERS, inputs, model_of, outputs, state_of, symmetry_for
from tests.fedrot.oracles import eye, gap, seeded
from tests.fedrot.pairs import recovered
from tests.fedrot.symmetry.traits import TURNING, TURNING_LAYERNORM
from tests.models import largest_difference, movable, with_separate_tables

#: One member of each kind of structure.
TRIED = (
    "llama",
    "t5-gated",
    "mixtral",
    "vit",
    "clip",
    "gpt2",
    "gpt-neox",
    "gptj",
    "falcon-40b",
    "opt",
)

#: Why a stream cannot be rotated, by member; no stream of other members is moved at
#: all.
REASONS = {
    **dict.fromkeys(
        ("bert", "bart", "modernbert", "bloom"), "acts on the stream itself"
    ),
    "gemma3": "or on the output of a block",
    "clip-image": "acts on the stream itself",
    "opt-open": "without a norm",
    "deberta-embedding": "no norm|acts on the stream itself",
}

#: Members whose streams move otherwise than most of their family's: variants, and
#: models without a head.
VARIANTS = {
    "clip-classifier",
    "opt-open",
    "opt-projected",
    "gemma3",
    "t5-encoder",
    "clip-text-bare",
}


def in_form(name, seed=0):
    return canonical(state_of(name, seed), symmetry_for(name))


def stream(name):
    """Return the group of a member that rotates its stream."""
    groups = symmetry_for(name).rotated.groups
    return next(group for group in groups if isinstance(group.action, StreamRotation))


def change(name, tensors, before=None):
    """Return the largest change of an output, relative to the largest output."""
    expected = outputs(name, before or state_of(name))
    return float(gap(outputs(name, tensors), expected) / expected.abs().max())


@pytest.mark.parametrize("name", MEMBERS)
def test_streams_move_as_families_say_and_others_say_why_not(name):
    symmetry = symmetry_for(name)
    if name not in VARIANTS:
        (said,) = (f.stream for f in FAMILIES if f.name == symmetry.family)
        assert bool(symmetry.folds) == (ROTATED in said)
        assert bool(symmetry.unfolded) <= ("permuted" in said)
    if name in REASONS:
        assert symmetry.unfolded
        with pytest.raises(SymmetryError, match=REASONS[name]):
            _ = symmetry.rotated
        options = AlignmentOptions(parts=("residual",), canonical=True)
        with pytest.raises(SymmetryError, match="cannot be rotated"):
            align(state_of(name, 1), state_of(name), symmetry, options)


@pytest.mark.parametrize("name", TURNING)
def test_rotations_of_the_stream_preserve_the_function_of_folded_models(
    name,
):
    symmetry, folded, group = symmetry_for(name), in_form(name), stream(name)
    rotated = symmetry.rotated
    free = StreamRotation(1, group.action.dim)
    layernorm = name in TURNING_LAYERNORM
    assert group.action == replace(free, centred=layernorm)
    assert rotated.rotated is rotated
    for parts in (("residual",), movable(symmetry)):
        turned = random_equivalent(folded, rotated, 3, parts)
        assert largest_difference(turned, folded) > 0.1
        assert change(name, turned) <= 1e-10
    # With gains it would change the function, and is refused.
    state = state_of(name)
    move = Move(group, group.action.random(seeded(1)))
    with pytest.raises(UpdateError, match="Fold the gains first"):
        random_equivalent(state, rotated, 1, ("residual",))
    assert change(name, apply_moves(state, [move])) > 1e-4
    if not layernorm:
        return
    # Models as they are initialised have no gains to fold; training gives them biases
    # first.
    for fold in symmetry.folds:
        state[fold.gain] = torch.ones_like(state[fold.gain])
    turned = random_equivalent(state, rotated, 3, ("residual",))
    assert change(name, turned, state) <= 1e-10
    away = Move(replace(group, action=free), free.random(seeded(2)))
    moved = change(name, apply_moves(folded, [away]))
    assert moved > 1e-4, "the vector of ones has to stay"


def test_a_norm_with_only_a_bias_cannot_be_folded_where_a_reader_has_none():
    symmetry = symmetry_for("gptj")
    state = state_of("gptj")
    fold = next(fold for fold in symmetry.folds if fold.bias and not fold.holds_bias)
    state[fold.gain][3] = 0
    with pytest.raises(UpdateError, match="canonical=False"):
        canonical(state, symmetry)
    state[fold.bias][3] = 0
    assert change("gptj", canonical(state, symmetry), state) <= 1e-10


def test_tables_that_also_read_a_norm_become_separate():
    tied = ("lm_head.weight", "transformer.wte.weight")
    state = state_of("gpt2")
    state = {name: state[tied[1] if name in tied else name] for name in sorted(state)}
    symmetry = symmetry_of(model_of("gpt2").config.to_dict(), state)
    assert symmetry.tied == symmetry.untied == (tied,)
    assert not symmetry.can_rotate
    assert symmetry.rotated.tied == ()
    found = canonical(state, symmetry)
    head, table = (found[name].data_ptr() for name in tied)
    assert head != table


# Matching


@pytest.mark.parametrize("name", TRIED)
def test_a_rotated_model_meets_its_anchor(name):
    symmetry = symmetry_for(name)
    parts = movable(symmetry)
    folded = in_form(name)
    update = random_equivalent(folded, symmetry.rotated, 6, parts)
    options = AlignmentOptions(parts=parts, canonical=True)
    recovered(update, state_of(name), symmetry, options, folded)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_rotation_is_the_best_one(name):
    """Against scipy's solution of the same problem, in a basis of what the rotation
    moves.
    """
    group = stream(name)
    anchor = in_form(name)
    update = in_form(name, 1)
    options = AlignmentOptions(parts=("residual",), canonical=True)
    (move,) = align(update, anchor, symmetry_for(name), options).moves
    dim = group.action.dim
    basis = centred_basis(dim) if group.action.centred else eye(dim)

    def rows(tensors):
        slots = (s.rows(tensors[s.tensor], torch.float64) for s in group.slots)
        return torch.cat([block.mT for block in slots]) @ basis

    best, _ = orthogonal_procrustes(rows(update).numpy(), rows(anchor).numpy())
    assert gap(basis.mT @ move.element[0].mT @ basis, torch.from_numpy(best)) <= 1e-8


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_activations_turn_with_the_stream(name):
    """Seen after a rotation they are the rotated ones: no basis of the client's is
    preferred.
    """
    group = stream(name)
    anchor, client = (with_separate_tables(model_of(name)) for _ in range(2))
    anchor.load_state_dict(in_form(name))
    before = in_form(name, 1)
    move = Move(group, group.action.random(seeded(3)))
    found = []
    for tensors in (before, apply_moves(before, [move])):
        client.load_state_dict(tensors)
        seen = collect_activations(
            anchor, client, [inputs(name, 8)], symmetry_for(name).rotated
        )
        found.append(seen)
    expected = found[0].moved([move]).matrices
    assert gap(found[0].matrices[group.name], expected[group.name]) > 1e-3
    assert largest_difference(found[1].matrices, expected) <= 1e-5
