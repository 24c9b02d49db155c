"""Rotations of the residual stream: who has them, and what they leave as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.symmetry import FAMILIES
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.describe.family import ROTATED
from fedrot.symmetry.groups import Group
from fedrot.symmetry.moves import Move, apply_moves
from fedrot.symmetry.stream import StreamRotation, centred_basis
from tests.families import MEMBERS, inputs, model_of, outputs, state_of, symmetry_for
from tests.fedrot.oracles import seeded
from tests.models import State, largest_difference, with_separate_tables

#: Members with RMSNorm, and with LayerNorm, whose streams can be rotated.
RMS = ["t5", "t5-gated", "t5-classifier", "mt5", "llama", "llama-biased", "llama-factor", "mistral"]
RMS += ["qwen2", "qwen3", "mixtral", "phi3", "phi3-partial"]
LAYERNORM = ["vit", "vit-plain", "deit", "clip", "clip-text", "gpt2", "gpt2-classifier", "gpt-neox"]
LAYERNORM += ["gpt-neox-odd", "gpt-neox-tokens", "gptj", "gptj-whole", "falcon-7b", "falcon-11b"]
LAYERNORM += ["falcon-40b", "falcon-rw", "opt"]
TURNING = RMS + LAYERNORM

#: Why a stream cannot be rotated, by member; no stream of other members is moved at all.
REASONS = {
    "bert": "acts on the stream itself",
    "bart": "acts on the stream itself",
    "modernbert": "acts on the stream itself",
    "bloom": "acts on the stream itself",
    "gemma3": "or on the output of a block",
    "clip-image": "acts on the stream itself",
    "opt-open": "without a norm",
    "deberta-embedding": "no norm|acts on the stream itself",
}


#: Members whose streams move otherwise than most of their family's: variants, and models without a head.
VARIANTS = {"clip-classifier", "opt-open", "opt-projected", "gemma3", "t5-encoder", "clip-text-bare"}


def canonical(name: str, seed: int = 0) -> State:
    return fedrot.canonical(state_of(name, seed), symmetry_for(name))


def every_part(name: str) -> tuple[str, ...]:
    """Return the parts of the whole model that a member may move."""
    return tuple(part for part in fedrot.WHOLE_MODEL if part not in symmetry_for(name).refused)


def stream(name: str) -> Group:
    """Return the group of a member that rotates its stream."""
    groups = symmetry_for(name).rotated.groups
    return next(group for group in groups if isinstance(group.kind, StreamRotation))


def change(name: str, tensors: State) -> float:
    """Return the largest change of an output, relative to the largest output."""
    before = outputs(name, state_of(name))
    return float((outputs(name, tensors) - before).abs().max() / before.abs().max())


def test_the_streams_that_can_be_rotated_are_those_of_pre_norm_models() -> None:
    assert {name for name in MEMBERS if symmetry_for(name).folds} == set(TURNING)
    for name in TURNING:
        assert isinstance(stream(name).kind, StreamRotation)
        assert stream(name).kind == StreamRotation(1, stream(name).kind.dim, name in LAYERNORM)


@pytest.mark.parametrize("name", REASONS)
def test_others_say_why_not(name: str) -> None:
    symmetry = symmetry_for(name)
    assert symmetry.unfolded
    with pytest.raises(fedrot.SymmetryError, match=REASONS[name]):
        _ = symmetry.rotated
    options = fedrot.AlignmentOptions(parts=("residual",), canonical=True)
    with pytest.raises(fedrot.SymmetryError, match="cannot be rotated"):
        fedrot.align(state_of(name, 1), state_of(name), symmetry, options)


# Folding


@pytest.mark.parametrize("name", TURNING)
def test_folded_norms_have_no_gain_and_the_function_stays(name: str) -> None:
    symmetry, state = symmetry_for(name), state_of(name)
    found = fedrot.canonical(state, symmetry)
    assert change(name, found) <= 1e-10
    for fold in symmetry.folds:
        assert not bool((state[fold.gain] == 1).any())
        assert bool((found[fold.gain] == 1).all())
        if fold.bias and fold.holds_bias:
            assert not bool(found[fold.bias].any())
    for tensor, axis in symmetry.centred:
        assert float(found[tensor].mean(axis).abs().max()) <= 1e-15
    assert bool(symmetry.centred) == (name in LAYERNORM)


@pytest.mark.parametrize("name", TURNING)
def test_every_weight_that_reads_a_norm_is_needed(name: str) -> None:
    """A reader that does not take up its norm's gain changes the outputs."""
    symmetry = symmetry_for(name)
    seen = 0
    for fold in symmetry.folds:
        for reader in fold.readers:
            less = replace(fold, readers=tuple(r for r in fold.readers if r != reader))
            folds = tuple(less if f == fold else f for f in symmetry.folds)
            found = fedrot.canonical(state_of(name), replace(symmetry, folds=folds, centred=()))
            seen += change(name, found) > 1e-4
    assert seen == sum(len(fold.readers) for fold in symmetry.folds)


