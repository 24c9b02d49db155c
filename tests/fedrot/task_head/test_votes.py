"""Votes: rows and centres against what a quarter of the clients can do, and where rules
begin.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedrot.task_head.losses import ONE
from fedrot.task_head.votes import (
    FEWEST,
    LEAST_RANGE,
    MOST,
    MOST_OF_VOTES,
    Change,
    Votes,
    capped,
    centre,
)
from tests.fedrot.task_head.classifiers import answer

#: Numbers of rows and values of up to 16 clients.
CLIENTS = st.lists(
    st.tuples(st.integers(1, 1000), st.floats(-9, 9)), min_size=1, max_size=16
)


def weights_of(rows):
    multiple = MOST_OF_VOTES if len(rows) >= FEWEST else MOST
    return torch.tensor(capped([*rows], multiple), dtype=torch.float64)


def slow_centre(values, weights):
    """Return the centre of many copies of each value, one for each thousandth of the
    weight.
    """
    copies = sorted(
        v for v, w in zip(values, weights, strict=True) for _ in range(round(w * 1000))
    )
    heaviest = sorted(weights)[len(weights) - len(weights) // 4 :]
    cut = min(round(sum(heaviest) * 1000), (len(copies) - 1) // 2)
    kept = copies[cut : len(copies) - cut]
    return sum(kept) / len(kept)


@settings(max_examples=200, deadline=None)
@given(clients=CLIENTS)
@example([(1, 0.0)] * 5 + [(100, 0.0)] * 4 + [(1000, 0.0)] * 3)
def test_the_centre_is_the_mean_of_what_is_left_in_the_middle(clients):
    rows, values = zip(*clients, strict=True)
    weights = weights_of(rows)
    shares = weights / weights.sum()
    of_clients = torch.tensor(values, dtype=torch.float64)
    found = float(centre(of_clients, weights))
    assert found == pytest.approx(slow_centre(values, shares.tolist()), abs=0.1)
    assert weights.topk(len(rows) // 4).values.sum() < weights.sum() / 2
    if len(rows) < 4:
        assert found == pytest.approx(float(shares @ of_clients), abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.integers(1, 10**12), min_size=4, max_size=4))
def test_no_client_of_four_has_half_of_the_rows(rows):
    weights = capped(rows)
    assert max(weights) < sum(weights) / 2
    for weight, count in zip(weights, rows, strict=True):
        assert weight == count or count > MOST * sorted(rows)[1]


@settings(max_examples=150, deadline=None)
@given(
    clients=CLIENTS,
    lies=st.lists(st.tuples(st.integers(1, 10**12), st.floats(-1e6, 1e6)), max_size=4),
)
def test_a_quarter_of_the_clients_turns_nothing(clients, lies):
    """The guarantee of docs/how-to/different-labels.md, for any honest changes of loss
    and any lies.
    """
    rows, changes = zip(*clients, *lies[: len(clients) // 3], strict=True)
    weights = weights_of(rows)
    reach = 1 + LEAST_RANGE
    values = torch.tensor(changes, dtype=torch.float64).clamp(-reach, reach)
    honest = values[: len(clients)]
    found = centre(values, weights)
    assert honest.min() - 1e-9 <= found <= honest.max() + 1e-9
    votes = Votes([answer(1.0, rows=count) for count in rows], ["old"])
    assert float(votes.change(1 + values, values * 0 + 1)) == pytest.approx(
        float(found)
    )
    if found <= 0:
        quarter = weights.topk(len(weights) // 4).values.sum()
        shares = weights[: len(clients)] / weights[: len(clients)].sum()
        assert shares @ honest <= quarter / (weights.sum() - quarter) * reach + 1e-9


def test_a_huge_loss_of_the_servers_model_counts_against_it():
    """Three honest clients whose old losses are huge, and one that lies about both."""
    votes = Votes([answer(1e6)] * 3 + [answer(0.0)], ["old"])
    new = torch.tensor([2.0, 2.0, 2.0, 1e6]).double()
    change = votes.change(new, votes.means("old")[:, ONE])
    assert float(change) == pytest.approx(2 - 1e6)


@pytest.mark.parametrize(
    ("others", "two", "pays"),
    [
        pytest.param(-0.01, 0.02, True, id="the mean falls"),
        pytest.param(-0.01, 0.04, False, id="the mean rises"),
        pytest.param(-0.09, 9.0, False, id="the others lose less than 5 %"),
        pytest.param(-0.11, 9.0, True, id="the others lose more than 5 %"),
        pytest.param(0.01, 0.0, False, id="nobody gains"),
    ],
)
def test_groups_that_few_clients_need_stay(others, two, pays):
    """Of eight clients, two lose. A change counts up to 2, and 0.1 of the others' loss
    is tolerated.
    """
    answers = [answer(1.0, 1.0 + change) for change in [others] * 6 + [two] * 2]
    votes = Votes(answers, ["fitted", "without"])
    assert votes.pays(without="without", fitted="fitted") is pays


def harmful(means, deviation=0.0):
    """Return which groups four clients of one mind leave out.

    The losses are of the old model, the fitted one, and those without a group each.
    """
    old, fitted, *without = range(len(means))
    votes = Votes([answer(*means, deviation=deviation)] * 4, [old, fitted, *without])
    return votes.harmful(fitted, dict(enumerate(without)))


@pytest.mark.parametrize(
    ("means", "deviation", "left_out"),
    [
        pytest.param([1.0, 0.8, 0.7, 0.9], 0.1, [0], id="a clear gain"),
        pytest.param([1.0, 0.8, 0.79, 0.9], 9.0, [], id="a gain within the error"),
        pytest.param([1.0, 1.2, 1.19, 1.3], 9.0, [0], id="no better than the old"),
        pytest.param([1.0, 0.8, 0.8, 0.9], 0.0, [], id="no gain"),
    ],
)
def test_a_group_is_left_out_for_a_gain_beyond_the_error(means, deviation, left_out):
    _, fitted, *_ = means
    assert harmful([*means, fitted, fitted], deviation) == left_out


@pytest.mark.parametrize(("groups", "most"), [(4, 1), (7, 1), (8, 2)])
def test_at_most_a_quarter_of_the_groups_is_left_out(groups, most):
    """All groups harm; those with the largest gains go first."""
    worst = list(range(groups - most, groups))
    without = [0.9 - 0.01 * (1 + group) for group in range(groups)]
    assert harmful([1.0, 0.9, *without]) == worst
    assert most == groups // FEWEST


#: Rows, gains, and standard errors as shares of the gains.
GAINS = st.lists(
    st.tuples(st.integers(1, 1000), st.floats(0.01, 0.9), st.floats(0, 0.99)),
    min_size=3,
    max_size=12,
)
#: Rows, losses of the old and of the new model, and deviations of rows.
LOSSES = st.tuples(st.integers(1, 10**12), *[st.floats(0, 1e6)] * 3)


@settings(max_examples=150, deadline=None)
@given(gains=GAINS, lies=st.lists(LOSSES, min_size=4, max_size=4))
@example([(99, 0.3, 0.97)] * 2 + [(99, 0.01, 0.5)], [(99, 1.0, 1.7, 1e3)])
@example([(99, 0.1, 0.9)] * 6, [(10**12, 0.0, 1e6, 0.0)] * 2)
def test_nobody_stops_a_gain_of_three_quarters(gains, lies):
    """The guarantee of docs/how-to/different-labels.md: each of three quarters gains
    beyond its standard error.
    """
    answers = [
        answer(1.0, 1.0 - gain, rows=rows, deviation=share * gain * rows**0.5)
        for rows, gain, share in gains
    ]
    answers += [
        answer(old, new, rows=rows, deviation=deviation)
        for rows, old, new, deviation in lies[: len(gains) // 3]
    ]
    assert Votes(answers, ["old", "new"]).from_old("new").decisive < 0


@pytest.mark.parametrize(
    ("most", "others", "gains"),
    [
        pytest.param([-0.02] * 6, [2.0] * 2, True, id="a quarter far above"),
        pytest.param([0.02] * 6, [-0.9] * 2, False, id="a quarter far below"),
        pytest.param([-0.06] * 11, [0.66] * 5, False, id="more than a quarter"),
        pytest.param([-0.02] * 6, [0.55] * 2, False, id="not far"),
        pytest.param([-0.02] * 6, [0.05] * 2, True, id="the mean falls"),
    ],
)
def test_within_noise_a_quarter_of_unusual_clients_does_not_count(most, others, gains):
    """A client's standard error is 0.1, and the centre's at most 0.05."""
    answers = [answer(1.0, 1.0 + change, deviation=1.0) for change in most + others]
    change = Votes(answers, ["old", "new"]).from_old("new")
    assert abs(change.decisive) <= change.error
    assert (change.decisive < 0) is gains


@pytest.mark.parametrize(
    ("centre", "usual", "error", "agreed", "decisive"),
    [
        (-0.3, 0.5, 0.2, False, -0.3),
        (-0.1, 0.05, 0.2, False, 0.05),
        (-0.1, 0.05, 0.2, True, -0.1),
        (-0.1, 0.5, 0.2, False, 0.2),
        (0.1, -0.5, 0.2, False, -0.2),
        (0.2, -0.1, 0.2, False, -0.1),
    ],
)
def test_within_its_error_the_centre_gives_way_to_the_mean_of_usual_clients(
    centre, usual, error, agreed, decisive
):
    assert Change(centre, 9.0, error, usual, agreed).decisive == decisive
