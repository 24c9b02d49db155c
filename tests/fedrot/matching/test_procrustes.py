"""Rotations of heads against random matrices, gradient ascent and scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

import fedrot
from fedrot.matching.procrustes import polar
from tests.fedrot.oracles import cross, seeded
from tests.models import (
    CASES,
    DIM,
    FEW,
    HEADS,
    near,
    state_of,
    symmetry_for,
)

ROTATIONS = fedrot.AlignmentOptions(parts=("attention",), chance=0)


def _procrustes_value(rotation: Tensor, m: Tensor) -> float:
    return float((rotation * m).sum())


def _random_orthogonal(count: int, rng: torch.Generator) -> Tensor:
    """Return ``count`` orthogonal matrices, uniform on ``O(d)``, reflections included."""
    q, r = torch.linalg.qr(torch.randn(count, DIM, DIM, generator=rng, dtype=torch.float64))
    return q * torch.sign(torch.diagonal(r, dim1=1, dim2=2))[:, None]


def _ascend(m: Tensor, start: Tensor, steps: int) -> float:
    """Maximise ``<R, M>`` over ``R = start exp(A - A^T)`` by gradient ascent; return the best value."""
    skew = torch.zeros_like(m, requires_grad=True)
    optimiser = torch.optim.Adam([skew], lr=0.05)
    best = -float("inf")
    for _ in range(steps):
        value = ((start @ torch.matrix_exp(skew - skew.T)) * m).sum()
        best = max(best, float(value.detach()))
        optimiser.zero_grad()
        (-value).backward()
        optimiser.step()
    return best


@pytest.mark.parametrize("regime", ["near", "scrambled", "unrelated"])
@pytest.mark.parametrize("name", FEW)
def test_rotation_is_not_beaten(name: str, regime: str) -> None:
    """Neither by 200 random orthogonal matrices nor by gradient ascent on both sheets of ``O(d)``."""
    names = CASES[name].names
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    update = state_of(name, 6) if regime == "unrelated" else near(anchor, 0.3)
    if regime == "scrambled":
        update = fedrot.random_equivalent(update, symmetry, 2, ("attention",))
    alignment = fedrot.align(update, anchor, symmetry, ROTATIONS)
    rng = seeded(3)
    for move in alignment.moves:
        pair = move.group.name.rsplit(".", 1)[1]
        for head in range(HEADS):
            m = cross(anchor, update, names, move.group.layer, head, pair)
            rotation = move.element[head].double()
            assert (rotation @ rotation.T - torch.eye(DIM)).abs().max() <= 1e-12
            best = _procrustes_value(rotation, m)
            candidates = _random_orthogonal(200, rng)
            assert (candidates @ candidates.mT - torch.eye(DIM)).abs().max() <= 1e-12
            assert float((candidates * m).sum((1, 2)).max()) < best
            assert float(m.trace()) <= best
            # The gradient is zero at the optimum: R^T M is symmetric, and positive semi-definite.
            product = rotation.T @ m
            assert (product - product.T).abs().max() <= 1e-9 * m.norm()
            assert float(torch.linalg.eigvalsh(product).min()) >= -1e-9 * float(m.norm())
    assert len(alignment.moves) == 4


@pytest.mark.parametrize("kind", ["random", "near-identity", "reflected", "low-rank"])
def test_rotation_is_not_beaten_by_gradient_ascent(kind: str) -> None:
    rng = seeded(11)
    m = torch.randn(DIM, DIM, generator=rng, dtype=torch.float64)
    if kind == "near-identity":
        m = 3 * torch.eye(DIM, dtype=torch.float64) + 0.2 * m
    elif kind == "reflected":
        m = torch.diag(torch.tensor([-1.0] + [1.0] * (DIM - 1), dtype=torch.float64)) + 0.1 * m
    elif kind == "low-rank":
        m = torch.outer(m[0], m[1]) + torch.outer(m[2], m[3])
    best = _procrustes_value(polar(m), m)
    reached = []
    for start in range(3):
        rotation = _random_orthogonal(1, rng)[0]
        flipped = rotation.clone()
        flipped[0] = -flipped[0]
        reached += [_ascend(m, rotation, 250), _ascend(m, flipped, 250)]
        assert max(reached) <= best + 1e-9, start
    assert max(reached) >= best - 1e-2 * abs(best)


def test_polar_agrees_with_scipy_and_survives_degenerate_input() -> None:
    rng = seeded(4)
    m = torch.randn(5, 3, DIM, DIM, generator=rng, dtype=torch.float64)
    ours = polar(m)
    for i, j in itertools.product(range(5), range(3)):
        expected, _ = scipy.linalg.polar(m[i, j].numpy())
        assert np.abs(ours[i, j].numpy() - expected).max() <= 1e-10
    assert torch.equal(polar(torch.zeros(DIM, DIM)).abs(), torch.eye(DIM))
    for flat in (torch.zeros(DIM, DIM), torch.ones(DIM, DIM), 1e-300 * torch.eye(DIM)):
        r = polar(flat.double())
        assert (r @ r.T - torch.eye(DIM)).abs().max() <= 1e-12


def test_rotation_moves_least_where_the_anchor_says_nothing() -> None:
    """Of all optimal rotations it takes the one nearest to the identity (half of a head is zero)."""
    name = "bert-classifier"
    names = CASES[name].names
    anchor, update = state_of(name, dtype=torch.float32), state_of(name, 3, torch.float32)
    half = DIM // 2
    for module in ("query", "key"):
        for leaf in ("weight", "bias"):
            anchor[f"{names.of(0, module)}.{leaf}"][:half] = 0
    symmetry = symmetry_for(name)
    alignment = fedrot.align(update, anchor, symmetry, ROTATIONS)
    found = next(m.element[0] for m in alignment.moves if m.group.name == "encoder.layer.0.qk")
    m = cross(anchor, update, names, 0, 0, "qk").numpy()
    u, sigma, vh = np.linalg.svd(m)
    assert sigma[half] < 1e-12 < 1e-2 < sigma[half - 1]
    free, _ = scipy.linalg.polar(u[:, half:].T @ vh[half:].T)
    least = u[:, :half] @ vh[:half] + u[:, half:] @ free @ vh[half:]
    assert np.abs(least @ least.T - np.eye(DIM)).max() <= 1e-12
    assert np.abs(found.double().numpy() - least).max() <= 1e-3


def test_iterated_rotations_are_as_good_as_those_of_the_svd() -> None:
    """Newton-Schulz in float32, with its fallback: well and badly conditioned, deficient and zero."""
    rng = seeded(0)

    def orthogonal() -> Tensor:
        return torch.linalg.qr(torch.randn(16, 16, generator=rng, dtype=torch.float64))[0]

    spectra = [
        torch.ones(16),
        torch.linspace(0.5, 2, 16),
        torch.logspace(-3, 2, 16),
        torch.logspace(-12, 3, 16),
        torch.cat([torch.ones(9), torch.zeros(7)]),
        torch.zeros(16),
        torch.full((16,), 1e-20),
        torch.full((16,), 1e12),
    ]
    m = torch.stack([orthogonal() @ torch.diag(s.double()) @ orthogonal() for s in spectra])
    iterated, exact = polar(m, precise=False), polar(m)
    eye = torch.eye(16, dtype=torch.float64)
    assert ((iterated.mT @ iterated - eye).abs().amax() <= 1e-8).item()
    assert torch.equal(iterated[5], eye)
    reached, best = ((r * m).sum((-1, -2)) for r in (iterated, exact))
    assert ((best - reached) <= 1e-6 * best.abs()).all()
    # The easy ones must not have gone through the fallback, or this test would compare it with itself.
    assert not torch.equal(iterated[1], exact[1])


@pytest.mark.parametrize("spectrum", ["spread", "one-small"])
@pytest.mark.parametrize("size", [8, 16, 64])
def test_iterated_rotations_are_orthogonal_at_every_condition(size: int, spectrum: str) -> None:
    """One matrix a call, so that none is iterated further than it has to be for another's sake."""
    rng = seeded(size)
    eye = torch.eye(size, dtype=torch.float64)
    for exponent in np.linspace(2, 6, 41):
        smallest = 10.0**-exponent
        values = torch.logspace(-exponent, 0, size, dtype=torch.float64)
        if spectrum == "one-small":
            values = torch.tensor([1.0] * (size - 1) + [smallest], dtype=torch.float64)
        u, v = torch.linalg.qr(torch.randn(2, size, size, generator=rng, dtype=torch.float64))[0]
        m = u @ torch.diag(values) @ v
        rotation = polar(m[None], precise=False)[0]
        assert (rotation.T @ rotation - eye).abs().max() <= 1e-8, exponent
        assert float((rotation * m).sum()) >= (1 - 1e-9) * float(values.sum()), exponent
