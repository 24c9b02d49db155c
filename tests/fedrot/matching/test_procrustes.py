"""Rotations of heads against scipy, random matrices and the conditions of an
optimum.
"""

import itertools

import numpy as np
import pytest
import scipy.linalg
import torch

from fedrot import AlignmentOptions, align, random_equivalent
from fedrot.errors import UpdateError
from fedrot.matching.procrustes import polar, singular_values
from fedrot.symmetry.actions import HeadRotation
from tests.fedrot.oracles import cross, eye, gap, normal, seeded
from tests.models import CASES, DIM, FEW, HEADS, near, state_of, symmetry_for

ROTATIONS = AlignmentOptions(parts=("attention",), chance=0)


@pytest.mark.parametrize("regime", ["near", "scrambled", "unrelated"])
@pytest.mark.parametrize("name", FEW)
def test_rotation_is_not_beaten(name, regime):
    """By 200 random orthogonal matrices, nor by any other: ``R^T M`` is symmetric and
    semi-definite.
    """
    names, anchor, symmetry = CASES[name].names, state_of(name), symmetry_for(name)
    update = state_of(name, 6) if regime == "unrelated" else near(anchor, 0.3)
    if regime == "scrambled":
        update = random_equivalent(update, symmetry, 2, ("attention",))
    alignment = align(update, anchor, symmetry, ROTATIONS)
    candidates = HeadRotation(200, DIM).random(seeded(3))
    for move in alignment.moves:
        pair = move.group.name.rsplit(".", 1)[1]
        for head in range(HEADS):
            m = cross(anchor, update, names, move.group.layer, head, pair)
            rotation = move.element[head].double()
            assert gap(rotation @ rotation.T, torch.eye(DIM)) <= 1e-12
            assert float((candidates * m).sum((1, 2)).max()) < float(
                (rotation * m).sum()
            )
            product = rotation.T @ m
            assert gap(product, product.T) <= 1e-9 * m.norm()
            assert float(torch.linalg.eigvalsh(product).min()) >= -1e-9 * float(
                m.norm()
            )
    assert len(alignment.moves) == 4


def test_polar_agrees_with_scipy_and_survives_degenerate_input():
    m = normal(seeded(4), 5, 3, DIM, DIM)
    ours = polar(m)
    for i, j in itertools.product(range(5), range(3)):
        expected, _ = scipy.linalg.polar(m[i, j].numpy())
        assert np.abs(ours[i, j].numpy() - expected).max() <= 1e-10
        assert singular_values(m)[i, j].sum() == pytest.approx(
            float((ours[i, j] * m[i, j]).sum())
        )
    assert torch.equal(polar(torch.zeros(DIM, DIM)).abs(), torch.eye(DIM))
    for flat in (torch.zeros(DIM, DIM), torch.ones(DIM, DIM), 1e-300 * torch.eye(DIM)):
        r = polar(flat.double())
        assert gap(r @ r.T, torch.eye(DIM)) <= 1e-12
    for solve in (polar, singular_values):
        with pytest.raises(UpdateError, match="overflows"):
            solve(m * torch.inf)


def test_an_svd_that_does_not_converge_is_done_by_another_driver(
    monkeypatch,
):
    m = normal(seeded(5), 2, DIM, DIM)
    expected = polar(m)

    def fails(_):
        raise RuntimeError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    assert gap(polar(m), expected) <= 1e-12


def test_rotation_moves_least_where_the_anchor_says_nothing():
    """Of all optimal rotations it takes the one nearest to the identity (half of a head
    is zero).
    """
    name = "bert-classifier"
    names = CASES[name].names
    anchor = state_of(name, dtype=torch.float32)
    update = state_of(name, 3, torch.float32)
    half = DIM // 2
    for module in ("query", "key"):
        for leaf in ("weight", "bias"):
            anchor[f"{names.of(0, module)}.{leaf}"][:half] = 0
    alignment = align(update, anchor, symmetry_for(name), ROTATIONS)
    found = next(
        m.element[0] for m in alignment.moves if m.group.name == "encoder.layer.0.qk"
    )
    m = cross(anchor, update, names, 0, 0, "qk").numpy()
    u, sigma, vh = np.linalg.svd(m)
    assert sigma[half] < 1e-12 < 1e-2 < sigma[half - 1]
    free, _ = scipy.linalg.polar(u[:, half:].T @ vh[half:].T)
    least = u[:, :half] @ vh[:half] + u[:, half:] @ free @ vh[half:]
    assert np.abs(found.double().numpy() - least).max() <= 1e-3


def _spectrum(action, size, exponent):
    """Return singular values of which the least is ``10 ** -exponent``, none or all are
    0 or tiny.
    """
    values = torch.logspace(-exponent, 0, size, dtype=torch.float64)
    if action == "one-small":
        values[1:] = 1.0
    elif action == "deficient":
        values[: size // 2] = 0
    return values * 10.0 ** (exponent - 6) if action == "other unit" else values


@pytest.mark.parametrize("action", ["spread", "one-small", "deficient", "other unit"])
@pytest.mark.parametrize("size", [8, 16, 64])
def test_iterated_rotations_are_as_good_as_those_of_the_svd(size, action):
    """Newton-Schulz in float32, with its fallback: at every condition number.

    One matrix a call, so that none is iterated further than it has to be for another's
    sake.
    """
    rng = seeded(size)
    unit = eye(size)
    for exponent in np.linspace(0, 12, 49 if size < 64 else 13):
        values = _spectrum(action, size, exponent)
        u, v = torch.linalg.qr(normal(rng, (2, size, size)))[0]
        m = u @ torch.diag(values) @ v
        rotation = polar(m[None], precise=False)[0]
        assert gap(rotation.T @ rotation, unit) <= 1e-8, exponent
        assert float((rotation * m).sum()) >= (1 - 1e-6) * float(values.sum()), exponent
        if exponent == 0 and action != "deficient":
            # Not by the fallback: this test would compare it with itself.
            assert not torch.equal(rotation, polar(m))
    assert torch.equal(polar(0 * m[None], precise=False)[0], unit)
