"""The choice among candidates, where rules begin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrot.errors import UpdateError
from fedrot.task_head.choice import Candidate, choose, with_fitted_task_heads
from fedrot.task_head.votes import Votes
from tests.fedrot.task_head.classifiers import answer, sums_of

NOTHING = torch.zeros(1)


@pytest.mark.parametrize(("means", "taken"), [([1, 0.9, 0.8], 2), ([1, 1.1, 1.2], 0)])
def test_the_best_candidate_is_taken_if_it_is_better_than_the_old(means, taken):
    old, *others = (Candidate(place, NOTHING, NOTHING) for place in range(3))
    votes = Votes([answer(*means)] * 4, [old, *others])
    choice = choose(votes, old, others)
    assert choice.taken is [old, *others][taken]
    assert choice.best is others[taken // 2]
    assert choice.change.centre == pytest.approx(means[choice.best.body] - 1)


@pytest.mark.parametrize(("spread", "fits"), [(1e-1, True), (1e-4, False)])
def test_heads_whose_logits_have_no_loss_are_refused(spread, fits):
    """The logits of classes far apart beside their spread exceed the largest loss."""
    labels = np.arange(40) % 2
    noise = np.random.default_rng(0).normal(size=(40, 3))
    sums = sums_of(spread * noise + 2 * labels[:, None], labels, outputs=2)
    like = Candidate("body", NOTHING, NOTHING, share=0.5)
    if fits:
        (candidate,) = with_fitted_task_heads(like, sums, [0.1], True)
        assert (candidate.body, candidate.share) == ("body", 0.5)
        assert candidate.shrinkage == 0.1
    else:
        with pytest.raises(UpdateError, match="too large"):
            with_fitted_task_heads(like, sums, [0.1], True)
