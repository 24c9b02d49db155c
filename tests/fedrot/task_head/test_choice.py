"""The choice among candidates, where rules begin."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrot.task_head.choice import Candidate, choose, with_fitted_task_heads
from fedrot.task_head.fit import fitted_task_head
from fedrot.task_head.outputs import OUTPUT_KINDS, REGRESSION, SEVERAL, SINGLE
from fedrot.task_head.votes import Votes
from tests.fedrot.task_head.classifiers import answer, sums_of

NOTHING = torch.zeros(1)


@pytest.mark.parametrize(("means", "taken"), [([1, 0.9, 0.8], 2), ([1, 1.1, 1.2], 0)])
def test_the_best_candidate_is_taken_if_it_is_better_than_the_old(means, taken):
    old, *others = (Candidate(place, NOTHING, NOTHING) for place in range(3))
    choice = choose(Votes([answer(*means)] * 4, [old, *others]), old, others)
    assert choice.taken is [old, *others][taken]
    assert choice.best is others[taken // 2]
    assert choice.change.centre == pytest.approx(means[choice.best.body] - 1)


@pytest.mark.parametrize("problem", OUTPUT_KINDS)
@pytest.mark.parametrize("spread", [3.0, 1e-4, 0.0])
def test_logits_of_classes_far_apart_are_divided(spread, problem):
    """The logits of a regression are its predictions: they are never divided. A class
    without rows has no mean.
    """
    classes = np.arange(40) % 2
    noise = np.random.default_rng(0).normal(size=(40, 3))
    features = spread * noise + 2 * classes[:, None] + 1000
    labels = classes if problem == SINGLE else classes[:, None] * 1e6
    if problem == SEVERAL:
        labels = labels / 1e6
    sums = sums_of(features, labels, problem)
    weight, bias = fitted_task_head(sums, 0.01)
    like = Candidate("body", torch.zeros_like(weight), NOTHING, share=0.5)
    (candidate,) = with_fitted_task_heads(like, sums, [0.01], True)
    assert (candidate.body, candidate.share) == ("body", 0.5)
    assert candidate.shrinkage == 0.01
    # Another head before changes no logit of the mean row, and only of outputs that
    # the sums tell nothing of.
    random = replace(like, weight=torch.ones_like(weight).cumsum(0).cumsum(1) ** 2)
    (other,) = with_fitted_task_heads(random, sums, [0.01], True)
    changes = other.weight - candidate.weight
    assert changes.any(1).tolist() == sums.absent.tolist()
    mean = torch.tensor(features.mean(0))
    assert (changes @ mean).abs().max() <= 1e-9 * changes.norm() * mean.norm()
    divided = spread < 1 and problem != REGRESSION
    assert (candidate.divisor > 10, candidate.divisor > 1) == (divided, divided)
    torch.testing.assert_close(candidate.weight * candidate.divisor, weight)
    torch.testing.assert_close(candidate.bias * candidate.divisor, bias)
    if divided:
        logits = features @ candidate.weight.numpy().T + candidate.bias.numpy()
        right = logits.argmax(1) if problem == SINGLE else logits[:, 0] > 0
        assert (right == classes).all()
        assert np.abs(logits).max() == pytest.approx(256, rel=0.1)
