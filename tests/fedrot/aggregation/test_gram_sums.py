"""The inverse of a sum of Gram matrices, against dense matrices."""

import pytest
import torch

from fedrot.aggregation.gram_sums import Inverse
from tests.fedrot.oracles import eye, normal, seeded

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("last", [0.3, 1e-2, 1e-3])
@pytest.mark.parametrize("seed", range(5))
def test_an_unseen_direction_is_found_wherever_it_points(last, seed):
    """The last pivot of a Cholesky factor is large if the direction hardly has the last
    unit.
    """
    unseen, rows = (normal(seeded(seed), *size) for size in ((9,), (40, 9)))
    unseen[-1] = last
    unseen /= torch.linalg.norm(unseen)
    rows -= torch.outer(rows @ unseen, unseen)
    inverse = Inverse(rows.mT @ rows, EPS)
    assert inverse.unseen == 1
    assert torch.allclose(
        inverse.outside(eye(9)), torch.outer(unseen, unseen), atol=1e-8
    )
