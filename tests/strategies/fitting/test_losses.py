"""Capped rows and centres, against a search over what a quarter of the clients can
do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedrot.task_head.losses import ONE, TEMPERATURES, LossSums
from fedrot.task_head.sums import ClassSums
from fedrot.task_head.totals import SCARCE, Totals, total_without
from fedrot.task_head.votes import LEAST_RANGE, MOST, Votes, capped, centre

#: Numbers of rows and values of up to 16 clients.
CLIENTS = st.lists(
    st.tuples(st.integers(1, 1000), st.floats(-9, 9)), min_size=1, max_size=16
)


def weights_of(rows: list[float]) -> Tensor:
    return torch.tensor(capped(rows), dtype=torch.float64)


def slow_centre(values: list[float], weights: list[float]) -> float:
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
def test_the_centre_is_the_mean_of_what_is_left_in_the_middle(
    clients: Any,
) -> None:
    rows, values = zip(*clients, strict=True)
    weights = weights_of([*rows])
    shares = (weights / weights.sum()).tolist()
    found = float(centre(torch.tensor(values, dtype=torch.float64), weights))
    assert found == pytest.approx(slow_centre([*values], shares), abs=0.1)
    if len(rows) < 4:
        mean = sum(s * v for s, v in zip(shares, values, strict=True))
        assert found == pytest.approx(mean, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.integers(1, 10**12), min_size=4, max_size=4))
def test_no_client_of_four_has_half_of_the_rows(rows: Any) -> None:
    weights = capped(rows)
    assert max(weights) < sum(weights) / 2
    assert all(
        w == r
        for w, r in zip(weights, rows, strict=True)
        if r <= MOST * sorted(rows)[1]
    )


@settings(max_examples=150, deadline=None)
@given(
    clients=CLIENTS,
    lies=st.lists(st.tuples(st.integers(1, 10**12), st.floats(-1e6, 1e6)), max_size=4),
)
def test_a_quarter_of_the_clients_turns_nothing(clients: Any, lies: Any) -> None:
    """The guarantee of docs/how-to/different-labels.md, for any honest changes of loss
    and any lies.
    """
    lies = lies[: len(clients) // 3]
    rows, changes = zip(*clients, *lies, strict=True)
    weights = weights_of([*rows])
    honest = len(clients)
    old = torch.ones(len(rows), dtype=torch.float64)
    reach = 1 + LEAST_RANGE
    values = torch.tensor(changes, dtype=torch.float64).clamp(-reach, reach)
    found = centre(values, weights)
    assert values[:honest].min() - 1e-9 <= found <= values[:honest].max() + 1e-9
    answers = [losses_of(count, 1.0) for count in rows]
    votes = Votes(answers, ["old"])
    assert float(votes.change(old + values, old)) == pytest.approx(float(found))
    if found <= 0:
        quarter = weights.topk(len(weights) // 4).values.sum()
        worse = (weights[:honest] * values[:honest]).sum() / weights[:honest].sum()
        assert worse <= quarter / (weights.sum() - quarter) * reach + 1e-9


def losses_of(rows: int, *losses: float) -> LossSums:
    grid = (
        torch.tensor(losses, dtype=torch.float64)
        .unsqueeze(1)
        .repeat(1, len(TEMPERATURES))
        * rows
    )
    return LossSums(
        grid,
        torch.zeros_like(grid),
        torch.tensor([rows, *[0] * len(losses)], dtype=torch.float64),
    )


def test_a_huge_loss_of_the_servers_model_counts_against_it() -> None:
    """Three honest clients whose old losses are huge, and one that lies about both."""
    votes = Votes([losses_of(10, 1e6)] * 3 + [losses_of(10, 0.0)], ["old"])
    old = votes.means("old")[:, ONE]
    new = torch.tensor([2.0, 2.0, 2.0, 1e6]).double()
    assert float(votes.change(new, old)) == pytest.approx(2 - 1e6)


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
def test_groups_that_few_clients_need_stay(
    others: float, two: float, pays: bool
) -> None:
    """Of eight clients, two lose. A change counts up to 2, and 0.1 of the others' loss
    is tolerated.
    """
    answers = [losses_of(10, 1.0, 1.0 + change) for change in [others] * 6 + [two] * 2]
    votes = Votes(answers, ["fitted", "without"])
    assert votes.pays(without="without", fitted="fitted") is pays


def drawn(seed: int, rows: int) -> ClassSums:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 5, generator=generator).double() * torch.tensor(
        [1, 1, 1, 1, 1e-32]
    )
    one_hot = torch.nn.functional.one_hot(torch.arange(rows) % 3, 3).double()
    return ClassSums(one_hot.sum(0), one_hot.mT @ features, features.mT @ features)


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(11)), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_totals_are_the_sums_of_capped_rows_in_any_order(
    order: Any, scale: float
) -> None:
    clients = {node: drawn(node, 12 if node else 90) for node in range(11)}
    clients = {
        n: ClassSums(s.counts, s.sums * scale, s.gram * scale**2)
        for n, s in clients.items()
    }
    rows = {node: int(sums.counts.sum()) for node, sums in clients.items()}
    found = Totals(rows)
    again = Totals(rows)
    for node in order:
        found.add(node, clients[node])
    for node in clients:
        again.add(node, clients[node])
    ours, theirs = (total_without((), one.groups()) for one in (found, again))
    for name in ("counts", "sums", "gram"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
        slow = sum(
            getattr(s, name) * (18 / 90 if not n else 1) for n, s in clients.items()
        )
        own = getattr(ours, name)
        size = float(slow.abs().max())
        torch.testing.assert_close(own, slow, rtol=1e-12, atol=1e-12 * size)
    # Clients 7 and 8 by number of rows, and so on, are in one group.
    rest = [node for node in clients if found._group[node] != 2]
    slow = sum(clients[node].counts * (18 / 90 if not node else 1) for node in rest)
    torch.testing.assert_close(total_without([2], found.groups()).counts, slow)


@pytest.mark.parametrize("kept", [0, 9, 10])
def test_classes_that_only_left_out_groups_tell_keep_all_their_rows(kept: int) -> None:
    """A client with a class of its own is left out with what it says of others' classes
    alone.
    """
    generator = torch.Generator().manual_seed(kept)

    def sums(*labels: int) -> ClassSums:
        features = (
            torch.randn(len(labels), 5, generator=generator, dtype=torch.float64) + 3
        )
        one_hot = torch.nn.functional.one_hot(torch.tensor(labels), 3).double()
        return ClassSums(one_hot.sum(0), one_hot.mT @ features, features.mT @ features)

    ours = sums(*[0, 1] * 20, *[2] * kept)
    theirs = sums(*[0] * 30, *[2] * 40)
    found = total_without([7], {4: ours, 7: theirs})
    told = kept < SCARCE
    assert found.counts.tolist() == [20, 20, kept + 40 * told]
    means = (ours.sums + theirs.sums * told)[2] / max(found.counts[2], 1)
    torch.testing.assert_close(found.means()[2], means)
    torch.testing.assert_close(found.means()[:2], ours.means()[:2])
    if (
        kept != SCARCE - 1
    ):  # With two means of the class, their distance adds to the covariance.
        torch.testing.assert_close(found.within(), ours.within())
