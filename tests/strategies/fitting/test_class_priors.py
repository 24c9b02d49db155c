"""Shares of classes: those in a fitted bias, and those that clients are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedrot
from fedrot.strategies import class_priors
from fedrot.strategies.wire.fitting_messages import COUNTS
from tests.strategies.fakes import failure, grid_of
from tests.strategies.fitting.classifiers import edited
from tests.strategies.fitting.feature_clients import client, drawn, fitted
from tests.strategies.fitting.site_cases import CASES, priors_of, sites_of
from tests.strategies.fitting.test_liars import lie


def telling(node, edit):
    return edited(node, lambda a: a[COUNTS].update(counts=edit(a[COUNTS]["counts"])))


def shares_of(nodes, kind):
    return class_priors(grid_of(nodes), kind.config, timeout=1)


@pytest.mark.parametrize("name", ["single", "multi", "regression", "tokens"])
def test_shares_are_those_of_all_training_rows(name):
    kind = CASES[name]
    sites = sites_of(kind)
    grid = grid_of(site.node() for site in sites)
    assert class_priors(grid, kind.config) == pytest.approx(priors_of(sites))
    assert (name == "regression") == (grid.asked == [])


def test_one_liar_of_four_moves_no_share_by_more_than_a_third():
    kind = CASES["single"]
    (site,) = sites_of(kind, 1)
    nodes = [replace(site, training=kind.rows(seed, 60)).node() for seed in range(4)]
    liar = telling(nodes[0], lambda counts: torch.tensor([0.0, 1e12, 0.0]).double())
    honest, others = (
        torch.tensor(shares_of([first, *nodes[1:]], kind)) for first in (nodes[0], liar)
    )
    assert 0.2 < float((others - honest).abs().max()) < 1 / 3


@pytest.mark.parametrize("name", ["single", "multi"])
def test_counts_that_are_none_are_left_out(name, warnings):
    kind = CASES[name]
    sites = sites_of(kind, 2)
    nodes = [site.node() for site in sites]
    edits = [
        lambda counts: -counts,
        lambda counts: counts * torch.nan,
        lambda counts: counts + 0.5,
        lambda counts: counts * 1e13,
        lambda counts: counts[:2],
        lambda counts: counts.float(),
    ]
    # A label has no more rows than there are.
    edits += [lambda counts: counts.roll(1)] if name == "multi" else []
    liars = [telling(nodes[0], edit) for edit in edits]
    assert shares_of([*nodes, *liars], kind) == shares_of(nodes, kind)
    assert warnings().count(": The counts are") == len(edits)
    empty = {tensor: value[:0] for tensor, value in sites[0].training.items()}
    for node, word in (
        (replace(sites[0], training=empty).node(), "training rows"),
        (failure, "usable answer"),
    ):
        with pytest.raises(fedrot.FedrotError, match=word):
            shares_of([node], kind)


def test_priors_of_a_fitted_head_leave_out_the_sums_that_it_leaves_out():
    """A liar with labels turned is a group of its own; rows are capped."""
    shares = torch.tensor([0.6, 0.3, 0.1]).double()
    sizes = [60, 60, 60, 60, 400]
    honest = [client(seed, n, shares=shares) for seed, n in enumerate(sizes)]
    counts = [
        torch.bincount(drawn(seed, n, shares)[1], minlength=3) * min(1, 90 / n)
        for seed, n in enumerate(sizes)
    ]
    whole = fitted(honest, trusted=True)
    assert whole.priors == pytest.approx((sum(counts) / 330).tolist())
    liar = client(9, 60, shares=shares, lie=lie("labels turned", "honest", 1))
    without = fitted([*honest[:4], liar])
    assert without.fitted
    assert without.priors == pytest.approx((sum(counts[:4]) / 240).tolist())
