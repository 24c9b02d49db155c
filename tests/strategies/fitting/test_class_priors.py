"""Shares of classes: those in a fitted bias, and those that clients are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord

import fedrot
from fedrot.strategies import class_priors
from fedrot.strategies.wire.fitting_messages import COUNTS
from tests.strategies.fakes import failure, grid_of, tensors_of
from tests.strategies.fitting.feature_clients import client, drawn, fitted
from tests.strategies.fitting.site_cases import CASES, pooled_priors, sites_of
from tests.strategies.fitting.test_liars import lie


def telling(node, edit):
    def answer(message):
        found = node(message)
        if COUNTS in found.content:
            counts = tensors_of(found.content[COUNTS])["counts"]
            found.content[COUNTS] = ArrayRecord({"counts": edit(counts)})
        return found

    return answer


@pytest.mark.parametrize("name", ["single", "multi", "regression", "tokens"])
def test_shares_are_those_of_all_training_rows(name):
    kind = CASES[name]
    sites = sites_of(kind)
    grid = grid_of(site.node() for site in sites)
    found = class_priors(grid, kind.config)
    assert found == pytest.approx(pooled_priors(sites))
    assert (name == "regression") == (grid.asked == [])


def test_one_liar_of_four_moves_no_share_by_more_than_a_third():
    kind = CASES["single"]
    rows = [kind.rows(seed, 60) for seed in range(4)]
    site = sites_of(kind, 1)[0]
    nodes = [replace(site, training=own).node() for own in rows]
    honest = torch.tensor(class_priors(grid_of(nodes), kind.config))
    told = torch.tensor([0.0, 1e12, 0.0]).double()
    liars = [telling(nodes[0], lambda counts: told), *nodes[1:]]
    found = torch.tensor(class_priors(grid_of(liars), kind.config))
    others = honest * 4 / 3
    assert 0.2 < float((found - honest).abs().max()) < 1 / 3
    assert bool((found > 0.5 * others - 0.2).all())


@pytest.mark.parametrize(
    "edit",
    [
        lambda counts: -counts,
        lambda counts: counts * torch.nan,
        lambda counts: counts + 0.5,
        lambda counts: counts * 1e13,
        lambda counts: counts[:2],
        lambda counts: counts.float(),
    ],
    ids=["negative", "NaN", "parts", "many", "another shape", "float32"],
)
@pytest.mark.parametrize("name", ["single", "multi"])
def test_counts_that_are_none_are_left_out(name, edit, warnings):
    kind = CASES[name]
    sites = sites_of(kind)
    nodes = [site.node() for site in sites]
    found = class_priors(
        grid_of([*nodes[:2], telling(nodes[2], edit)]), kind.config, timeout=1
    )
    assert found == class_priors(grid_of(nodes[:2]), kind.config)
    assert "Client 102: The counts are" in warnings()


def test_more_of_a_label_than_rows_are_no_counts_and_no_rows_an_error(warnings):
    kind = CASES["multi"]
    site = sites_of(kind, 1)[0]
    nodes = [site.node(), telling(site.node(), lambda counts: counts.roll(1))]
    assert class_priors(grid_of(nodes), kind.config) == pytest.approx(
        pooled_priors([site])
    )
    assert "Client 101: The counts are" in warnings()
    empty = {name: value[:0] for name, value in site.training.items()}
    for node, word in (
        (replace(site, training=empty).node(), "training rows"),
        (failure, "usable answer"),
    ):
        with pytest.raises(fedrot.FedrotError, match=word):
            class_priors(grid_of([node]), kind.config)


def test_priors_of_a_fitted_head_leave_out_the_sums_that_it_leaves_out():
    """A liar with labels turned is a group of its own; rows are capped."""
    shares = torch.tensor([0.6, 0.3, 0.1]).double()
    sizes = [60, 60, 60, 60, 400]
    honest = [client(seed, n, shares=shares) for seed, n in enumerate(sizes)]
    found = fitted(honest, trusted=True)
    counts = [
        torch.bincount(drawn(seed, n, shares)[1], minlength=3) * min(1, 90 / n)
        for seed, n in enumerate(sizes)
    ]
    assert found.priors == pytest.approx((sum(counts) / 330).tolist())
    liar = client(9, 60, shares=shares, lie=lie("labels turned", "honest", 1))
    without = fitted([*honest[:4], liar])
    total = sum(counts[:4])
    assert without.fitted
    assert without.priors == pytest.approx((total / total.sum()).tolist())
    assert fitted(honest[:2]).priors != found.priors
