"""Models of single sites beside loops over their rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from typer.testing import CliRunner

from fedrot.task_head.fit import fitted_task_heads
from fedrot.task_head.site_head import site_head
from reproductions.heads import __main__, closed, sites
from reproductions.heads.arms import ARMS, Arm
from reproductions.heads.cell import CLIENTS
from reproductions.heads.federation import epoch
from reproductions.heads.rounds import average, clients_of, play_all
from tests.reproductions.bert import small_federation

RATES = dict.fromkeys(sites.RATES, 1e-3)


@pytest.fixture
def world():
    return sites.Sites(small_federation(), 2, RATES)


def test_weights_of_test_rows_are_shares_of_a_site(world):
    cell = world.cell
    weights = sites.own_weights(cell).numpy()
    tested = cell.labels[cell.test]
    for site in range(CLIENTS):
        labels = cell.labels[: len(cell.client)][cell.client == site]
        for c in range(cell.classes):
            share = weights[site][tested == c].sum()
            assert share == pytest.approx((labels == c).mean())


def test_only_test_rows_of_its_corpus_count_for_a_site(world):
    cell = world.cell
    cell.corpus = np.concatenate([cell.client % 2, np.arange(len(cell.test)) % 2])
    weights = sites.own_weights(cell).numpy()
    assert weights.sum(1) == pytest.approx(1)
    for site in range(CLIENTS):
        of_corpus = cell.corpus[cell.test] == site % 2
        assert not weights[site][~of_corpus].any()
        labels = cell.labels[cell.test][of_corpus & (weights[site] > 0)]
        assert set(labels) <= set(cell.labels[: len(cell.client)][cell.client == site])


def test_measures_are_those_of_a_loop_over_rows(world):
    cell = world.cell
    generator = torch.Generator().manual_seed(0)
    shape = (CLIENTS, len(cell.test), cell.classes)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    weights, tested = sites.own_weights(cell), cell.labels[cell.test]
    for row in sites.measured(cell, logits):
        own, scores = weights[row["site"]].numpy(), logits[row["site"]]
        chances = scores.softmax(1).numpy()
        right = chances.argmax(1) == tested
        assert row["accuracy"] == pytest.approx(sum(own * right))
        losses = -np.log(chances[range(len(tested)), tested])
        assert row["loss"] == pytest.approx(sum(own * losses))
        recalls = []
        for c in set(tested[own > 0]):
            of_class = own * (tested == c)
            recalls.append(sum(of_class * right) / sum(of_class))
        assert row["balanced"] == pytest.approx(np.mean(recalls))
        sure, error = chances.max(1), 0.0
        for k in range(10):
            inside = (sure >= k / 10) & (sure < (k + 1) / 10)
            error += abs(sum((own * (right - sure))[inside]))
        assert row["ece"] == pytest.approx(error)


def test_a_gain_has_the_error_of_a_weighted_mean():
    weights = torch.tensor([0.5, 0.25, 0.25]).double()
    right = torch.tensor([1.0, 0, 1]).double()
    mean, error = sites.gain(weights, right, torch.tensor([0.0, 0, 1]).double())
    assert mean == 0.5
    assert error == pytest.approx(np.sqrt(0.25 * 0.25 + 2 * 0.0625 * 0.25))


def test_a_mixture_without_own_means_is_the_head_of_all_with_own_priors(world):
    training = world.cell.training
    features = world.features(world.federation.start)
    part = world.sums(features, 1)
    features = features[training]
    total = world.federation.sums(features, training)
    (weight,), (bias,) = fitted_task_heads(total, [0.3])
    shifted = site_head((weight, bias), total.counts / total.rows, part.counts)
    mixed = fitted_task_heads(sites._mixture(part, total, 0.0), [0.3])
    expected = closed.scores(features, shifted).softmax(1)
    assert_close(closed.scores(features, mixed)[0].softmax(1), expected)
    # With all of its own, means and covariance are the site's.
    whole = sites._mixture(part, total, 1.0)
    assert_close(whole.within(), part.within())
    known = part.counts > 0
    assert_close(whole.means()[known], part.means()[known])


def test_a_refined_head_has_no_gradient_left(world):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (30,), generator=generator)
    head = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    change = sites._fitted_change(inputs, labels, head, 2.0).requires_grad_()
    loss = cross_entropy(inputs @ (head + change).mT, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss + 2 * change.square().sum(), change)
    assert gradient.abs().max() < 1e-4
    assert change.abs().max() > 0.01


def test_alone_is_an_epoch_a_round_of_own_rows(world):
    logits = world.alone()
    rows = np.concatenate([world.cell.batches(n)[3] for n in (1, 2)])
    assert set(world.cell.client[rows]) == {3}
    flat, _ = epoch(world.federation.loss, world.federation.start, rows, Arm(1e-3))
    features = world.federation.features(flat, world.cell.test)
    expected = closed.scores(features, world.federation.head(flat))
    assert_close(logits[3], expected)


@pytest.mark.parametrize("rate", [1e-3, 30.0])
def test_held_out_rows_choose_how_long_a_site_trains(world, rate):
    world.rates = {"finetuning": rate}
    logits = world.finetuned("fedavg")
    model = world.played("fedavg")
    features = world.features(model.flat)[world.cell.test]
    before = closed.scores(features, model.head)
    kept = [torch.allclose(of_site, before, atol=1e-3) for of_site in logits]
    assert all(kept) if rate > 1 else not all(kept)


def test_fedrep_averages_bodies_that_are_trained_with_fixed_heads(world):
    world.rounds = 1
    federation, cell = world.federation, world.cell
    size, clients = federation.size, clients_of(world.cell, 1)
    body, first = federation.start[:-size], federation.start[-size:]
    features = world.features(federation.start)
    bodies = []
    for site in clients:
        head = world.head_trained(features, first, site, 1)
        assert not torch.equal(head, first)

        def loss(flat, rows, head=head):
            return federation.loss(torch.cat([flat, head]), rows)

        bodies.append(epoch(loss, body, cell.batches(1)[site], Arm(1e-3))[0])
    mean = federation.mean(bodies, clients)
    world.logits = list
    for end in world.fedrep():
        assert_close(end[:-size], mean)


def test_priors_of_a_trained_head_are_those_of_the_clients_that_trained(world):
    counts = torch.from_numpy(world.cell.counts).double()
    trained = [*clients_of(world.cell, 1), *clients_of(world.cell, 2)]
    assert_close(world.counts("fedavg"), counts[trained].sum(0))
    assert_close(world.counts("step0"), counts.sum(0))


def test_a_played_arm_is_that_of_its_rounds(world):
    model = world.played("fedavg")
    fitted = play_all(world.federation, ARMS["fedavg+fit"], 2)
    assert_close(world.played("fedavg+fit").flat, fitted.flat)
    flat = world.federation.start
    for number in (1, 2):
        zeros = [torch.zeros_like(flat)] * (CLIENTS + 1)
        flat = average(world.federation, ARMS["fedavg"], flat, zeros, number)
    assert_close(model.flat, flat)
    assert_close(play_all(world.federation, ARMS["fedavg"], 2).flat, flat)


def test_rows_have_the_gain_over_the_stronger_way_alone(world, monkeypatch, tmp_path):
    federation, cell = world.federation, world.cell
    monkeypatch.setattr(__main__, "federation_of", lambda *_, **__: federation)
    loaded = []

    def load(*place, **sizes):
        loaded.append((*place, sizes["size"], sizes["tests"], sizes["clients"]))
        return cell

    monkeypatch.setattr("reproductions.heads.cell.load", load)
    monkeypatch.setattr("fedrot.simulations.pretrained.source_of", lambda _: ".")
    lines, out = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"

    def call(*arguments):
        result = CliRunner().invoke(__main__.app, [*map(str, arguments)])
        assert not result.exception, result.output
        return result.output

    given = ("--data-dir", ".", "--out", lines, "--rounds", 1)
    call("sites", "sst2", 0.3, 5, *given, "--size", 230, "--tests", 100)
    call("sites-gains", lines, out, "--data-dir", ".")
    assert loaded == [("sst2", 0.3, 5, 230, 100, 8)]
    every = pd.read_parquet(out)
    rows = every[every["site"] >= 0]
    assert {*sites.SITE_ARMS} <= {*rows["arm"]}
    assert (rows.groupby("arm", observed=True).size() == CLIENTS).all()
    table = rows.pivot_table("accuracy", "site", "arm", observed=True)
    stronger = table[["alone", "alone-head"]].mean().idxmax()
    assert {*rows["than"]} == {stronger}
    gains = rows[rows["arm"] == "fedavg/own"].set_index("site")["gain"]
    expected = table["fedavg/own"] - table[stronger]
    np.testing.assert_allclose(gains, expected, atol=1e-6)
    assert (rows[rows["arm"] == stronger][["gain", "error"]] == 0).all(axis=None)
    of_all = every[every["site"] < 0].set_index("arm")
    measured = federation.measure(play_all(federation, ARMS["step0"], 1))
    assert of_all.loc["step0", "macro_f1"] == pytest.approx(measured["macro_f1"])
    assert "fedavg+finetuning" in call("sites-table", out)
