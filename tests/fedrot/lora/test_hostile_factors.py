"""Factors of any size hide no other client's product, and give no NaN."""

from itertools import product as every

import pytest
import torch

from fedrot.lora import AdapterUpdate, module_sums
from fedrot.lora.products import ProductSum
from tests.fedrot.lora.test_averaging import (
    EXACT,
    MODULES,
    SETTINGS,
    adapter,
    product,
)
from tests.fedrot.oracles import seeded


def sized(a, b, seed=3):
    return {
        n: t.float() * (a if "lora_A" in n else b) for n, t in adapter(seed).items()
    }


def average(*adapters, weight=1.0):
    found = EXACT.average(SETTINGS, sized(1, 1, 9))
    for tensors in adapters:
        found.add(AdapterUpdate(tensors, weight, SETTINGS))
    return found.result()[0]


@pytest.mark.parametrize("kept", [module_sums.KEPT_RANKS, 1])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0, 0),
        (1e-42, 1.0),
        (1e-40, 1e-6),
        (1.0, 1e-42),
        (1e-42, 1e-42),
        (1e-20, 1e5),
        (1e5, 1e5),
    ],
)
def test_factors_of_any_size_have_an_average(a, b, kept, monkeypatch):
    monkeypatch.setattr(module_sums, "KEPT_RANKS", kept)
    for place, weight in every((0, 2), (1e-9, 1e12)):
        sent = [sized(1, 1, seed) for seed in (1, 2)]
        sent.insert(place, sized(a, b))
        assert all(
            bool(t.isfinite().all()) for t in average(*sent, weight=weight).values()
        )


@pytest.mark.parametrize("limit", [6, 2])
@pytest.mark.parametrize("apart", [1e-6, 1e6, 1e-12, 1e12])
def test_unequal_factors_hide_no_other_product(apart, limit):
    """Each product has entries of about 1."""
    generator = seeded(0)
    total = ProductSum(limit)
    expected = torch.zeros(8, 9)
    b = torch.randn(8, 2, generator=generator)
    a = torch.randn(2, 9, generator=generator)
    for size, sign in ((1.0, 1.0), (apart, 2.0), (1.0, 3.0)):
        total.add(size * b, a / size, sign)
        expected += sign * b @ a
    found = total.terms().first(2)
    assert torch.allclose(
        (found.u * found.s) @ found.vt, expected, rtol=1e-4, atol=1e-4
    )


def test_a_tiny_product_is_none():
    found = average(sized(1e-42, 1e-42), sized(1e-42, 1e-42))
    assert all(float(product(found, module).norm()) < 1e-30 for module in MODULES)
