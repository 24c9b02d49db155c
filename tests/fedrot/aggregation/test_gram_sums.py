"""The inverse of a sum of Gram matrices, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrot.aggregation.gram_sums import Inverse

EPS = torch.finfo(torch.float64).eps


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 8))
def test_the_root_of_a_metric_gives_its_norm(seed: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(width, 8, generator=generator, dtype=torch.float64)
    x[:, 3] = 0
    gram = x.mT @ x
    matrix = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    rooted = Inverse(gram, EPS).rooted(matrix)
    assert torch.allclose(rooted @ rooted.mT, matrix @ gram @ matrix.mT, atol=1e-8)


@pytest.mark.parametrize("last", [0.3, 1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("seed", range(20))
def test_an_unseen_direction_is_found_wherever_it_points(last: float, seed: int) -> None:
    """The last pivot of a Cholesky factor is large if the direction hardly has the last unit."""
    generator = torch.Generator().manual_seed(seed)
    unseen = torch.randn(9, generator=generator, dtype=torch.float64)
    unseen[-1] = last
    unseen /= torch.linalg.norm(unseen)
    rows = torch.randn(40, 9, generator=generator, dtype=torch.float64)
    rows -= torch.outer(rows @ unseen, unseen)
    inverse = Inverse(rows.mT @ rows, EPS)
    assert inverse.unseen == 1
    assert torch.allclose(inverse.outside(torch.eye(9).double()), torch.outer(unseen, unseen), atol=1e-8)