def test_a_norm_without_gain_but_with_bias_cannot_be_folded_where_a_reader_has_none() -> None:
    symmetry, state = symmetry_for("gptj"), state_of("gptj")
    fold = next(fold for fold in symmetry.folds if fold.bias and not fold.holds_bias)
    state[fold.gain][3] = 0
    with pytest.raises(fedrot.UpdateError, match="canonical=False"):
        fedrot.canonical(state, symmetry)
    state[fold.bias][3] = 0
    expected = outputs("gptj", state)
    found = outputs("gptj", fedrot.canonical(state, symmetry))
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_tables_that_also_read_a_norm_become_separate() -> None:
    symmetry = fedrot.symmetry_of(
        {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_inner": 6}, _tied_gpt2()
    )
    assert symmetry.tied == symmetry.untied == (("lm_head.weight", "transformer.wte.weight"),)
    assert symmetry.rotated.tied == ()
    found = fedrot.canonical(_tied_gpt2(), symmetry)
    assert found["lm_head.weight"].data_ptr() != found["transformer.wte.weight"].data_ptr()


def _tied_gpt2() -> State:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=12, n_layer=1, n_head=2, n_embd=8, n_inner=6, n_positions=4)
    state: State = GPT2LMHeadModel(config).state_dict()
    return {name: state[name] for name in sorted(state)}


# The group


@pytest.mark.parametrize("name", TURNING)
def test_rotations_of_the_stream_preserve_the_function(name: str) -> None:
    symmetry, folded = symmetry_for(name), canonical(name)
    turned = fedrot.random_equivalent(folded, symmetry.rotated, 3, ("residual",))
    assert largest_difference(turned, folded) > 0.1
    assert change(name, turned) <= 1e-10
    every = fedrot.random_equivalent(folded, symmetry.rotated, 4, every_part(name))
    assert change(name, every) <= 1e-10


@pytest.mark.parametrize("name", TURNING)
def test_a_rotation_that_leaves_out_one_tensor_changes_the_outputs(name: str) -> None:
    group, folded = stream(name), canonical(name)
    element = group.kind.random(seeded(1))
    zero = {slot for slot in group.slots if not bool(folded[slot.tensor].any())}
    shared = {"shared.weight", "transformer.shared.weight"}
    for slot in set(group.slots) - zero:
        if slot.tensor in shared or "embed_tokens" in slot.tensor:
            continue  # one table under several names, of which the model reads one
        kept = replace(group, slots=tuple(s for s in group.slots if s != slot))
        assert change(name, apply_moves(folded, [Move(kept, element)])) > 1e-4, slot.tensor


@pytest.mark.parametrize("name", TURNING)
def test_models_with_gains_are_never_rotated(name: str) -> None:
    symmetry, state = symmetry_for(name), state_of(name)
    with pytest.raises(fedrot.UpdateError, match="Fold the gains first"):
        fedrot.random_equivalent(state, symmetry.rotated, 1, ("residual",))
    # It would change the function.
    group = stream(name)
    assert change(name, apply_moves(state, [Move(group, group.kind.random(seeded(1)))])) > 1e-4


