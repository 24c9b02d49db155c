"""Statistics that follow a model to canonical form, against those of the canonical model itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedrot
from fedrot.aggregation import RegMean, check_statistics
from fedrot.collect.canonical_statistics import canonical_gram, canonical_statistics
from fedrot.collect.gram_sketch import sketched
from fedrot.collect.statistics import GRAMS, MEANS, semidefinite
from fedrot.errors import UpdateError
from fedrot.precision import Float64
from fedrot.symmetry.moves import Move, apply_moves
from tests.families import KINDS, inputs, model_of, outputs, state_of, symmetry_for
from tests.fedrot.oracles import seeded
from tests.fedrot.pairs import with_other_gains
from tests.models import EVERYTHING, State, largest_difference, near, with_separate_tables

Statistics = dict[str, dict[str, Tensor]]


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
            assert (found[kind][key].dtype, found[kind][key].shape) == (value.dtype, value.shape)
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


def canonical_alignment(name: str, moves: tuple[Move, ...] = ()) -> fedrot.Alignment:
    return fedrot.Alignment(rotating(name), moves, fedrot.AlignmentReport((), 0, 0, 0), canonical=True)


# Against the canonical model


@pytest.mark.parametrize("name", [*KINDS, "llama-biased", "gpt2-classifier"])
def test_statistics_are_those_of_the_canonical_model_and_move_with_it(name: str) -> None:
    symmetry, state = symmetry_for(name), state_of(name)
    before = collected(name, state)
    expected = collected(name, fedrot.canonical(state, symmetry))
    found = canonical_statistics(before, state, symmetry)
    same(found, expected)
    reading = {reader.weight for fold in symmetry.folds for reader in fold.readers}
    reading |= {one.read.tensor for one in symmetry.redundant_biases if one.read is not None}
    every = {key for by_name in before.values() for key in by_name}
    assert far(before, expected) == reading & every
    for kind, by_name in before.items():
        # Key biases and centring change no inputs: all other layers keep their very tensors.
        assert all(found[kind][key] is value for key, value in by_name.items() if key not in reading)
        # Layers that share an input share its statistics afterwards.
        for one, value in by_name.items():
            shared = [key for key, other in by_name.items() if other is value]
            assert [key for key in by_name if found[kind][key] is found[kind][one]] == shared
    alignment = canonical_alignment(name, random_moves(name))
    moved = alignment.transport(before, state)
    same(moved, collected(name, alignment.apply(state)))
    same(alignment.inverse().transport(moved), found, 1e-8)


# Clients in other coordinates


@pytest.mark.parametrize("name", ["gpt2-classifier", "llama-biased", "t5-gated", "bert"])
def test_a_client_of_the_same_function_brings_the_anchors_statistics(name: str) -> None:
    """Found by matching: random gains, biases and rotation; all that is left is rounding."""
    symmetry, anchor = symmetry_for(name), state_of(name)
    folded = fedrot.canonical(anchor, symmetry)
    still = {*symmetry.refused} | ({"residual"} if not symmetry.folds else set())
    parts = tuple(part for part in fedrot.WHOLE_MODEL if part not in still)
    turned = fedrot.random_equivalent(folded, rotating(name), 5, parts)
    client = with_other_gains(turned, symmetry, 6)
    wanted = outputs(name, folded)
    alignment = fedrot.align(client, anchor, symmetry, fedrot.AlignmentOptions(parts, canonical=True))
    statistics, expected = collected(name, client), collected(name, folded)
    moved = alignment.transport(statistics, client)
    same(moved, expected, 1e-7)
    assert far(statistics, expected)
    # RegMean of the two has the function that both have.
    regmean = RegMean(0.9)
    regmean.add(folded, 1.0, expected)
    regmean.add(alignment.apply(client), 2.0, moved)
    found = outputs(name, regmean.result())
    assert (found - wanted).abs().max() <= 1e-7 * wanted.abs().max()


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_regmean_of_clients_with_other_gains_is_that_of_the_canonical_clients(name: str) -> None:
    symmetry, base = symmetry_for(name), state_of(name)
    moves = random_moves(name, 2, ("residual", "heads", "ffn"))
    alignment, turned = canonical_alignment(name), canonical_alignment(name, moves)
    direct, followed, rotated, raw = (RegMean(alpha) for alpha in (1.0, 1.0, 1.0, 1.0))
    for seed in range(2):
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
    alignment = canonical_alignment("llama")
    with pytest.raises(fedrot.FedrotError, match=r"transport\(statistics, update\)"):
        alignment.transport(collected("llama", state_of("llama")))
    masks = {"trained": {"lm_head.weight": torch.tensor(True)}}
    assert alignment.transport(masks) == masks


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_matrices_need_the_means_of_their_own_rows(name: str) -> None:
    symmetry, state = symmetry_for(name), state_of(name)
    statistics = collected(name, state)
    grams = {kind: v for kind, v in statistics.items() if kind in GRAMS.values()}
    with pytest.raises(UpdateError, match=r"Gram matrix of '.*\.weight'.*input_mean"):
        canonical_statistics(grams, state, symmetry)
    # Nothing is taken out of a canonical model's inputs.
    same(canonical_statistics(grams, fedrot.canonical(state, symmetry), symmetry), grams)
    read = next(one.read for one in symmetry.redundant_biases if one.read is not None)
    of_layer = {
        kind: {read.tensor: factor * statistics[kind][read.tensor]}
        for kind, factor in ((GRAMS[read.axis], 1), (MEANS[read.axis], 50))
    }
    with pytest.raises(UpdateError, match="contradict"):
        canonical_statistics(of_layer, state, symmetry)


def test_norms_without_biases_need_no_means() -> None:
    symmetry, state = symmetry_for("llama"), state_of("llama")
    both = collected("llama", state)
    found = canonical_statistics({"gram": both["gram"]}, state, symmetry)
    same(found, {"gram": canonical_statistics(both, state, symmetry)["gram"]})


def test_a_gain_near_0_is_refused_by_the_name_of_its_layer() -> None:
    symmetry, state = symmetry_for("llama"), state_of("llama")
    fold = symmetry.folds[0]
    state[fold.gain][3] = 0.0
    with pytest.raises(UpdateError, match=rf"'{fold.readers[0].weight}'.*unit 3 is 0, too near 0"):
        canonical_statistics(collected("llama", state), state, symmetry)


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
    fisher = {"fisher": {key: value.square() for key, value in state_of("llama").items()}}
    with pytest.raises(fedrot.FedrotError, match="'fisher' cannot be brought to canonical form"):
        canonical_alignment("llama").transport(fisher, state_of("llama"))


def test_units_of_attention_that_are_constant_become_zero() -> None:
    """Heads whose values are nothing but their bias: rounding leaves no directions that seem used."""
    symmetry, state = symmetry_for("bert"), state_of("bert")
    state["bert.encoder.layer.0.attention.self.value.weight"][:8] = 0
    single = {key: tensor.float() for key, tensor in state.items()}
    before = fedrot.collect_gram(model_of("bert", single).float(), [inputs("bert", 6)])
    key = "bert.encoder.layer.0.attention.output.dense.weight"
    assert (before["gram"][key][:8, :8].diagonal() > 0).all()
    found = canonical_statistics(before, single, symmetry)["gram"][key]
    assert not found[:8].any()
    assert not found[:, :8].any()
    assert (found[8:, 8:].diagonal() > 0).all()


# One matrix


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 7),
    rows=st.integers(1, 20),
    biased=st.booleans(),
)
def test_folding_is_exact_for_any_rows(seed: int, size: int, rows: int, biased: bool) -> None:
    random = np.random.default_rng(seed)
    z = random.normal(size=(rows, size)) + random.normal()
    gain = np.sign(random.normal(size=size)) * random.uniform(0.01, 3, size=size)
    bias = random.normal(size=size) * biased
    x = gain * z + bias
    tensors = [torch.from_numpy(value) for value in (x.T @ x / rows, x.mean(0), gain, bias)]
    found = canonical_gram(*tensors[: 3 + biased])
    np.testing.assert_allclose(found.numpy(), z.T @ z / rows, rtol=0, atol=1e-8)


def layer() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Gram matrix, mean, gain and bias of a few rows."""
    z = torch.randn(20, 4, generator=seeded(1), dtype=torch.float64)
    gain, bias = torch.tensor([1.0, -0.5, 2.0, 1.0]).double(), torch.tensor([0.5, 0.0, 1, -1]).double()
    x = gain * z + bias
    return x.mT @ x / 20, x.mean(0), gain, bias


