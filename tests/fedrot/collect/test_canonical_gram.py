"""Gram matrices in canonical form, against those of the canonical and the moved model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedrot
from fedrot.collect.canonical_statistics import canonical_gram
from fedrot.collect.statistics import GRAMS, transport_statistics
from fedrot.errors import UpdateError
from fedrot.precision import Float64
from fedrot.symmetry.moves import Move, apply_moves
from tests.families import inputs, model_of, state_of, symmetry_for
from tests.fedrot.oracles import seeded
from tests.models import State, with_separate_tables

#: Pre-norm models: Conv1D under LayerNorm, RMSNorm without a bias, and LayerNorm before images.
NAMES = ("gpt2-classifier", "gpt2", "llama", "llama-biased", "vit", "vit-plain", "opt", "t5-gated")


@cache
def _symmetry(name: str) -> fedrot.Symmetry:
    return symmetry_for(name).rotated


def read_by(name: str, tensors: State, weights: set[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return Gram matrix and mean of what these weights read, float64, from hooks of its own."""
    model: Any = with_separate_tables(model_of(name))
    model.load_state_dict(tensors)
    rows: dict[str, list[Tensor]] = {}

    def keep(weight: str) -> Callable[..., None]:
        return lambda _, args, kwargs: rows.setdefault(weight, []).extend(
            (*args, *kwargs.values())[0].detach().flatten(0, -2)
        )

    for weight in weights:
        layer = model.get_submodule(weight.removesuffix(".weight"))
        layer.register_forward_pre_hook(keep(weight), with_kwargs=True)
    with torch.no_grad(), Float64():
        model.eval()(**inputs(name, 3))
    found = {}
    for weight, read in rows.items():
        x = torch.stack(read)
        assert x.dtype == torch.float64
        found[weight] = sum(torch.outer(row, row) for row in x) / len(x), x.mean(0)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_gram_matrices_follow_the_model_to_canonical_form_and_in_a_rotation(name: str) -> None:
    symmetry, state = _symmetry(name), state_of(name)
    folds = {r.weight: (fold, r) for fold in symmetry.folds for r in fold.readers}
    # Whatever reads a norm is checked, but tables: they are no layers.
    weights = {w for w in folds if "shared" not in w and "embed" not in w and "wte" not in w}
    assert weights
    before = read_by(name, state, weights)
    assert before.keys() == weights
    found: dict[str, dict[str, Tensor]] = {}
    for weight, (gram, mean) in before.items():
        fold, reader = folds[weight]
        bias = state[fold.bias] if fold.bias and fold.holds_bias else None
        kind = found.setdefault(GRAMS[reader.axis], {})
        kind[weight] = canonical_gram(gram, mean, state[fold.gain], bias)

    folded = fedrot.canonical(state, symmetry)
    generator = seeded(3)
    groups = symmetry.select(("residual", "heads", "ffn"))
    moves = [Move(group, group.kind.random(generator)) for group in groups]
    moved = transport_statistics(found, moves, symmetry.shapes)
    for tensors, statistics in ((folded, found), (apply_moves(folded, moves), moved)):
        after = read_by(name, tensors, weights)
        for by_name in statistics.values():
            for weight, gram in by_name.items():
                expected = after[weight][0]
                assert (gram - expected).abs().max() <= 1e-9 * expected.abs().max(), weight
    # Neither step is the identity.
    assert all((found[k][w] - before[w][0]).abs().max() > 1e-2 for k in found for w in found[k])
    assert all((found[k][w] - moved[k][w]).abs().max() > 1e-2 for k in found for w in found[k])


@settings(max_examples=80, deadline=None)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matrix_keeps_its_dtype(dtype: torch.dtype) -> None:
    gram, mean, gain, _ = layer()
    found = canonical_gram(gram.to(dtype), mean, gain)
    assert found.dtype == dtype
    torch.testing.assert_close(found, canonical_gram(gram, mean, gain).to(dtype), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    ("gain", "dtype", "biased"),
    [
        (0.0, torch.float64, True),
        (0.0, torch.float64, False),
        (1e-7, torch.float64, False),
        (1e-3, torch.float32, True),
        (0.5, torch.bfloat16, True),
    ],
)
def test_gains_near_0_are_refused(gain: float, dtype: torch.dtype, biased: bool) -> None:
    gram, mean, gains, bias = layer()
    gains[2] = gain
    with pytest.raises(UpdateError, match=rf"gain of unit \d is .*, too near 0 .* in {dtype}"):
        canonical_gram(gram.to(dtype), mean, gains, bias if biased else None)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.ones(4, 3), r"The gram of shape \[4, 3\]"),
        (0, torch.ones(4, 4, 3), r"The gram of shape \[4, 4, 3\]"),
        (0, torch.ones(2, 2, 2, 1), r"The gram of shape \[2, 2, 2, 1\]"),
        (0, torch.ones(4), r"The gram of shape \[4\]"),
        (0, torch.eye(3), r"The mean of shape \[4\]"),
        (0, torch.tensor(1.0), r"The gram of shape \[\]"),
        (0, torch.full((4, 4), torch.nan), "The gram of shape"),
        (1, torch.ones(3), r"The mean of shape \[3\]"),
        (1, torch.full((4,), torch.inf), "The mean of shape"),
        (2, torch.ones(4, 4), "The gain of shape"),
        (3, torch.ones(5), "The bias of shape"),
        (3, torch.tensor([0.0, torch.nan, 0, 0]), "The bias of shape"),
        (1, torch.full((4,), 9.0), "The mean and the Gram matrix contradict each other"),
    ],
)
def test_what_belongs_to_no_inputs_is_refused(place: int, value: Tensor, message: str) -> None:
    given = list(layer())
    given[place] = value
    with pytest.raises(UpdateError, match=message):
        canonical_gram(*given)
