"""Averages of changes against dense float64 systems, and in cells of a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedrot.aggregation import Mean
from fedrot.collect.statistics import STATISTIC_KINDS
from fedrot.errors import FedrotError, UpdateError
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.grid_run import run_job
from reproductions.ace import Ace
from reproductions.averages import AverageArm, AverageStrategy
from reproductions.changes import OfChanges, Scaled, body_layers
from reproductions.output_grams import OUTPUT_GRAMS, OUTPUTS
from tests.reproductions.test_task_heads import SMALL

QUERY, KEY = "bert.layer.0.self.query.weight", "bert.layer.0.self.key.weight"
UP, POOLER, HEAD = "bert.layer.0.up.weight", "bert.pooler.dense.weight", "classifier.weight"
TABLE, BIAS = "bert.embeddings.words.weight", "bert.layer.0.up.bias"
SHAPES = {
    **{QUERY: (3, 4), KEY: (3, 4), UP: (5, 4), POOLER: (4, 4), HEAD: (2, 4)},
    **{TABLE: (6, 4), BIAS: (5,)},
}
State = dict[str, Tensor]


def model(rng: np.random.Generator, dtype: torch.dtype = torch.float64) -> State:
    return {name: torch.tensor(rng.normal(size=shape), dtype=dtype) for name, shape in SHAPES.items()}


def clients(seed: int, count: int = 3) -> tuple[State, list[tuple[State, float]]]:
    rng = np.random.default_rng(seed)
    return model(rng), [(model(rng), float(rng.choice([0.5, 2.0, 30.0]))) for _ in range(count)]


def added(aggregator: OfChanges, start: State, updates: list[tuple[State, float]]) -> Any:
    aggregator.start = start
    for update, weight in updates:
        aggregator.add(update, weight)
    return aggregator


def dense(
    start: State, updates: list[tuple[State, float]], name: str, same: list[str], ridge: float
) -> Any:
    """Solve the normal equations of all entries of one layer at once, as a Kronecker system."""
    total = sum(weight for _, weight in updates)
    rows, columns = SHAPES[name]
    mean = sum(weight / total * update[name].numpy() for update, weight in updates)
    estimates = []
    for update, _ in updates:
        changes = np.concatenate([(update[one] - start[one]).numpy() for one in same])
        estimates.append(sum(np.outer(row, row) for row in changes) / (changes**2).sum())
    shared = sum(weight / total * s for (_, weight), s in zip(updates, estimates, strict=True))
    damping = ridge * np.trace(shared) / columns
    left, right = damping * np.eye(rows * columns), damping * mean.ravel()
    for (update, weight), s in zip(updates, estimates, strict=True):
        block = weight / total * np.kron(np.eye(rows), s)
        left, right = left + block, right + block @ update[name].numpy().ravel()
    return np.linalg.solve(left, right).reshape(rows, columns)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31), ridge=st.sampled_from([1e-3, 0.1, 1.0, 30.0]), count=st.integers(1, 4)
)
def test_ace_solves_the_dense_system(seed: int, ridge: float, count: int) -> None:
    start, updates = clients(seed, count)
    found = added(Ace(ridge), start, updates).result()
    whole = added(Ace(ridge, head=1, shared=0), start, updates).result()
    mean = Mean()
    for update, weight in updates:
        mean.add(update, weight)
    for name, plain in mean.result().items():
        same = [QUERY, KEY] if name in (QUERY, KEY) else [name]
        solved = name in (QUERY, KEY, UP)
        expected = dense(start, updates, name, same, ridge) if solved else plain.numpy()
        np.testing.assert_allclose(found[name], expected, atol=1e-8)
        solved = solved or name in (POOLER, HEAD)
        expected = dense(start, updates, name, [name], ridge) if solved else plain.numpy()
        np.testing.assert_allclose(whole[name], expected, atol=1e-8)


def test_changes_in_different_directions_of_the_inputs_add_up() -> None:
    start, _ = clients(0)
    updates = []
    for place in range(4):
        change = torch.zeros(5, 4, dtype=torch.float64)
        change[:, place] = torch.arange(1.0, 6.0)
        updates.append(({**start, UP: start[UP] + change}, 1.0))
    found = added(Ace(1e-9), start, updates).result()
    torch.testing.assert_close(
        found[UP] - start[UP], torch.arange(1.0, 6.0).double()[:, None].expand(5, 4)
    )
    far = added(Ace(1e9), start, updates).result()
    torch.testing.assert_close(far[UP] - start[UP], (found[UP] - start[UP]) / 4)


def test_a_layer_that_nobody_changes_stays() -> None:
    start, updates = clients(3)
    updates = [({**update, UP: start[UP]}, weight) for update, weight in updates]
    torch.testing.assert_close(added(Ace(), start, updates).result()[UP], start[UP], atol=1e-12, rtol=0)


@pytest.mark.parametrize("factor", [0.0, 1.0, 2.5])
def test_scaled_is_a_step_along_the_mean_change(factor: float) -> None:
    start, updates = clients(1)
    found = added(Scaled(factor), start, updates).result()
    total = sum(weight for _, weight in updates)
    for name in SHAPES:
        mean = sum(weight / total * update[name] for update, weight in updates)
        scale = factor if name in (QUERY, KEY, UP) else 1.0
        expected = start[name] + scale * (mean - start[name])
        torch.testing.assert_close(found[name], expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("build", [Ace, Scaled])
def test_what_does_not_fit_is_refused_and_changes_nothing(build: Any) -> None:
    start, updates = clients(2)
    with pytest.raises(FedrotError, match=f"{build.__name__} needs the broadcast model"):
        build().add(*updates[0])
    aggregator = added(build(), start, updates[:1])
    before = aggregator.result()
    fewer = {name: tensor for name, tensor in start.items() if name != BIAS}
    for bad in (fewer, {**start, UP: torch.zeros(4, 5).double()}):
        with pytest.raises(UpdateError):
            aggregator.add(bad, 1.0)
    with pytest.raises(UpdateError):
        aggregator.add(start, -1.0)
    for name, tensor in aggregator.result().items():
        assert torch.equal(tensor, before[name])
    assert {tensor.dtype for tensor in before.values()} == {torch.float64}


def test_values_that_are_not_finite_and_no_ridge_are_refused() -> None:
    start, updates = clients(2)
    aggregator = added(Ace(), start, updates)
    before = aggregator.result()
    with pytest.raises(UpdateError, match=r"'bert\.layer\.0\.up\.bias' holds NaN"):
        aggregator.add({**start, BIAS: torch.full((5,), float("nan")).double()}, 1.0)
    assert torch.equal(aggregator.result()[UP], before[UP])
    with pytest.raises(FedrotError, match="ridge is 0"):
        Ace(0.0)


def test_layers_of_the_body() -> None:
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    assert body_layers(state) == [QUERY, KEY, UP]
    assert body_layers(state, head=True) == [QUERY, KEY, UP, POOLER, HEAD]


def test_the_names_of_arms() -> None:
    arm = Arm.parse("plain/ace(ridge=0.1;shared=0)+task-head")
    assert isinstance(arm, AverageArm)
    assert (arm.average, arm.fits_task_head) == ("ace", True)
    assert arm.given == {"ridge": 0.1, "shared": 0.0}
    assert arm.strategy is Arm.parse("plain/kfac").strategy is AverageStrategy
    assert Arm.parse("plain/regmean").strategy is None
    config = SimulationConfig.from_flat({"arms": f"plain, {arm.name}"})
    assert config.cells()[1][2] == arm


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("plain/ace(alpha=1)", "'ace' has no argument 'alpha'"),
        ("plain/ace(ridge=0)+task-head", "ridge is 0"),
        ("plain/scaled(factor)", "not of the form KEY=VALUE"),
        ("aligned/ace", "unknown aggregation 'ace'"),
    ],
)
def test_arms_that_are_none_are_refused_with_their_name(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as failure:
        Arm.parse(name)
    assert f"arm '{name}'" in str(failure.value)


def test_cells_know_the_broadcast_model_and_ask_for_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """With factor 1 the rows are those of the mean; with factor 0 they are not."""
    monkeypatch.setitem(STATISTIC_KINDS, OUTPUTS, OUTPUT_GRAMS)  # It is gone after the test.
    config = SimulationConfig(**{**SMALL, "rounds": 2})
    averages = ("scaled(factor=1)", "scaled(factor=0)", "ace", "kfac", "fisher-damped")
    told = [(config.to_json(), 0, "same", f"plain/{name}") for name in averages]
    told.insert(0, (config.to_json(), 0, "same", "plain"))
    losses = []
    for _, rows, _, failure in run_job(told, Path("nowhere"), "of no folder here"):
        assert not failure
        central = [row for row in rows.rows if row["scope"] == "central" and row["metric"] == "loss"]
        losses.append([row["value"] for row in central])
    assert [len(of_arm) for of_arm in losses] == [3] * 6
    assert len({of_arm[0] for of_arm in losses}) == 1
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-5)
    for of_arm in losses[2:]:
        assert abs(of_arm[1] - losses[0][1]) > 1e-5
