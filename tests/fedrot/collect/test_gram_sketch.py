"""Sketches of Gram matrices keep the diagonal, stay positive, and have the error that they promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedrot.collect.gram_sketch import GramSketch, sketched
from fedrot.errors import FedrotError

SIZE = 96


def rows(seed: int, size: int = SIZE) -> Tensor:
    """Return correlated inputs whose spectrum decays."""
    draw = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))
    spread = torch.exp(-torch.arange(size, dtype=torch.float64) / 12)
    return torch.randn(4 * size, size, generator=draw, dtype=torch.float64) * spread @ basis


def gram_of(inputs: Tensor) -> Tensor:
    return (inputs.T @ inputs / len(inputs)).float()


def _scales(seed: int) -> Tensor:
    return 10 ** torch.empty(SIZE, dtype=torch.float64).uniform_(
        -6, 6, generator=torch.Generator().manual_seed(seed)
    )


def _dead(seed: int) -> Tensor:
    inputs = rows(seed)
    inputs[:, ::7] = 0
    return inputs


#: Inputs as layers have them: around zero, with a large mean, of unlike sizes, with units that are 0.
INPUTS: dict[str, Any] = {
    "around zero": rows,
    "with a mean": lambda seed: rows(seed) + 3,
    "of unlike sizes": lambda seed: rows(seed) * _scales(seed),
    "partly zero": _dead,
    "fewer rows than units": lambda seed: rows(seed)[:20],
}


def scaled(matrix: Tensor, like: Tensor) -> np.ndarray[Any, Any]:
    """Return a matrix in the coordinates in which the diagonal of another is 1, in float64."""
    roots = np.sqrt(np.diag(like.double().numpy()))
    inverse = np.divide(1, roots, out=np.zeros_like(roots), where=roots > 0)
    return inverse[:, None] * matrix.double().numpy() * inverse


def of_unit_diagonal(gram: Tensor) -> np.ndarray[Any, Any]:
    return scaled(gram, gram)


@pytest.mark.parametrize("rank", [0, 1, 8, 40, SIZE])
@pytest.mark.parametrize("inputs", INPUTS)
def test_the_error_is_within_the_bound(inputs: str, rank: int) -> None:
    """The bound comes from NumPy's eigenvalues of the exact matrix, not from the sketch."""
    for seed in range(3):
        gram = gram_of(INPUTS[inputs](seed))
        even = of_unit_diagonal(gram)
        values = np.sort(np.linalg.eigvalsh(even))[::-1].clip(min=0)
        error = even - scaled(sketched(gram, rank).matrix(), gram)
        rounding = 2**-9 * np.sqrt(SIZE * values[0])
        rest = values[rank:] if rank < SIZE else np.zeros(1)
        # Entries of the matrix itself are float32.
        assert np.linalg.norm(error, 2) <= rest[0] + rounding + 1e-5
        assert np.linalg.norm(error) <= np.sqrt((rest**2).sum()) + rounding + 1e-5


@pytest.mark.parametrize("rank", [0, 5, 40, SIZE])
@pytest.mark.parametrize("inputs", INPUTS)
def test_the_diagonal_is_exact_and_the_sketch_is_positive(inputs: str, rank: int) -> None:
    gram = gram_of(INPUTS[inputs](7))
    found = sketched(gram, rank).matrix()
    assert found.dtype == torch.float32
    assert torch.equal(found.diagonal(), gram.diagonal())
    values = np.linalg.eigvalsh(of_unit_diagonal(found))
    assert values[0] >= -1e-5


def test_without_rounding_the_sketch_is_the_truncated_decomposition() -> None:
    gram = gram_of(rows(3) + 1)
    even = of_unit_diagonal(gram)
    values, vectors = np.linalg.eigh(even)
    for rank in (1, 6, 30):
        largest = slice(SIZE - rank, None)
        expected = (vectors[:, largest] * values[largest]) @ vectors[:, largest].T
        np.fill_diagonal(expected, 1)
        found = scaled(sketched(gram, rank).matrix(), gram)
        np.testing.assert_allclose(found, expected, atol=2**-10)