@pytest.mark.parametrize(
    ("gain", "dtype", "biased", "refused"),
    [
        (0.0, torch.float64, True, True),
        (0.0, torch.float64, False, True),
        (1e-7, torch.float64, False, True),
        (1e-5, torch.float64, False, False),
        (1e-3, torch.float32, True, True),
        (1e-1, torch.float32, True, False),
        (0.5, torch.bfloat16, True, True),
        (0.5, torch.bfloat16, False, False),
    ],
)
def test_gains_near_0_are_refused(gain: float, dtype: torch.dtype, biased: bool, refused: bool) -> None:
    gram, mean, gains, bias = layer()
    factor = torch.ones(4).double()
    factor[2] = gain / gains[2]
    # The inputs of a unit without a bias, with another gain.
    gram, mean = (gram * factor[:, None] * factor, mean * factor) if not biased else (gram, mean)
    gains[2] = gain
    given = gram.to(dtype), mean, gains, bias if biased else None
    if refused:
        with pytest.raises(UpdateError, match=rf"gain of unit \d is .*, too near 0 .* in {dtype}"):
            canonical_gram(*given)
    else:
        found = canonical_gram(*given)
        assert found.dtype == dtype
        assert found.isfinite().all()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.ones(4, 3), r"The gram of shape \[4, 3\]"),
        (0, torch.ones(2, 2, 2, 1), r"The gram of shape \[2, 2, 2, 1\]"),
        (0, torch.eye(3), r"The mean of shape \[4\]"),
        (0, torch.tensor(1.0), r"The gram of shape \[\]"),
        (0, torch.full((4, 4), torch.nan), "The gram of shape"),
        (1, torch.full((4,), torch.inf), "The mean of shape"),
        (2, torch.ones(4, 4), "The gain of shape"),
        (3, torch.tensor([0.0, torch.nan, 0, 0]), "The bias of shape"),
        (1, torch.full((4,), 9.0), "The mean and the Gram matrix contradict each other"),
    ],
)
def test_what_belongs_to_no_inputs_is_refused(place: int, value: Tensor, message: str) -> None:
    given = list(layer())
    given[place] = value
    with pytest.raises(UpdateError, match=message):
        canonical_gram(*given)


