"""Totals of clients' class sums: the same bits in any order, and what is left out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from fedrot.task_head import ClassSums, sums
from fedrot.task_head.totals import LONGEST, SCARCE, Totals, total_without
from tests.fedrot.oracles import gap
from tests.fedrot.task_head.classifiers import CLASSES, sums_of


def drawn(seed, rows, scale=1.0):
    """Return sums over random rows, whose last feature hardly varies."""
    features = np.random.default_rng(seed).normal(size=(rows, 5))
    features[:, -1] *= 1e-32
    return sums_of(scale * features, np.arange(rows) % CLASSES)


def totals_of(clients, order):
    """Return the totals of clients that reply in an order."""
    totals = Totals({node: int(client.rows) for node, client in enumerate(clients)})
    for node in order:
        totals.add(node, clients[node])
    return totals


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(11)), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_totals_are_the_sums_of_capped_rows_in_any_order(order, scale):
    clients = [drawn(node, 12 if node else 90, scale) for node in range(11)]
    shares = [18 / 90, *[1.0] * 10]
    totals = totals_of(clients, order)
    groups = totals.groups()
    found = total_without((), groups)
    again = total_without((), totals_of(clients, range(11)).groups())
    for name in ("counts", "sums", "gram"):
        total = getattr(found, name)
        assert torch.equal(total, getattr(again, name))
        slow = sum(
            share * getattr(client, name)
            for share, client in zip(shares, clients, strict=True)
        )
        assert gap(total, slow) <= 2e-12 * slow.abs().max()
    # Clients 7 and 8 by number of rows, and so on, are in one group.
    rest = [node for node in range(11) if totals.group[node] != 2]
    slow = sum(shares[node] * clients[node].counts for node in rest)
    assert_close(total_without([2], groups).counts, slow)


@pytest.mark.parametrize("kept", [0, 9, 10])
def test_classes_that_only_left_out_groups_tell_keep_all_their_rows(kept):
    """A client with a class of its own is left out with what it says of others' classes
    alone.
    """
    rng = np.random.default_rng(kept)
    ours, others = (
        sums_of(rng.normal(size=(len(labels), 5)) + 3, np.array(labels))
        for labels in ([0, 1] * 20 + [2] * kept, [0] * 30 + [2] * 40)
    )
    found = total_without([7], {4: ours, 7: others})
    told = kept < SCARCE
    assert found.counts.tolist() == [20, 20, kept + 40 * told]
    means = (ours.sums + others.sums * told)[2] / max(found.counts[2], 1)
    assert_close(found.means()[2], means)
    assert_close(found.means()[:2], ours.means()[:2])
    # With two means of the class, their distance adds to the covariance.
    if kept != SCARCE - 1:
        assert_close(found.within(), ours.within())


@pytest.mark.parametrize(("times", "kept"), [(0.99, [0, 1, 2]), (1.01, [0, 1])])
def test_groups_of_features_longer_than_usual_are_left_out(times, kept):
    """The mean square of the third client's features is so many times the limit."""
    clients = [drawn(0, 40, scale) for scale in (1, 1, (times * LONGEST) ** 0.5)]
    assert [*totals_of(clients, range(3)).groups()] == kept


def test_sums_are_checked_once_for_each_client(monkeypatch):
    """Totals, groups and sums without a group are the server's own."""
    checked = []
    kind = sums.kind_named("gram")

    def count(value, shape):
        checked.append(value)
        return kind.check(value, shape)

    counting = type("Kind", (), {"check": staticmethod(count)})
    monkeypatch.setattr(sums, "kind_named", lambda name: counting)
    received = [
        ClassSums.unpacked(drawn(node, 40).packed(), (CLASSES, 5)) for node in range(8)
    ]
    groups = totals_of(received, range(8)).groups()
    for left_out in ([], *([group] for group in groups)):
        total_without(left_out, groups)
    # Each client checks what it has collected, and the server what it has received.
    assert len(checked) == 2 * 8
