"""Rotations of the residual stream: who has them, and what they leave as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from torch import Tensor

import fedrot
from fedrot import (
    WHOLE_MODEL,
    AlignmentOptions,
    SymmetryError,
    UpdateError,
    align,
    collect_activations,
    random_equivalent,
    symmetry_of,
)
from fedrot.symmetry import FAMILIES
from fedrot.symmetry.describe.family import ROTATED
from fedrot.symmetry.groups import Group, Move, apply_moves
from fedrot.symmetry.stream import StreamRotation, centred_basis
from tests.families import MEMBERS, inputs, model_of, outputs, state_of, symmetry_for
from tests.fedrot.oracles import eye, gap, seeded
from tests.fedrot.symmetry.traits import TURNING, TURNING_LAYERNORM
from tests.models import Parts, State, largest_difference, with_separate_tables

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


def canonical(name: str, seed: int = 0) -> State:
    return fedrot.canonical(state_of(name, seed), symmetry_for(name))


def every_part(name: str) -> Parts:
    """Return the parts of the whole model that a member may move."""
    return tuple(part for part in WHOLE_MODEL if part not in symmetry_for(name).refused)


def stream(name: str) -> Group:
    """Return the group of a member that rotates its stream."""
    groups = symmetry_for(name).rotated.groups
    return next(group for group in groups if isinstance(group.action, StreamRotation))


def change(name: str, tensors: State, before: Tensor | None = None) -> float:
    """Return the largest change of an output, relative to the largest output."""
    before = outputs(name, state_of(name)) if before is None else before
    return float(gap(outputs(name, tensors), before) / before.abs().max())


@pytest.mark.parametrize("name", REASONS)
def test_others_say_why_not(name: str) -> None:
    symmetry = symmetry_for(name)
    assert symmetry.unfolded
    with pytest.raises(SymmetryError, match=REASONS[name]):
        _ = symmetry.rotated
    options = AlignmentOptions(parts=("residual",), canonical=True)
    with pytest.raises(SymmetryError, match="cannot be rotated"):
        align(state_of(name, 1), state_of(name), symmetry, options)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_family_says_how_its_stream_moves(name: str) -> None:
    symmetry = symmetry_for(name)
    said = next(family.stream for family in FAMILIES if family.name == symmetry.family)
    if name not in VARIANTS:
        assert bool(symmetry.folds) == (ROTATED in said)
        assert bool(symmetry.unfolded) <= ("permuted" in said)


@pytest.mark.parametrize("name", TURNING)
def test_rotations_of_the_stream_preserve_the_function_of_folded_models(
    name: str,
) -> None:
    symmetry, folded, group = symmetry_for(name), canonical(name), stream(name)
    assert group.action == StreamRotation(
        1, group.action.dim, name in TURNING_LAYERNORM
    )
    assert symmetry.rotated.rotated is symmetry.rotated
    for parts in (("residual",), every_part(name)):
        turned = random_equivalent(folded, symmetry.rotated, 3, parts)
        assert largest_difference(turned, folded) > 0.1
        assert change(name, turned) <= 1e-10
    # With gains it would change the function, and is refused.
    state = state_of(name)
    move = Move(group, group.action.random(seeded(1)))
    with pytest.raises(UpdateError, match="Fold the gains first"):
        random_equivalent(state, symmetry.rotated, 1, ("residual",))
    assert change(name, apply_moves(state, [move])) > 1e-4
    if name not in TURNING_LAYERNORM:
        return
    # Models as they are initialised have no gains to fold; training gives them biases
    # first.
    for fold in symmetry.folds:
        state[fold.gain] = torch.ones_like(state[fold.gain])
    turned = random_equivalent(state, symmetry.rotated, 3, ("residual",))
    assert change(name, turned, outputs(name, state)) <= 1e-10
    free = StreamRotation(1, group.action.dim)
    away = Move(replace(group, action=free), free.random(seeded(2)))
    assert change(name, apply_moves(folded, [away])) > 1e-4, (
        "the vector of ones has to stay"
    )


def test_a_norm_with_only_a_bias_cannot_be_folded_where_a_reader_has_none() -> None:
    symmetry = symmetry_for("gptj")
    state = state_of("gptj")
    fold = next(fold for fold in symmetry.folds if fold.bias and not fold.holds_bias)
    state[fold.gain][3] = 0
    with pytest.raises(UpdateError, match="canonical=False"):
        fedrot.canonical(state, symmetry)
    state[fold.bias][3] = 0
    assert (
        change("gptj", fedrot.canonical(state, symmetry), outputs("gptj", state))
        <= 1e-10
    )


def test_tables_that_also_read_a_norm_become_separate() -> None:
    config = dict(model_of("gpt2").config.to_dict())
    state = {
        name: tensor
        for name, tensor in state_of("gpt2").items()
        if name != "lm_head.weight"
    }
    state |= {"lm_head.weight": state["transformer.wte.weight"]}
    state = {name: state[name] for name in sorted(state)}
    symmetry = symmetry_of(config, state)
    assert (
        symmetry.tied
        == symmetry.untied
        == (("lm_head.weight", "transformer.wte.weight"),)
    )
    assert not symmetry.can_rotate
    assert symmetry.rotated.tied == ()
    found = fedrot.canonical(state, symmetry)
    assert (
        found["lm_head.weight"].data_ptr() != found["transformer.wte.weight"].data_ptr()
    )


# Matching


@pytest.mark.parametrize("name", TRIED)
def test_a_rotated_model_meets_its_anchor(name: str) -> None:
    symmetry = symmetry_for(name)
    anchor = state_of(name)
    folded = fedrot.canonical(anchor, symmetry)
    update = random_equivalent(folded, symmetry.rotated, 6, every_part(name))
    options = AlignmentOptions(parts=every_part(name), canonical=True)
    alignment = align(update, anchor, symmetry, options)
    aligned = alignment.apply(update)
    assert largest_difference(aligned, folded) <= 1e-8
    assert alignment.report.after <= 1e-12 * alignment.report.before
    assert largest_difference(alignment.inverse().apply(aligned), update) <= 1e-8


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_rotation_is_the_best_one(name: str) -> None:
    """Against scipy's solution of the same problem, in a basis of what the rotation
    moves.
    """
    symmetry = symmetry_for(name)
    group = stream(name)
    anchor = canonical(name)
    update = canonical(name, 1)
    options = AlignmentOptions(parts=("residual",), canonical=True)
    (move,) = align(update, anchor, symmetry, options).moves
    dim = group.action.dim
    basis = centred_basis(dim) if group.action.centred else eye(dim)

    def rows(tensors: State) -> Tensor:
        slots = (s.rows(tensors[s.tensor], torch.float64) for s in group.slots)
        return torch.cat([block.mT for block in slots]) @ basis

    best, _ = orthogonal_procrustes(rows(update).numpy(), rows(anchor).numpy())
    found = basis.mT @ move.element[0].mT @ basis
    assert torch.allclose(found, torch.from_numpy(best), atol=1e-8)


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_activations_turn_with_the_stream(name: str) -> None:
    """Seen after a rotation they are the rotated ones: no basis of the client's is
    preferred.
    """
    rotated = symmetry_for(name).rotated
    group = stream(name)
    anchor = model_of(name)
    client = model_of(name)
    with_separate_tables(anchor).load_state_dict(canonical(name))
    before = canonical(name, 1)
    move = Move(group, group.action.random(seeded(3)))
    found = []
    for tensors in (before, apply_moves(before, [move])):
        with_separate_tables(client).load_state_dict(tensors)
        found.append(collect_activations(anchor, client, [inputs(name, 8)], rotated))
    expected = found[0].moved([move]).matrices
    assert gap(found[0].matrices[group.name], expected[group.name]) > 1e-3
    for key, matrix in found[1].matrices.items():
        assert gap(matrix, expected[key]) <= 1e-5
