"""Sketches of Gram matrices keep the diagonal, stay positive, and have the error that they promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedrot.collect.gram_sketch import GramSketch, sketched
from fedrot.errors import FedrotError
from tests.fedrot.oracles import Array, seeded

SIZE = 48


def rows(seed: int) -> Tensor:
    """Return correlated inputs whose spectrum decays."""
    draw = seeded(seed)
    basis, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=draw, dtype=torch.float64))
    spread = torch.exp(-torch.arange(SIZE, dtype=torch.float64) / 6)
    return torch.randn(4 * SIZE, SIZE, generator=draw, dtype=torch.float64) * spread @ basis


def gram_of(inputs: Tensor) -> Tensor:
    return (inputs.T @ inputs / len(inputs)).float()


LIVE = torch.arange(SIZE) % 7 > 0
SCALES = 10 ** torch.empty(SIZE, dtype=torch.float64).uniform_(-6, 6, generator=seeded(1))
#: Inputs as layers have them: around zero, with a large mean, of unlike sizes, with units that are 0.
INPUTS: dict[str, Callable[[int], Tensor]] = {
    "with a mean": lambda seed: rows(seed) + 3,
    "of unlike sizes": lambda seed: rows(seed) * SCALES,
    "partly zero": lambda seed: rows(seed) * LIVE,
    "fewer rows than units": lambda seed: rows(seed)[:20],
}


def scaled(matrix: Tensor, like: Tensor) -> Array:
    """Return a matrix in the coordinates in which the diagonal of another is 1, in float64."""
    roots = np.sqrt(np.diag(like.double().numpy()))
    inverse = np.divide(1, roots, out=np.zeros_like(roots), where=roots > 0)
    return np.asarray(inverse[:, None] * matrix.double().numpy() * inverse)


@pytest.mark.parametrize("rank", [0, 1, 8, SIZE])
@pytest.mark.parametrize("inputs", INPUTS)
def test_the_sketch_is_the_truncated_decomposition_with_the_exact_diagonal(
    inputs: str, rank: int
) -> None:
    gram = gram_of(INPUTS[inputs](rank))
    even, sketch = scaled(gram, gram), sketched(gram, rank)
    found = sketch.matrix()
    values, vectors = np.linalg.eigh(even)
    largest = slice(SIZE - rank, None)
    expected = (vectors[:, largest] * values[largest]) @ vectors[:, largest].T
    np.fill_diagonal(expected, np.diag(even))
    np.testing.assert_allclose(scaled(found, gram), expected, atol=2**-10)
    assert found.dtype == torch.float32
    assert (sketch.factor.dtype, sketch.factor.shape) == (torch.float16, (SIZE, rank))
    assert torch.equal(found.diagonal(), gram.diagonal())
    assert np.linalg.eigvalsh(scaled(found, found))[0] >= -1e-5
    assert sketch.problem() is None
    shares = values[::-1][:rank] / SIZE
    np.testing.assert_allclose(sketch.explained().numpy(), shares, rtol=2**-9, atol=1e-6)
    assert torch.equal(sketched(gram).cut(rank).factor, sketch.factor)


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


@pytest.mark.parametrize(
    ("place", "value"), [((3, 4), float("nan")), ((3, 4), float("inf")), ((3, 3), -1)]
)
def test_matrices_without_eigenvalues_are_refused(place: tuple[int, int], value: float) -> None:
    gram = gram_of(rows(0))
    gram[place] = value
    with pytest.raises(FedrotError, match="NaN, Inf or a negative mean square"):
        sketched(gram, 2)


@pytest.mark.parametrize(
    ("what", "value", "word"),
    [
        *(("diagonal", value, "a diagonal") for value in (-1e-3, float("nan"), 2e30)),
        *(("factor", value, "longer than 1") for value in (1.1, float("nan"), float("inf"))),
    ],
)
def test_impossible_values_are_found(what: str, value: float, word: str) -> None:
    sketch = sketched(gram_of(rows(0)), 8)
    changed = getattr(sketch, what).clone()
    changed[5] = value if what == "diagonal" else changed[5].index_fill(0, torch.tensor(2), value)
    assert word in str(replace(sketch, **{what: changed}).problem())


def test_rows_that_rounding_made_longer_than_1_are_shortened() -> None:
    row = torch.tensor([[0.6, 0.8005], [1.0, 0.0]]).half()
    assert float(row[0].double().square().sum()) > 1
    sketch = GramSketch(row, torch.tensor([4.0, 9.0]))
    assert sketch.problem() is None
    found = sketch.matrix().double()
    assert torch.equal(found.diagonal(), torch.tensor([4.0, 9.0], dtype=torch.float64))
    assert float(torch.linalg.eigvalsh(found)[0]) >= 0
    assert abs(float(found[0, 1]) - 6 * float(row[0, 0]) / float(row[0].double().norm())) <= 1e-5
