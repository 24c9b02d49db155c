"""Gram matrices that were rounded or sketched stay Gram matrices when they move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.aggregation import RegMean, check_statistics
from fedrot.collect.gram_sketch import sketched
from fedrot.collect.statistics import GRAMS, semidefinite
from tests.families import inputs, model_of, state_of, symmetry_for
from tests.fedrot.collect.test_canonical_statistics import canonical_alignment, random_moves
from tests.fedrot.oracles import seeded
from tests.models import State

Statistics = dict[str, dict[str, Tensor]]


def with_biases(state: State, size: float) -> State:
    """Return a state whose biases are not near 0, as those of pretrained models, and gains neither."""
    gains = {
        name: tensor.abs().clamp_min(0.3)
        for name, tensor in state.items()
        if tensor.ndim == 1 and name.endswith("weight")
    }
    return gains | {
        name: size * torch.randn(tensor.shape, generator=seeded(index), dtype=tensor.dtype)
        if name.endswith("bias") and tensor.is_floating_point()
        else gains.get(name, tensor)
        for index, (name, tensor) in enumerate(state.items())
    }


def sent(statistics: Statistics, how: str) -> Statistics:
    """Return statistics as the server reads them: Gram matrices rounded to bfloat16, or of low rank."""
    found: Statistics = {}
    for kind, by_name in statistics.items():
        for name, value in by_name.items():
            value = value.float()
            if kind in GRAMS.values():
                value = (
                    value.bfloat16().float() if how == "bfloat16" else sketched(value, int(how)).matrix()
                )
            found.setdefault(kind, {})[name] = value
    return found


@pytest.mark.parametrize("how", ["bfloat16", "8", "2", "0"])
@pytest.mark.parametrize("name", ["gpt2-classifier", "llama-biased", "vit", "t5-gated"])
def test_what_was_a_gram_matrix_when_it_arrived_is_one_after_the_move(name: str, how: str) -> None:
    """Canonical form and random elements of every part; the exact matrices are near."""
    symmetry, state = symmetry_for(name), with_biases(state_of(name), 0.3)
    model: Any = model_of(name)
    model.load_state_dict(state)
    exact = fedrot.collect_gram(model, [inputs(name, 3)])
    given = sent(exact, how)
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    check_statistics(given, shapes)
    for seed in range(3):
        alignment = canonical_alignment(name, random_moves(name, seed))
        moved = alignment.transport(given, state)
        check_statistics(moved, symmetry.shapes)
        RegMean().add(alignment.apply(state), 1.0, moved)
        if how == "bfloat16":
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


@pytest.fixture
def gram() -> Tensor:
    inputs = torch.randn(40, 12, generator=seeded(1), dtype=torch.float64)
    inputs = inputs * torch.logspace(-0.3, 0.3, 12, dtype=torch.float64)
    return inputs.mT @ inputs / 40


def test_negative_eigenvalues_at_unit_diagonal_become_zero(gram: Tensor) -> None:
    """The oracle clips eigenvalues in NumPy."""
    moved = indefinite(gram, 0.5)
    found = semidefinite(moved, gram)
    scale = np.sqrt(moved.diagonal().numpy())
    values, vectors = np.linalg.eigh(moved.numpy() / scale[:, None] / scale)
    assert values[0] < -0.3
    expected = vectors @ np.diag(values.clip(0)) @ vectors.T * scale[:, None] * scale
    # The scales are those of ``check_statistics``, which add a little to the diagonal.
    assert np.allclose(
        found.numpy() / scale[:, None] / scale, expected / scale[:, None] / scale, atol=1e-2
    )
    after = torch.linalg.eigvalsh(found / found.diagonal().sqrt()[:, None] / found.diagonal().sqrt())
    assert float(after[0]) > -1e-9
    assert torch.equal(found, found.mT)


def test_a_gram_matrix_stays_the_same_object(gram: Tensor) -> None:
    assert semidefinite(gram, gram) is gram
    rounded = gram.bfloat16().double()
    assert semidefinite(rounded, gram) is rounded


def test_what_was_no_gram_matrix_when_it_arrived_is_not_repaired(gram: Tensor) -> None:
    moved, received = indefinite(gram, 0.5), indefinite(gram, 0.4)
    assert semidefinite(moved, received) is moved
