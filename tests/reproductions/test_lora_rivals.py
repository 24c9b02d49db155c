"""Rivals' averages against their dense formulas: residuals, stacks, frozen and
alternating factors.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora import AdapterOptions, AdapterUpdate, average_adapters
from fedrot.matching.procrustes import polar
from reproductions.lora_clients import first_directions
from reproductions.lora_rivals import RivalOptions
from tests.fedrot.lora.test_averaging import (
    MODULES,
    SETTINGS,
    adapter,
    dense_mean,
    drawing,
    factor,
    product,
    updates,
)
from tests.simulations.tensors import equal

FOLDED = [
    RivalOptions("mean", residual="fold"),
    RivalOptions("rotate", strength=0.4, residual="fold"),
    RivalOptions("exact", "keep-a", residual="fold"),
    RivalOptions("exact", "none", residual="fold"),
    RivalOptions("stack", residual="fold"),
]


def factors(tensors, module):
    return tensors[factor(module)], tensors[factor(module, "B")]


def whole(tensors, module):
    """Return the product with the residual of a module."""
    return tensors[f"{module}.residual"] + product(tensors, module)


def averaged(
    adapters,
    options,
    previous,
    server_round=1,
):
    average = options.average(SETTINGS, previous, server_round)
    for update in updates(adapters):
        average.add(update)
    return average.result()[0]


@pytest.mark.parametrize("options", FOLDED, ids=str)
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_factors_and_residual_are_the_mean_product(options, seed):
    """FedEx-LoRA, FLoRA: nothing of the mean product is lost, over two rounds."""
    start = adapter(seed)
    total = {module: product(start, module) for module in MODULES}
    for server_round in (1, 2):
        sent = [adapter(seed + 10 * server_round + i, start=start) for i in range(3)]
        sent = [{n: t for n, t in a.items() if "residual" not in n} for a in sent]
        found = averaged(sent, options, start, server_round)
        for module in MODULES:
            # Clients have the base weights that they received, and their own products.
            base = total[module] - product(start, module)
            total[module] = base + dense_mean(updates(sent), module)
            assert torch.allclose(whole(found, module), total[module], atol=1e-10)
        start = found


@pytest.mark.parametrize("method", ["mean", "exact", "stack"])
def test_residuals_lose_nothing_of_many_clients(method):
    """Far more terms than a bounded sum would keep."""
    start = adapter(0)
    sent = [adapter(i) for i in range(1, 20)]
    given = updates(sent, [1.0] * 19)
    options = RivalOptions(method, residual="fold")
    found, report = average_adapters(given, SETTINGS, options, start)
    for module in MODULES:
        mean = dense_mean(given, module)
        assert torch.allclose(whole(found, module), mean, atol=1e-10)
        assert report.lost[module] == 0


def test_a_stack_begins_anew():
    options = RivalOptions("stack", residual="fold")
    start = adapter(0)
    sent = [adapter(i) for i in range(3)]
    first, again, later = (averaged(sent, options, start, n) for n in (1, 1, 2))
    for module, (width, _) in MODULES.items():
        a, b = factors(first, module)
        assert not b.any()
        assert a.abs().max() <= width**-0.5
        assert a.std() > 0.4 * width**-0.5
        assert torch.equal(a, again[factor(module)])
        assert not torch.equal(a, later[factor(module)])


@pytest.mark.parametrize(
    ("schedule", "number", "frozen"),
    [("freeze-a", 2, "A"), ("alternate", 1, "A"), ("alternate", 2, "B")],
)
def test_a_frozen_factor_stays_and_the_mean_is_exact(schedule, number, frozen):
    start = adapter(0)
    kept = {factor(module, frozen): start[factor(module, frozen)] for module in MODULES}
    sent = [adapter(i) | kept for i in (1, 2)]
    options = RivalOptions("mean", schedule=schedule)
    found = averaged(sent, options, start, number)
    assert equal(found, kept)
    for module in MODULES:
        assert torch.allclose(
            product(found, module), dense_mean(updates(sent), module), atol=1e-12
        )
    with pytest.raises(
        UpdateError, match=r"is not the one that the client received.*train_only"
    ):
        averaged([adapter(3)], options, start, number)


@pytest.mark.parametrize(("server_round", "kept"), [(1, "A"), (2, "B")])
def test_rotations_by_one_factor_in_turns(server_round, kept):
    """FedRot-LoRA: odd rounds rotate by A, even rounds by B, softly."""
    start = adapter(0)
    given = adapter(1)
    options = RivalOptions("rotate", strength=0.4, by="alternate")
    found = averaged([given], options, start, server_round)
    for module in MODULES:
        to = start[factor(module, kept)]
        moved = given[factor(module, kept)]
        m = to @ moved.mT if kept == "A" else to.mT @ moved
        r = polar(0.6 * torch.eye(3, dtype=torch.float64) + 0.4 * polar(m))
        a, b = factors(given, module)
        torch.testing.assert_close(
            factors(found, module), (r @ a, b @ r.mT), atol=1e-10, rtol=0
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "median"}, "'median' of adapters; one of mean, exact"),
        ({"gauge": "best"}, "Unknown gauge 'best'"),
        ({"residual": "keep"}, "'keep' of adapters; one of drop, fold"),
        ({"schedule": "never"}, "Unknown schedule 'never'"),
        ({"by": "C"}, "Unknown by 'C'"),
        (
            {"method": "exact", "schedule": "freeze-a"},
            "method 'exact' changes both factors",
        ),
        ({"method": "stack"}, "Give residual='fold'"),
        (
            {"method": "mean", "schedule": "freeze-a", "residual": "fold"},
            "there is nothing to fold",
        ),
        ({"strength": 1.5}, "strength is 1.5; it is a number from 0 to 1"),
        (
            {"method": "rotate", "strength": "0.4"},
            "strength is '0.4'; it is a number from 0 to 1",
        ),
        ({"limit": 0}, "limit is 0; it is a rank, 1 at least"),
        ({"method": "mean", "gauge": "mean"}, "gauge is an option of 'exact'"),
        ({"method": "exact", "by": "alternate"}, "by is an option of method 'rotate'"),
    ],
)
def test_options_are_checked(options, said):
    with pytest.raises(FedrotError, match=said):
        RivalOptions(**options)
    assert str(RivalOptions("mean", residual="fold")) == "mean, residual 'fold'"


def test_smaller_factors_are_padded_with_zeros():
    """HetLoRA: the mean of padded factors, and clients that keep the first
    directions.
    """
    start = adapter(0, 4)
    ranks = (2, 4, 1)
    sent = [adapter(i, rank) for i, rank in enumerate(ranks)]
    found = averaged(sent, RivalOptions("pad"), start)
    for module, (width, outputs) in MODULES.items():
        a = torch.zeros(4, width, dtype=torch.float64)
        b = torch.zeros(outputs, 4, dtype=torch.float64)
        for tensors, weight, rank in zip(sent, (1, 2, 5), ranks, strict=True):
            short, narrow = factors(tensors, module)
            a[:rank] += weight / 8 * short
            # In units of the result's scale, alpha / 4.
            b[:, :rank] += weight / 8 * narrow * 4 / rank
        padded = factors(found, module)
        torch.testing.assert_close(padded, (a, b), atol=1e-12, rtol=0)
        cut = first_directions(found, SETTINGS, adapter(0, 2))
        assert torch.equal(cut[factor(module)], padded[0][:2])
        first = SETTINGS.scale(module, 4) * padded[1][:, :2] @ padded[0][:2]
        assert torch.allclose(product(cut, module), first, atol=1e-12)
    with pytest.raises(UpdateError, match="Give it as previous"):
        average_adapters(updates(sent), SETTINGS, RivalOptions("pad"))


def test_rotation_undoes_rotations():
    """Clients with one adapter in rotated coordinates average to it; the mean of
    factors does not.
    """
    start = adapter(1)
    clients = []
    for seed in range(3):
        r, _ = torch.linalg.qr(drawing(seed)(3, 3))
        client = dict(start)
        for module in MODULES:
            client[factor(module)] = r @ start[factor(module)]
            client[factor(module, "B")] = start[factor(module, "B")] @ r.mT
        clients.append(client)
    average = partial(average_adapters, updates(clients), SETTINGS, previous=start)
    found, report = average(RivalOptions("rotate"))
    torch.testing.assert_close(found, start, atol=1e-10, rtol=0)
    assert max(report.error.values()) < 1e-6
    _, plain = average(AdapterOptions("mean"))
    assert min(plain.error.values()) > 0.05
    # The report tells what rotating has spared.
    assert report.error_of_factors == pytest.approx(plain.error_of_factors)
    _, still = average(RivalOptions("rotate", strength=0.0))
    assert still.error == pytest.approx(plain.error)


def test_a_low_rank_mean_of_many_is_exact_within_the_limit():
    start = adapter(0)
    clients = [
        {n: (i + 1) * t if "_B" in n else t for n, t in start.items()}
        for i in range(40)
    ]
    asked = [AdapterUpdate(client, 1.0, SETTINGS) for client in clients]
    found, report = average_adapters(asked, SETTINGS, RivalOptions("exact", limit=3))
    for module in MODULES:
        assert torch.allclose(
            product(found, module), dense_mean(asked, module), atol=1e-8
        )
    assert max(report.lost.values()) < 1e-12
