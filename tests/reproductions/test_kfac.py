"""Least squares in Kronecker factors against dense systems, and its factors against loops over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrot
import reproductions.kfac
from fedrot.aggregation import RegMean
from fedrot.collect.gram import collect_gram
from fedrot.collect.statistics import STATISTIC_KINDS, check_statistics
from fedrot.errors import FedrotError, UpdateError
from reproductions.kfac import KFac
from reproductions.output_grams import OUTPUT_GRAMS, OUTPUTS, collect_output_grams
from tests.models import EAGER, near
from tests.strategies.aggregating import DOWN, HEAD, UP, batches, loaded
from tests.strategies.classifier import SYMMETRY, state

SHAPES = {"bert.up.weight": (3, 4), "bert.up.bias": (3,), "classifier.weight": (2, 3)}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the kind for one test: pages list the kinds of fedrot alone."""
    monkeypatch.setitem(STATISTIC_KINDS, OUTPUTS, OUTPUT_GRAMS)


def clients(seed: int, count: int) -> list[tuple[Any, float, Any]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        update = {name: torch.tensor(rng.normal(size=shape)) for name, shape in SHAPES.items()}
        x, g = rng.normal(size=(6, 4)), 10.0 ** rng.uniform(-3, 3) * rng.normal(size=(5, 3))
        grams = {"gram": {"bert.up.weight": torch.tensor(x.T @ x)}}
        grams[OUTPUTS] = {"bert.up.weight": torch.tensor(g.T @ g)}
        found.append((update, float(rng.choice([0.5, 1.0, 20.0])), grams))
    return found


def merged(given: list[tuple[Any, float, Any]], *arguments: float) -> tuple[Any, KFac]:
    kfac = KFac(*arguments)
    for client in given:
        kfac.add(*client)
    return kfac.result(), kfac


def dense(given: list[tuple[Any, float, Any]], ridge: float, shrinkage: float) -> Any:
    """Solve for all entries of the layer at once."""
    name, total = "bert.up.weight", sum(weight for _, weight, _ in given)
    left, right, sizes, mean = np.zeros((12, 12)), np.zeros(12), 0.0, np.zeros((3, 4))
    for update, weight, statistics in given:
        a, b = statistics["gram"][name].numpy(), statistics[OUTPUTS][name].numpy()
        a = np.where(np.eye(4) > 0, a, 0.9 * a)
        b = (1 - shrinkage) * b / np.trace(b) * 3 + shrinkage * np.eye(3)
        block = weight * np.kron(b, a)
        left, right = left + block, right + block @ update[name].numpy().ravel()
        sizes += np.trace(block) / 12
        mean += weight / total * update[name].numpy()
    left, right = left + ridge * sizes * np.eye(12), right + ridge * sizes * mean.ravel()
    return np.linalg.solve(left, right).reshape(3, 4)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 4),
    ridge=st.sampled_from([0.01, 1.0]),
    shrinkage=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_kfac_solves_the_dense_system(seed: int, count: int, ridge: float, shrinkage: float) -> None:
    given_ = clients(seed, count)
    found, kfac = merged(given_, ridge, shrinkage)
    np.testing.assert_allclose(found["bert.up.weight"], dense(given_, ridge, shrinkage), atol=1e-4)
    assert not kfac.notes
    total = sum(weight for _, weight, _ in given_)
    for name in ("bert.up.bias", "classifier.weight"):
        expected = sum(weight / total * update[name] for update, weight, _ in given_)
        torch.testing.assert_close(found[name], expected)


def test_without_gradients_it_is_regmean() -> None:
    given_ = clients(5, 3)
    found, _ = merged(given_, 1e-9, 1.0)
    regmean = RegMean()
    for update, weight, statistics in given_:
        regmean.add(update, weight, {"gram": statistics["gram"]})
    np.testing.assert_allclose(found["bert.up.weight"], regmean.result()["bert.up.weight"], atol=1e-4)


def test_a_solver_that_is_stopped_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproductions.kfac, "STEPS", 1)
    _, kfac = merged(clients(1, 4), 0.01, 0.0)
    assert kfac.notes == {"bert.up.weight": "conjugate gradients stopped after 1 steps"}


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    (update, weight, statistics), other = clients(0, 2)
    kfac = KFac()
    kfac.add(update, weight, statistics)
    before = kfac.result()["bert.up.weight"]
    for bad in ({}, {"gram": statistics["gram"]}, {OUTPUTS: statistics[OUTPUTS]}):
        with pytest.raises(UpdateError, match=r"no Kronecker factors of 'bert\.up\.weight'"):
            kfac.add(other[0], other[1], bad)
    wrong = {**statistics, OUTPUTS: {"bert.up.weight": torch.eye(4)}}
    with pytest.raises(UpdateError, match=r"output_gram statistics of 'bert\.up\.weight' have shape"):
        kfac.add(other[0], other[1], wrong)
    assert torch.equal(kfac.result()["bert.up.weight"], before)
    for ridge, shrinkage in ((0.0, 0.5), (1.0, 1.5)):
        with pytest.raises(FedrotError, match="ridge is"):
            KFac(ridge, shrinkage)


def test_factors_of_the_outputs_are_those_of_a_loop_over_rows() -> None:
    model, data = loaded(state()), batches(3, rows=4)
    found = collect_output_grams(model, data, seed=7)[OUTPUTS]
    model.eval()
    with torch.no_grad():
        shares = model(**data[0]).logits.softmax(-1)
    drawn = torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(7))
    for name in (UP, DOWN, HEAD[0]):
        layer = model.get_submodule(name.removesuffix(".weight"))
        total = 0
        for row in range(4):
            kept: list[Any] = []
            hook = layer.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output))
            logits = model(**{key: value[row : row + 1] for key, value in data[0].items()}).logits
            hook.remove()
            (gradient,) = torch.autograd.grad(logits.log_softmax(-1)[0, int(drawn[row])], kept)
            for token in gradient.reshape(-1, gradient.shape[-1]).double().numpy():
                total = total + np.outer(token, token) / 4
        np.testing.assert_allclose(found[name], total, rtol=1e-3, atol=1e-6 * np.abs(total).max())
    check_statistics({OUTPUTS: found}, {n: tuple(t.shape) for n, t in model.state_dict().items()})
    assert not model.training
    assert found.keys() == collect_gram(model, data)["gram"].keys()
    with pytest.raises(FedrotError, match="No rows"):
        collect_output_grams(model, [])


def test_factors_of_the_outputs_cannot_be_moved() -> None:
    model, data = loaded(state()), batches(3, rows=2)
    found = collect_output_grams(model, data)
    alignment = fedrot.align(near(state(), 0.1), state(), SYMMETRY, EAGER)
    with pytest.raises(FedrotError, match="leave alignment out"):
        alignment.transport(found)
