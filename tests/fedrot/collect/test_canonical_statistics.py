"""Statistics that follow a model to canonical form, against those of the canonical model itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.aggregation import RegMean
from fedrot.collect.canonical_statistics import canonical_statistics
from fedrot.collect.statistics import GRAMS, MEANS
from fedrot.errors import UpdateError
from fedrot.precision import Float64
from fedrot.symmetry.moves import Move, apply_moves
from tests.families import KINDS, inputs, model_of, outputs, state_of, symmetry_for
from tests.fedrot.oracles import seeded
from tests.fedrot.pairs import with_other_gains
from tests.models import EVERYTHING, State, largest_difference, near, with_separate_tables

Statistics = dict[str, dict[str, Tensor]]

#: LayerNorm and Conv1D, RMSNorm and grouped queries (with biases and without), images, two stacks.
ROTATED = ("gpt2-classifier", "gpt2", "llama", "llama-biased", "vit", "t5", "t5-gated")


def collected(name: str, state: State, rows: int = 3) -> Statistics:
    """Return Gram matrices and means in float64; tables that canonical form separates are separate."""
    model: Any = with_separate_tables(model_of(name))
    model.load_state_dict(state)
    with Float64():
        return fedrot.collect_gram(model, [inputs(name, rows)])


def same(found: Statistics, expected: Statistics, tolerance: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for kind, by_name in expected.items():
        assert found[kind].keys() == by_name.keys()
        for key, value in by_name.items():
            assert found[kind][key].dtype == value.dtype
            assert found[kind][key].shape == value.shape
            difference = (found[kind][key] - value).abs().max()
            assert difference <= tolerance * max(value.abs().max(), 1), (kind, key)


def far(one: Statistics, other: Statistics) -> set[str]:
    """Return the weights whose statistics of either kind differ visibly."""
    return {
        key
        for kind, by_name in one.items()
        for key, value in by_name.items()
        if (value - other[kind][key]).abs().max() > 1e-3 * value.abs().max()
    }


def rotating(name: str) -> fedrot.Symmetry:
    symmetry = symmetry_for(name)
    return symmetry.rotated if symmetry.folds else symmetry


def random_moves(name: str, seed: int = 1, parts: tuple[str, ...] = EVERYTHING) -> tuple[Move, ...]:
    """Return a random element of every group of the canonical model."""
    symmetry, rng = rotating(name), seeded(seed)
    groups = symmetry.select(tuple(part for part in parts if part not in symmetry.refused))
    return tuple(Move(group, group.kind.random(rng)) for group in groups)


def canonical_alignment(name: str, moves: tuple[Move, ...]) -> fedrot.Alignment:
    return fedrot.Alignment(rotating(name), moves, fedrot.AlignmentReport((), 0, 0, 0), canonical=True)


# Against the canonical model


@pytest.mark.parametrize("name", KINDS)
def test_statistics_are_those_of_the_canonical_model(name: str) -> None:
    symmetry, state = symmetry_for(name), state_of(name)
    before = collected(name, state)
    expected = collected(name, fedrot.canonical(state, symmetry))
    found = canonical_statistics(before, state, symmetry)
    same(found, expected)
    reading = {reader.weight for fold in symmetry.folds for reader in fold.readers}
    reading |= {one.read.tensor for one in symmetry.redundant_biases if one.read is not None}
    every = {key for by_name in before.values() for key in by_name}
    assert far(before, expected) == reading & every
    # Key biases and centring change no inputs: all other layers keep their very tensors.
    for kind, by_name in before.items():
        assert all(found[kind][key] is value for key, value in by_name.items() if key not in reading)


@pytest.mark.parametrize("name", KINDS)
def test_an_alignment_moves_statistics_after_it_brought_them_to_canonical_form(name: str) -> None:
    state, alignment = state_of(name), canonical_alignment(name, random_moves(name, 1, EVERYTHING))
    found = alignment.transport(collected(name, state), state)
    same(found, collected(name, alignment.apply(state)))


@pytest.mark.parametrize("name", ROTATED)
def test_layers_that_share_an_input_share_its_statistics_afterwards(name: str) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    before = collected(name, state)
    found = canonical_statistics(before, state, symmetry)
    for by_name in found.values():
        of_kind = next(kind for kind in found if found[kind] is by_name)
        apart = {id(value) for value in by_name.values()}
        assert len(apart) == len({id(value) for value in before[of_kind].values()})
    shared = [fold for fold in symmetry.folds if len(fold.readers) > 1]
    for fold in shared:
        kind = GRAMS[fold.readers[0].axis]
        read = [reader.weight for reader in fold.readers if reader.weight in found[kind]]
        assert len({id(found[kind][key]) for key in read}) == 1
    assert bool(shared) != name.startswith("gpt2")


# Clients in other coordinates


@pytest.mark.parametrize("name", [*ROTATED, "bert"])
def test_a_client_of_the_same_function_brings_the_anchors_statistics(name: str) -> None:
    """Found by matching: random gains, biases and rotation; all that is left is rounding."""
    symmetry, anchor = symmetry_for(name), state_of(name)
    folded = fedrot.canonical(anchor, symmetry)
    still = {*symmetry.refused} | ({"residual"} if not symmetry.folds else set())
    parts = tuple(part for part in fedrot.WHOLE_MODEL if part not in still)
    turned = fedrot.random_equivalent(folded, rotating(name), 5, parts)
    client = with_other_gains(turned, symmetry, 6)
    before, wanted = outputs(name, client), outputs(name, folded)
    assert (before - wanted).abs().max() <= 1e-9 * wanted.abs().max()
    alignment = fedrot.align(client, anchor, symmetry, fedrot.AlignmentOptions(parts, canonical=True))
    statistics = collected(name, client)
    moved = alignment.transport(statistics, client)
    expected = collected(name, folded)
    same(moved, expected, 1e-7)
    assert far(statistics, expected) >= {r.weight for f in symmetry.folds for r in f.readers} & {
        key for by_name in expected.values() for key in by_name
    }
    # RegMean of the two has the function that both have.
    regmean = RegMean(0.9)
    regmean.add(folded, 1.0, expected)
    regmean.add(alignment.apply(client), 2.0, moved)
    found = outputs(name, regmean.result())
    assert (found - wanted).abs().max() <= 1e-7 * wanted.abs().max()


@pytest.mark.parametrize("name", [*ROTATED, "bert"])
def test_regmean_of_clients_with_other_gains_is_that_of_the_canonical_clients(name: str) -> None:
    symmetry, base = symmetry_for(name), state_of(name)
    moves = random_moves(name, 2, ("residual", "heads", "ffn"))
    alignment, turned = canonical_alignment(name, ()), canonical_alignment(name, moves)
    direct, followed, rotated, raw = (RegMean(alpha) for alpha in (1.0, 1.0, 1.0, 1.0))
    for seed in range(3):
        client = with_other_gains(near(base, 0.05, seed + 1), symmetry, seed)
        weight, rows = 1.0 + seed, 6 + 2 * seed
        folded, statistics = fedrot.canonical(client, symmetry), collected(name, client, rows=rows)
        direct.add(folded, weight, collected(name, folded, rows=rows))
        followed.add(alignment.apply(client), weight, alignment.transport(statistics, client))
        rotated.add(turned.apply(client), weight, turned.transport(statistics, client))
        raw.add(folded, weight, statistics)
    expected = direct.result()
    assert largest_difference(followed.result(), expected) <= 1e-6
    # A common rotation of all clients turns the result, and keeps its function.
    assert largest_difference(rotated.result(), apply_moves(expected, moves)) <= 1e-6
    assert largest_difference(raw.result(), expected) > 1e-4


# What cannot follow


def test_the_updates_tensors_are_needed() -> None:
    name = "llama"
    alignment = canonical_alignment(name, ())
    with pytest.raises(fedrot.FedrotError, match=r"transport\(statistics, update\)"):
        alignment.transport(collected(name, state_of(name)))
    masks = {"trained": {"lm_head.weight": torch.tensor(True)}}
    assert alignment.transport(masks) == masks


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_matrix_without_its_mean_is_refused_by_the_name_of_its_layer(name: str) -> None:
    symmetry, state = symmetry_for(name), state_of(name)
    grams = {kind: v for kind, v in collected(name, state).items() if kind in GRAMS.values()}
    with pytest.raises(UpdateError, match=r"Gram matrix of '.*\.weight'.*input_mean"):
        canonical_statistics(grams, state, symmetry)
    folded = fedrot.canonical(state, symmetry)
    # Nothing is taken out of a canonical model's inputs.
    same(canonical_statistics(grams, folded, symmetry), grams)
    found = canonical_statistics({"input_mean": {}}, state, symmetry)
    assert found == {"input_mean": {}}


def test_norms_without_biases_need_no_means() -> None:
    name = "llama"
    symmetry, state = symmetry_for(name), state_of(name)
    both = collected(name, state)
    found = canonical_statistics({"gram": both["gram"]}, state, symmetry)
    same(found, {"gram": canonical_statistics(both, state, symmetry)["gram"]})


def test_a_gain_near_0_is_refused_by_the_name_of_its_layer() -> None:
    name = "llama"
    symmetry, state = symmetry_for(name), state_of(name)
    fold = symmetry.folds[0]
    state[fold.gain][3] = 0.0
    with pytest.raises(UpdateError, match=rf"'{fold.readers[0].weight}'.*unit 3 is 0, too near 0"):
        canonical_statistics(collected(name, state), state, symmetry)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_mean_of_other_rows_is_refused(name: str) -> None:
    symmetry, state = symmetry_for(name), state_of(name)
    statistics = collected(name, state)
    for axis, kind in MEANS.items():
        if kind in statistics:
            means = {key: 50 * value for key, value in statistics[kind].items()}
            both = {GRAMS[axis]: statistics[GRAMS[axis]], kind: means}
            with pytest.raises(
                UpdateError, match=f"The {kind} statistics .* contradict its Gram matrix"
            ):
                RegMean().add(state, 1.0, both)
    read = next(one.read for one in symmetry.redundant_biases if one.read is not None)
    of_layer = {
        kind: {read.tensor: factor * statistics[kind][read.tensor]}
        for kind, factor in ((GRAMS[read.axis], 1), (MEANS[read.axis], 50))
    }
    with pytest.raises(UpdateError, match="contradict"):
        canonical_statistics(of_layer, state, symmetry)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.weight"),
        ("bert", "bert.encoder.layer.0.attention.output.dense.weight"),
    ],
)
def test_a_mean_of_another_layer_is_refused(name: str, weight: str) -> None:
    given = {"input_mean": {weight: torch.ones(7)}}
    with pytest.raises(UpdateError, match=rf"mean of the inputs of '{weight}' has shape \[7\]"):
        canonical_statistics(given, state_of(name), symmetry_for(name))


def test_diagonal_fisher_information_cannot_follow() -> None:
    name = "llama"
    fisher = {"fisher": {key: value.square() for key, value in state_of(name).items()}}
    alignment = canonical_alignment(name, ())
    with pytest.raises(fedrot.FedrotError, match="'fisher' cannot be brought to canonical form"):
        alignment.transport(fisher, state_of(name))


def test_units_of_attention_that_are_constant_become_zero() -> None:
    """Heads whose values are nothing but their bias: rounding leaves no directions that seem used."""
    name = "bert"
    symmetry, state = symmetry_for(name), state_of(name)
    value, read = "bert.encoder.layer.0.attention.self.value", symmetry.redundant_biases[1].read
    assert read is not None
    state[f"{value}.weight"][:8] = 0
    single = {key: tensor.float() for key, tensor in state.items()}
    model = model_of(name, single).float()
    batch = inputs(name, 6)
    before = fedrot.collect_gram(model, [batch])
    key = "bert.encoder.layer.0.attention.output.dense.weight"
    assert (before["gram"][key][:8, :8].diagonal() > 0).all()
    found = canonical_statistics(before, single, symmetry)["gram"][key]
    assert not found[:8].any()
    assert not found[:, :8].any()
    assert (found[8:, 8:].diagonal() > 0).all()


def test_the_inverse_moves_canonical_statistics_back() -> None:
    name = "vit"
    state, symmetry = state_of(name), symmetry_for(name)
    alignment = canonical_alignment(name, random_moves(name))
    there = alignment.transport(collected(name, state), state)
    back = alignment.inverse().transport(there)
    same(back, canonical_statistics(collected(name, state), state, symmetry), 1e-8)
    assert replace(alignment, canonical=False).transport(back).keys() == there.keys()
