"""The choice among candidates, votes about groups, and totals, where rules begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.task_head import ClassSums, LossSums, sums
from fedrot.task_head.choice import Candidate, choose, with_fitted_heads
from fedrot.task_head.losses import TEMPERATURES
from fedrot.task_head.totals import LONGEST, Totals, total_without
from fedrot.task_head.votes import FEWEST, Change, Votes
from tests.fedrot.oracles import seeded

ROWS = 100


def losses(means: Sequence[float], deviation: float = 0.0) -> LossSums:
    """Return a client's losses; those of every row differ from the first model's by the
    means' difference, with a deviation.
    """
    grid = torch.tensor(means).double().unsqueeze(1).repeat(1, len(TEMPERATURES))
    squares = (grid - grid[0]) ** 2 + deviation**2
    counts = torch.tensor([ROWS, *[0] * len(means)]).double()
    return LossSums(grid * ROWS, squares * ROWS, counts)


def votes(means: Sequence[float], deviation: float = 0.0) -> tuple[Votes, list[Any]]:
    """Return the votes of four clients of one mind, and the models."""
    models = [Candidate(place, *[torch.zeros(1)] * 2) for place in range(len(means))]
    return Votes([losses(means, deviation)] * 4, models), models


@pytest.mark.parametrize(
    ("means", "deviation", "left_out"),
    [
        pytest.param([1.0, 0.8, 0.7, 0.9], 0.1, [0], id="a clear gain"),
        pytest.param([1.0, 0.8, 0.79, 0.9], 9.0, [], id="a gain within the error"),
        pytest.param([1.0, 1.2, 1.19, 1.3], 9.0, [0], id="no better than the old"),
        pytest.param([1.0, 0.8, 0.8, 0.9], 0.0, [], id="no gain"),
    ],
)
def test_a_group_is_left_out_for_a_gain_beyond_the_error(
    means: list[float], deviation: float, left_out: list[int]
) -> None:
    ballot, (_, fitted, *others) = votes(means, deviation)
    without = dict(enumerate([*others, fitted, fitted]))
    assert ballot.harmful(fitted, without) == left_out


@pytest.mark.parametrize(("groups", "most"), [(4, 1), (7, 1), (8, 2)])
def test_at_most_a_quarter_of_the_groups_is_left_out(groups: int, most: int) -> None:
    """All groups harm; those with the largest gains go first."""
    gains = [0.01 * (1 + group) for group in range(groups)]
    ballot, (_, fitted, *without) = votes([1.0, 0.9, *(0.9 - g for g in gains)])
    worst = list(range(groups - most, groups))
    assert ballot.harmful(fitted, dict(enumerate(without))) == worst
    assert most == groups // FEWEST


@pytest.mark.parametrize(
    ("centre", "mean", "error", "decisive"),
    [
        (-0.3, 0.5, 0.2, -0.3),
        (-0.1, 0.05, 0.2, 0.05),
        (-0.1, 0.5, 0.2, 0.2),
        (0.1, -0.5, 0.2, -0.2),
        (0.2, -0.1, 0.2, -0.1),
    ],
)
def test_within_its_error_the_centre_gives_way_to_the_mean(
    centre: float, mean: float, error: float, decisive: float
) -> None:
    assert Change(centre, mean, error).decisive == decisive


@pytest.mark.parametrize(("means", "taken"), [([1, 0.9, 0.8], 2), ([1, 1.1, 1.2], 0)])
def test_the_best_candidate_is_taken_if_it_is_better_than_the_old(
    means: list[float], taken: int
) -> None:
    ballot, models = votes(means)
    choice = choose(ballot, models[0], models[1:])
    assert choice.taken is models[taken]
    assert choice.best is models[2 if taken else 1]
    assert choice.change.centre == pytest.approx(means[choice.best.body] - 1)


def class_sums(scale: float = 1.0, spread: float = 1.0) -> ClassSums:
    """Return sums of two classes of 20 rows each, a distance of 2 ``scale`` apart."""
    noise = torch.randn(40, 3, generator=seeded(0)).double()
    hot = torch.nn.functional.one_hot(torch.arange(40) % 2, 2).double()
    features = spread * noise + scale * (hot[:, :1] - hot[:, 1:])
    return ClassSums(hot.sum(0), hot.mT @ features, features.mT @ features)


@pytest.mark.parametrize(("spread", "fits"), [(1e-1, True), (1e-4, False)])
def test_heads_whose_logits_have_no_loss_are_refused(spread: float, fits: bool) -> None:
    """The logits of classes far apart beside their spread exceed the largest loss."""
    like = Candidate("body", *[torch.zeros(1)] * 2, share=0.5)
    if fits:
        (candidate,) = with_fitted_heads(like, class_sums(1, spread), [0.1], True)
        assert (candidate.body, candidate.share) == ("body", 0.5)
        assert candidate.shrinkage == 0.1
    else:
        with pytest.raises(UpdateError, match="too large"):
            with_fitted_heads(like, class_sums(1, spread), [0.1], True)


@pytest.mark.parametrize(("times", "kept"), [(0.99, [0, 1, 2]), (1.01, [0, 1])])
def test_groups_of_features_longer_than_usual_are_left_out(
    times: float, kept: list[int]
) -> None:
    """The mean square of the third client's features is so many times the limit."""
    parts = [class_sums(), class_sums(), class_sums()]
    longer = (times * LONGEST) ** 0.5
    parts[2] = ClassSums(
        parts[2].counts, parts[2].sums * longer, parts[2].gram * longer**2
    )
    totals = Totals(dict.fromkeys(range(3), 40))
    for node, part in enumerate(parts):
        totals.add(node, part)
    assert [*totals.groups()] == kept


def test_sums_are_checked_once_for_each_client(monkeypatch: Any) -> None:
    """Totals, groups and sums without a group are the server's own."""
    checked: list[Tensor] = []
    kind = sums.kind_named("gram")

    def count(value: Tensor, shape: tuple[int, ...]) -> str | None:
        checked.append(value)
        return kind.check(value, shape)

    counting = type("Kind", (), {"check": staticmethod(count)})
    monkeypatch.setattr(sums, "kind_named", lambda name: counting)
    totals = Totals(dict.fromkeys(range(8), 40))
    for node in range(8):
        received = ClassSums.unpacked(class_sums().packed(), (2, 3))
        totals.add(node, received)
    collected = len(checked)
    groups = totals.groups()
    for left_out in ([], *([group] for group in groups)):
        total_without(left_out, groups)
    # Each client checks what it has collected, and the server what it has received.
    assert collected == len(checked) == 2 * 8
