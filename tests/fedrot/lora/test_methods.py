"""Rivals' averages against their dense formulas: residuals, stacks, frozen and alternating factors."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora import AdapterOptions, adapter_tensors, average_adapters, fitted
from fedrot.lora.averaging import AdapterAverage
from fedrot.matching.procrustes import polar
from tests.fedrot.lora.test_averaging import (
    MODULES,
    SETTINGS,
    Adapter,
    adapter,
    dense_mean,
    product,
    updates,
)

A, B = "lora_A.weight", "lora_B.weight"
FOLDED = [
    AdapterOptions("mean", residual="fold"),
    AdapterOptions("rotate", strength=0.4, residual="fold"),
    AdapterOptions("exact", "keep-a", residual="fold"),
    AdapterOptions("exact", "none", residual="fold"),
    AdapterOptions("stack", residual="fold"),
]


def averaged(
    adapters: list[Adapter], options: AdapterOptions, previous: Adapter, server_round: int = 1
) -> Adapter:
    average = AdapterAverage(SETTINGS, options, previous, server_round)
    for update in updates(adapters):
        average.add(update)
    return average.result()[0]


@pytest.mark.parametrize("options", FOLDED, ids=str)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_factors_and_residual_are_the_mean_product(options: AdapterOptions, seed: int) -> None:
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
            now = found[f"{module}.residual"] + product(found, module)
            assert torch.allclose(now, total[module], atol=1e-10)
        start = found


@pytest.mark.parametrize("method", ["mean", "exact", "stack"])
def test_residuals_lose_nothing_of_many_clients(method: str) -> None:
    """Far more terms than a bounded sum would keep."""
    start, sent = adapter(0), [adapter(i) for i in range(1, 20)]
    average = AdapterAverage(SETTINGS, AdapterOptions(method, residual="fold"), start)
    given = updates(sent, [1.0] * 19)
    for update in given:
        average.add(update)
    found, report = average.result()
    for module in MODULES:
        now = found[f"{module}.residual"] + product(found, module)
        assert torch.allclose(now, dense_mean(given, module), atol=1e-10)
        assert report.lost[module] == 0


def test_a_bounded_sum_keeps_four_times_the_largest_rank() -> None:
    """Whatever the order of the clients; what it loses is said."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rank: int) -> Adapter:
        a, b = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((rank, 60), (50, rank))
        )
        return {"m.lora_A.weight": a, "m.lora_B.weight": b}

    clients = [drawn(rank) for rank in (1, 4, 4, 4, 4)]
    for order in (clients, clients[::-1]):
        found, report = average_adapters(
            updates(order, [1.0] * 5), SETTINGS, AdapterOptions("exact"), rank=17
        )
        assert report.lost == {"m": 0.0}
        dense = torch.stack([product(c, "m") for c in clients]).mean(0)
        assert torch.allclose(product(found, "m"), dense, atol=1e-10)
    many = [drawn(2) for _ in range(20)]
    _, report = average_adapters(updates(many, [1.0] * 20), SETTINGS, AdapterOptions("exact"))
    assert report.lost["m"] > 0.1
    assert "; estimates, as the sum of bounded rank leaves out" in str(report)


@pytest.mark.parametrize("method", ["mean", "exact"])
@pytest.mark.parametrize("apart", [0.3, 1.0])
def test_errors_of_many_adapters_are_near_the_true_ones(method: str, apart: float) -> None:
    """A bounded sum leaves out a part of the mean product, which the errors have to contain."""
    generator = torch.Generator().manual_seed(3)
    start = [
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 60), (50, 3))
    ]
    clients = []
    for _ in range(40):
        a, b = (
            t + apart * torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in start
        )
        clients.append({"m.lora_A.weight": a, "m.lora_B.weight": b})
    found, report = average_adapters(updates(clients, [1.0] * 40), SETTINGS, AdapterOptions(method))
    dense = torch.stack([product(client, "m") for client in clients]).mean(0)
    true = float(torch.linalg.norm(product(found, "m") - dense) / torch.linalg.norm(dense))
    assert report.lost["m"] > true / 2
    assert report.error["m"] == pytest.approx(true, rel=0.05)


def test_a_stack_begins_anew() -> None:
    options = AdapterOptions("stack", residual="fold")
    start, sent = adapter(0), [adapter(i) for i in range(3)]
    first, again, later = (averaged(sent, options, start, n) for n in (1, 1, 2))
    for module, (width, _) in MODULES.items():
        a = first[f"{module}.{A}"]
        assert not first[f"{module}.{B}"].any()
        assert a.abs().max() <= width**-0.5
        assert a.std() > 0.4 * width**-0.5
        assert torch.equal(a, again[f"{module}.{A}"])
        assert not torch.equal(a, later[f"{module}.{A}"])


def test_a_stack_begins_anew_as_peft_starts_embeddings() -> None:
    table = peft.get_peft_model(
        torch.nn.Sequential(torch.nn.Embedding(400, 64)), peft.LoraConfig(r=8, target_modules=["0"])
    )
    start = adapter_tensors(table)
    found = averaged([start], AdapterOptions("stack", residual="fold"), start)
    a, b = (f"base_model.model.0.lora_embedding_{factor}" for factor in "AB")
    assert not found[a].any()
    assert float(found[b].std()) == pytest.approx(float(start[b].std()), rel=0.2)