@pytest.mark.parametrize("name", LAYERNORM)
def test_norms_of_gain_one_may_keep_their_biases_and_writers_their_means(name: str) -> None:
    """Models as they are initialised have no gains to fold; training gives them biases first."""
    symmetry, state = symmetry_for(name), state_of(name)
    for fold in symmetry.folds:
        state[fold.gain] = torch.ones_like(state[fold.gain])
    expected = outputs(name, state)
    turned = fedrot.random_equivalent(state, symmetry.rotated, 3, ("residual",))
    assert (outputs(name, turned) - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("name", LAYERNORM)
def test_under_layernorm_the_vector_of_ones_has_to_stay(name: str) -> None:
    group, folded = stream(name), canonical(name)
    free = StreamRotation(1, group.kind.dim)
    moved = apply_moves(folded, [Move(replace(group, kind=free), free.random(seeded(2)))])
    assert change(name, moved) > 1e-4


@pytest.mark.parametrize("centred", [False, True])
def test_the_action_is_a_group(centred: bool) -> None:
    kind, rng = StreamRotation(1, 6, centred), seeded(0)
    first, second = kind.random(rng), kind.random(rng)
    x = torch.randn(5, 6, generator=rng, dtype=torch.float64)
    both = kind.act(second, kind.act(first, x, 1), 1)
    assert torch.allclose(kind.act(kind.compose(second, first), x, 1), both)
    assert torch.allclose(kind.act(kind.inverse(first), kind.act(first, x, 1), 1), x)
    assert kind.contains(first)
    assert not kind.contains(1.01 * first)
    assert not kind.contains(first[0])
    assert kind.contains(StreamRotation(1, 6).random(rng)) != centred
    assert torch.det(first[0]).abs() == pytest.approx(1)


@pytest.mark.parametrize("centred", [False, True])
def test_free_dimensions_are_those_of_the_tangent_space(centred: bool) -> None:
    kind = StreamRotation(1, 6, centred)
    basis = centred_basis(6) if centred else torch.eye(6, dtype=torch.float64)
    n = basis.shape[1]
    tangents = []
    for i in range(n):
        for j in range(i):
            skew = torch.zeros(n, n, dtype=torch.float64)
            skew[i, j], skew[j, i] = 1, -1
            tangent = basis @ skew @ basis.mT
            assert kind.contains(torch.matrix_exp(tangent)[None])
            tangents.append(tangent.flatten())
    assert torch.linalg.matrix_rank(torch.stack(tangents)) == kind.free


@pytest.mark.parametrize("centred", [False, True])
def test_random_elements_are_spread_over_the_group(centred: bool) -> None:
    """The mean of many is what every element of the group keeps."""
    kind, rng = StreamRotation(1, 5, centred), seeded(4)
    mean = torch.stack([kind.random(rng)[0] for _ in range(2000)]).mean(0)
    kept = torch.full((5, 5), 0.2 if centred else 0.0, dtype=torch.float64)
    assert (mean - kept).abs().max() < 0.06


# Statistics


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gram_matrices_of_what_reads_the_stream_turn_and_fisher_is_refused(
    name: str,
) -> None:
    symmetry, anchor = symmetry_for(name), canonical(name)
    update = fedrot.random_equivalent(anchor, symmetry.rotated, 5, ("residual",))
    options = fedrot.AlignmentOptions(parts=("residual",), canonical=True)
    # The models are canonical already, so that statistics can follow.
    alignment = replace(fedrot.align(update, anchor, symmetry, options), canonical=False)
    reader = symmetry.folds[0].readers[0]
    kind = "gram" if reader.axis == 1 else "gram_conv1d"
    inputs = torch.randn(7, anchor[reader.weight].shape[reader.axis], dtype=torch.float64)
    (move,) = alignment.moves
    turned = move.group.kind.act(move.element, inputs, 1)
    found = alignment.transport({kind: {reader.weight: inputs.mT @ inputs}})[kind][reader.weight]
    assert torch.allclose(found, turned.mT @ turned)
    with pytest.raises(fedrot.FedrotError, match="The rotation 'residual' cannot be applied"):
        alignment.transport({"fisher": {reader.weight: anchor[reader.weight].square()}})


# Matching


@pytest.mark.parametrize("name", TURNING)
def test_a_rotated_model_meets_its_anchor(name: str) -> None:
    symmetry, anchor = symmetry_for(name), state_of(name)
    folded = fedrot.canonical(anchor, symmetry)
    update = fedrot.random_equivalent(folded, symmetry.rotated, 6, every_part(name))
    options = fedrot.AlignmentOptions(parts=every_part(name), canonical=True)
    alignment = fedrot.align(update, anchor, symmetry, options)
    assert largest_difference(alignment.apply(update), folded) <= 1e-8
    assert alignment.report.after <= 1e-12 * alignment.report.before
    assert change(name, alignment.apply(update)) <= 1e-9
    back = alignment.inverse().apply(alignment.apply(update))
    assert largest_difference(back, update) <= 1e-8


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_an_update_keeps_its_function_and_comes_nearer(name: str) -> None:
    symmetry, anchor, update = symmetry_for(name), state_of(name), state_of(name, 1)
    options = fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL, canonical=True)
    alignment = fedrot.align(update, anchor, symmetry, options)
    expected, found = outputs(name, update), outputs(name, alignment.apply(update))
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
    kept = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL, canonical=False)
    permuted = fedrot.align(update, anchor, symmetry, kept)
    share = [a.report.after / a.report.before for a in (alignment, permuted)]
    assert share[0] < share[1] < 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_rotation_is_the_best_one(name: str) -> None:
    """Against scipy's solution of the same problem, in a basis of what the rotation moves."""
    from scipy.linalg import orthogonal_procrustes

    symmetry = symmetry_for(name)
    anchor, update = canonical(name), canonical(name, 1)
    options = fedrot.AlignmentOptions(parts=("residual",), canonical=True)
    (move,) = fedrot.align(update, anchor, symmetry, options).moves
    group = stream(name)
    dim = group.kind.dim
    basis = centred_basis(dim) if group.kind.centred else torch.eye(dim, dtype=torch.float64)

    def rows(tensors: State) -> Tensor:
        slots = (s.rows(tensors[s.tensor], torch.float64) for s in group.slots)
        return torch.cat([block.mT for block in slots]) @ basis

    best, _ = orthogonal_procrustes(rows(update).numpy(), rows(anchor).numpy())
    found = basis.mT @ move.element[0].mT @ basis
    assert torch.allclose(found, torch.from_numpy(best), atol=1e-8)


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_activations_turn_with_the_stream(name: str) -> None:
    """Seen after a rotation they are the rotated ones: no basis of the client's is preferred."""
    rotated, group = symmetry_for(name).rotated, stream(name)
    anchor, client = model_of(name), model_of(name)
    with_separate_tables(anchor).load_state_dict(canonical(name))
    before = canonical(name, 1)
    move = Move(group, group.kind.random(seeded(3)))
    found = []
    for tensors in (before, apply_moves(before, [move])):
        with_separate_tables(client).load_state_dict(tensors)
        found.append(fedrot.collect_activations(anchor, client, [inputs(name, 8)], rotated))
    expected = found[0].moved([move]).matrices
    assert (found[0].matrices[group.name] - expected[group.name]).abs().max() > 1e-3
    for key, matrix in found[1].matrices.items():
        assert (matrix - expected[key]).abs().max() <= 1e-5


def test_a_head_rotation_is_no_rotation_of_the_stream() -> None:
    assert StreamRotation(1, 4) != HeadRotation(1, 4)


@pytest.mark.parametrize("name", sorted({*MEMBERS} - VARIANTS))
def test_a_family_says_how_its_stream_moves(name: str) -> None:
    symmetry = symmetry_for(name)
    said = next(family.stream for family in FAMILIES if family.name == symmetry.family)
    assert bool(symmetry.folds) == (ROTATED in said)
    assert bool(symmetry.unfolded) <= ("permuted" in said)


@pytest.mark.parametrize("name", ["opt-open", "opt-projected", "gemma3"])
def test_a_family_says_which_of_its_variants_are_permuted(name: str) -> None:
    symmetry = symmetry_for(name)
    said = next(family.stream for family in FAMILIES if family.name == symmetry.family)
    assert not symmetry.folds
    assert "permuted in" in said