# Rounded and sketched matrices stay Gram matrices


def with_biases(state: State, size: float) -> State:
    """Return a state whose biases are not near 0, as those of pretrained models, and gains neither."""
    out = dict(state)
    for index, (name, tensor) in enumerate(state.items()):
        if name.endswith("bias"):
            out[name] = size * torch.randn(tensor.shape, generator=seeded(index), dtype=tensor.dtype)
        elif tensor.ndim == 1:
            out[name] = tensor.abs().clamp_min(0.3)
    return out


def sent(statistics: Statistics, rank: int | None) -> Statistics:
    """Return statistics as the server reads them: Gram matrices of low rank, or rounded to bfloat16."""
    grams = GRAMS.values()
    read = {
        id(value): value.bfloat16().float() if rank is None else sketched(value, rank).matrix()
        for kind in statistics.keys() & grams
        for value in statistics[kind].values()
    }
    return {
        kind: {n: read[id(v)] if kind in grams else v for n, v in by_name.items()}
        for kind, by_name in statistics.items()
    }


@pytest.mark.parametrize("rank", [None, 8, 2, 0])
@pytest.mark.parametrize("name", ["gpt2-classifier", "llama-biased", "t5-gated"])
def test_what_was_a_gram_matrix_when_it_arrived_is_one_after_the_move(
    name: str, rank: int | None
) -> None:
    """Canonical form and random elements of every part; the exact matrices are near."""
    symmetry, state = symmetry_for(name), with_biases(state_of(name), 0.3)
    exact = fedrot.collect_gram(model_of(name, state), [inputs(name, 3)])
    given = sent(exact, rank)
    check_statistics(given, symmetry.shapes)
    alignment = canonical_alignment(name, random_moves(name, 2))
    moved = alignment.transport(given, state)
    check_statistics(moved, symmetry.shapes)
    if rank is None:
        whole = alignment.transport(exact, state)
        for kind in set(GRAMS.values()) & whole.keys():
            for key, gram in whole[kind].items():
                assert (moved[kind][key] - gram).norm() <= 0.05 * gram.norm(), key


def indefinite(matrix: Tensor, size: float) -> Tensor:
    """Return a symmetric matrix with an eigenvalue of ``-size`` at unit diagonal."""
    scale = matrix.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(matrix / scale[:, None] / scale)
    values[0] = -size
    return vectors @ torch.diag(values) @ vectors.mT * scale[:, None] * scale


def test_negative_eigenvalues_at_unit_diagonal_become_zero() -> None:
    """The oracle clips eigenvalues in NumPy; other matrices stay the same object."""
    x = torch.randn(40, 12, generator=seeded(1), dtype=torch.float64)
    x = x * torch.logspace(-0.3, 0.3, 12, dtype=torch.float64)
    gram = x.mT @ x / 40
    moved = indefinite(gram, 0.5)
    found = semidefinite(moved, gram)
    scale = np.sqrt(moved.diagonal().numpy())
    values, vectors = np.linalg.eigh(moved.numpy() / scale[:, None] / scale)
    assert values[0] < -0.3
    # The scales are those of ``check_statistics``, which add a little to the diagonal.
    expected = vectors @ np.diag(values.clip(0)) @ vectors.T
    assert np.allclose(found.numpy() / scale[:, None] / scale, expected, atol=1e-2)
    root = found.diagonal().sqrt()
    assert float(torch.linalg.eigvalsh(found / root[:, None] / root)[0]) > -1e-9
    assert torch.equal(found, found.mT)
    # Neither a Gram matrix, nor what was none when it arrived.
    rounded = gram.bfloat16().double()
    for value, received in ((gram, gram), (rounded, gram), (moved, indefinite(gram, 0.4))):
        assert semidefinite(value, received) is value