@pytest.mark.parametrize(
    ("schedule", "server_round", "frozen"),
    [("freeze-a", 1, A), ("freeze-a", 2, A), ("alternate", 1, A), ("alternate", 2, B)],
)
def test_a_frozen_factor_stays_and_the_mean_is_exact(
    schedule: str, server_round: int, frozen: str
) -> None:
    start = adapter(0)
    sent = [{n: start[n] if n.endswith(frozen) else t for n, t in adapter(i).items()} for i in (1, 2)]
    options = AdapterOptions("mean", schedule=schedule)
    found = averaged(sent, options, start, server_round)
    for module in MODULES:
        assert torch.equal(found[f"{module}.{frozen}"], start[f"{module}.{frozen}"])
        assert torch.allclose(product(found, module), dense_mean(updates(sent), module), atol=1e-12)
    with pytest.raises(UpdateError, match=r"is not the one that the client received.*train_only"):
        averaged([adapter(3)], options, start, server_round)


@pytest.mark.parametrize(("server_round", "kept"), [(1, A), (2, B)])
def test_rotations_by_one_factor_in_turns(server_round: int, kept: str) -> None:
    """FedRot-LoRA: odd rounds rotate by A, even rounds by B, softly."""
    start, given = adapter(0), adapter(1)
    options = AdapterOptions("rotate", strength=0.4, by="alternate")
    found = averaged([given], options, start, server_round)
    for module in MODULES:
        to, own = start[f"{module}.{kept}"], given[f"{module}.{kept}"]
        m = to @ own.mT if kept == A else to.mT @ own
        r = polar(0.6 * torch.eye(3, dtype=torch.float64) + 0.4 * polar(m))
        assert torch.allclose(found[f"{module}.{A}"], r @ given[f"{module}.{A}"], atol=1e-10)
        assert torch.allclose(found[f"{module}.{B}"], given[f"{module}.{B}"] @ r.mT, atol=1e-10)


def test_ranks_may_differ_in_stacks() -> None:
    asked = updates([adapter(i, r) for i, r in enumerate((2, 4, 1))])
    options = AdapterOptions("stack", residual="fold")
    found, report = average_adapters(asked, SETTINGS, options)
    for module, (width, _) in MODULES.items():
        assert found[f"{module}.{A}"].shape == (4, width)
        assert torch.allclose(found[f"{module}.residual"], dense_mean(asked, module), atol=1e-10)
        assert report.error[module] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"method": "median"},
            "Unknown method 'median' of adapters; one of mean, pad, rotate, exact, stack",
        ),
        ({"gauge": "best"}, "Unknown gauge 'best'"),
        ({"residual": "keep"}, "Unknown residual 'keep' of adapters; one of drop, fold"),
        ({"schedule": "never"}, "Unknown schedule 'never'"),
        ({"by": "C"}, "Unknown by 'C'"),
        ({"method": "exact", "schedule": "freeze-a"}, "method 'exact' changes both factors"),
        ({"method": "stack"}, "Give residual='fold'"),
        ({"method": "mean", "schedule": "freeze-a", "residual": "fold"}, "there is nothing to fold"),
        ({"strength": 1.5}, "strength is 1.5; it is a number from 0 to 1"),
        ({"method": "rotate", "strength": "0.4"}, "strength is '0.4'; it is a number from 0 to 1"),
        ({"limit": 0}, "limit is 0; it is a rank, 1 at least"),
        (
            {"method": "mean", "gauge": "mean"},
            "gauge is an option of method 'exact', and does nothing with 'mean'",
        ),
        ({"method": "exact", "by": "alternate"}, "by is an option of method 'rotate'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FedrotError, match=said):
        AdapterOptions(**options)


def test_smaller_factors_are_padded_with_zeros() -> None:
    """HetLoRA: the mean of padded factors, and clients that keep the first directions."""
    start, ranks = adapter(0, 4), (2, 4, 1)
    sent = [adapter(i, rank) for i, rank in enumerate(ranks)]
    found = averaged(sent, AdapterOptions("pad"), start)
    for module, (width, outputs) in MODULES.items():
        a = torch.zeros(4, width, dtype=torch.float64)
        b = torch.zeros(outputs, 4, dtype=torch.float64)
        for tensors, weight, rank in zip(sent, (1, 2, 5), ranks, strict=True):
            a[:rank] += weight / 8 * tensors[f"{module}.{A}"]
            # In units of the result's scale, alpha / 4.
            b[:, :rank] += weight / 8 * tensors[f"{module}.{B}"] * 4 / rank
        assert torch.allclose(found[f"{module}.{A}"], a, atol=1e-12)
        assert torch.allclose(found[f"{module}.{B}"], b, atol=1e-12)
        cut = fitted(found, SETTINGS, 2, best=False)
        assert torch.equal(cut[f"{module}.{A}"], found[f"{module}.{A}"][:2])
        first = SETTINGS.scale(module, 4) * found[f"{module}.{B}"][:, :2] @ found[f"{module}.{A}"][:2]
        assert torch.allclose(product(cut, module), first, atol=1e-12)
    with pytest.raises(UpdateError, match="Give it as previous"):
        average_adapters(updates(sent), SETTINGS, AdapterOptions("pad"))