def test_rank_0_is_the_diagonal_and_the_full_rank_is_the_matrix() -> None:
    gram = gram_of(rows(0))
    assert torch.equal(sketched(gram, 0).matrix(), torch.diag(gram.diagonal()))
    error = of_unit_diagonal(gram) - scaled(sketched(gram, SIZE).matrix(), gram)
    assert np.abs(error).max() <= 2**-10


def test_a_low_rank_and_a_diagonal_need_no_more_than_their_rank() -> None:
    draw = torch.Generator().manual_seed(0)
    factor = torch.randn(SIZE, 4, generator=draw, dtype=torch.float64)
    gram = (factor @ factor.T).float()
    error = of_unit_diagonal(gram) - scaled(sketched(gram, 4).matrix(), gram)
    assert np.abs(error).max() <= 2**-10
    assert float(sketched(gram, 4).explained().sum()) == pytest.approx(1, abs=1e-3)


def test_columns_explain_the_shares_of_the_eigenvalues() -> None:
    gram = gram_of(rows(1) + 1)
    values = np.linalg.eigvalsh(of_unit_diagonal(gram))[::-1]
    sketch = sketched(gram)
    np.testing.assert_allclose(sketch.explained().numpy(), values / SIZE, rtol=2**-9, atol=1e-6)
    assert torch.equal(sketch.cut(7).factor, sketched(gram, 7).factor)


def test_a_matrix_that_rounding_made_indefinite_has_a_positive_sketch() -> None:
    gram = torch.tensor([[4.0, 6.06], [6.06, 9.0]])
    assert float(torch.linalg.eigvalsh(gram)[0]) < 0
    sketch = sketched(gram)
    assert sketch.problem() is None
    found = sketch.matrix().double()
    assert float(torch.linalg.eigvalsh(found)[0]) >= -1e-6
    assert abs(float(found[0, 1]) - 6) <= 0.01


def test_a_matrix_of_zeros_stays_one() -> None:
    sketch = sketched(torch.zeros(5, 5), 2)
    assert torch.equal(sketch.matrix(), torch.zeros(5, 5))
    assert sketch.problem() is None
    assert float(sketch.explained().sum()) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_matrices_without_eigenvalues_are_refused(value: float) -> None:
    gram = gram_of(rows(0))
    gram[3, 4] = value
    with pytest.raises(FedrotError, match="NaN, Inf or a negative mean square"):
        sketched(gram, 2)


def test_a_negative_mean_square_is_refused() -> None:
    gram = gram_of(rows(0))
    gram[3, 3] = -1
    with pytest.raises(FedrotError, match="negative mean square"):
        sketched(gram, 2)


def test_impossible_values_are_found() -> None:
    sketch = sketched(gram_of(rows(0)), 8)
    assert sketch.problem() is None

    def problem(**changed: Tensor) -> str:
        found = replace(sketch, **changed).problem()
        assert found is not None
        return found

    for value in (-1e-3, float("nan"), float("inf"), 2e30):
        diagonal = sketch.diagonal.clone()
        diagonal[5] = value
        assert "a diagonal with entries" in problem(diagonal=diagonal)
    for entry in (1.1, float("nan"), float("inf")):
        factor = sketch.factor.clone()
        factor[5, 2] = entry
        assert "rows that are longer than 1" in problem(factor=factor)


def test_rows_that_rounding_made_longer_than_1_are_shortened() -> None:
    row = torch.tensor([[0.6, 0.8005], [1.0, 0.0]]).half()
    assert float(row[0].double().square().sum()) > 1
    sketch = GramSketch(row, torch.tensor([4.0, 9.0]))
    assert sketch.problem() is None
    found = sketch.matrix().double()
    assert torch.equal(found.diagonal(), torch.tensor([4.0, 9.0], dtype=torch.float64))
    assert float(torch.linalg.eigvalsh(found)[0]) >= 0
    assert abs(float(found[0, 1]) - 6 * float(row[0, 0]) / float(row[0].double().norm())) <= 1e-5
