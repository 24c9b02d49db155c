"""The line between two models, and the barrier on it against what a hand computes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.interpolation import Barrier, interpolate, loss_barrier

ONE, OTHER = {"x": torch.tensor([-1.0])}, {"x": torch.tensor([2.0])}


def square(state: Mapping[str, Tensor]) -> dict[str, float]:
    x = float(state["x"])
    return {"accuracy": -x, "loss": -(x**2)}


def test_the_barrier_of_a_parabola() -> None:
    # x = -1 + 3 t, loss -x^2: ends -1 and -4, highest at t = 1/3, which is not among 21 points; of
    # those the nearest, t = 0.35, has x = 0.05.
    barrier = loss_barrier(square, ONE, OTHER)
    assert len(barrier.positions) == 21
    assert barrier.positions[0] == 0
    assert barrier.positions[-1] == 1
    assert barrier.barrier == pytest.approx(-0.0025 + 2.5, abs=1e-6)
    assert barrier.at(0.5)["loss"] == pytest.approx(-0.25, abs=1e-6)
    assert barrier.at(0.5) == pytest.approx({"accuracy": -0.5, "loss": -0.25})
    assert barrier.at(0)["loss"] == pytest.approx(-1)
    assert barrier.above_ends == pytest.approx(-0.0025 + 1, abs=1e-6)
    assert loss_barrier(square, ONE, OTHER, points=4).barrier == pytest.approx(2.5, abs=1e-6)


def test_a_valley_has_the_barrier_of_its_higher_end() -> None:
    barrier = loss_barrier(lambda state: {"loss": float(state["x"]) ** 2}, ONE, OTHER)
    assert barrier.barrier == pytest.approx(4 - 2.5)
    assert barrier.above_ends == 0
    assert barrier.at(0.35)["loss"] == pytest.approx(0.0025, abs=1e-6)
    assert loss_barrier(lambda _: {"loss": 3.0}, ONE, OTHER).barrier == 0


def test_another_metric_and_another_path() -> None:
    barrier = loss_barrier(square, ONE, OTHER, points=3, metric="accuracy", path=lambda a, b, t: dict(a))
    assert barrier.metric == "accuracy"
    assert barrier.barrier == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_model_shows_in_the_barrier(value: float) -> None:
    rows = tuple({"loss": loss} for loss in (1.0, value, 1.0))
    found = Barrier((0.0, 0.5, 1.0), rows).barrier
    assert found == pytest.approx(value, nan_ok=True)


def test_positions_that_were_not_measured_are_refused() -> None:
    barrier = loss_barrier(square, ONE, OTHER, points=4)
    with pytest.raises(FedrotError, match="odd number of points"):
        barrier.at(0.5)


@pytest.mark.parametrize("points", [2, 0, -1])
def test_fewer_than_three_points_are_refused(points: int) -> None:
    with pytest.raises(FedrotError, match=f"points is {points}"):
        loss_barrier(square, ONE, OTHER, points=points)


def test_a_missing_metric_is_named() -> None:
    with pytest.raises(FedrotError, match="accuracy, but not 'loss'"):
        loss_barrier(lambda _: {"accuracy": 1.0}, ONE, OTHER)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_ends_are_exact_and_dtypes_stay(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = ({"w": torch.randn(50, generator=generator).to(dtype)} for _ in range(2))
    assert torch.equal(interpolate(a, b, 0)["w"], a["w"])
    assert torch.equal(interpolate(a, b, 1)["w"], b["w"])
    middle = interpolate(a, b, 0.3)["w"]
    assert middle.dtype == dtype
    exact = (0.7 * a["w"].double() + 0.3 * b["w"].double()).to(dtype)
    assert torch.allclose(middle, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_half_precision_is_interpolated_in_float32() -> None:
    # 40000 - (-40000) overflows float16.
    a, b = ({"w": torch.tensor([x], dtype=torch.float16)} for x in (-40000, 40000))
    assert interpolate(a, b, 0.75)["w"].item() == 20000


def test_integers_are_the_first_models_and_nothing_is_shared() -> None:
    a = {"ids": torch.tensor([1, 2]), "w": torch.zeros(2, requires_grad=True)}
    b = {"ids": torch.tensor([5, 6]), "w": torch.ones(2)}
    found = interpolate(a, b, 0.0)
    assert found["ids"].tolist() == [1, 2]
    assert not found["w"].requires_grad
    found["ids"][0] = 9
    found["w"][0] = 9
    assert a["ids"].tolist() == [1, 2]
    assert a["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, "'x' is missing"),
        ({"x": torch.zeros(2)}, r"'x' has shape \[2\]"),
        ({"x": torch.zeros(1), "y": torch.zeros(1)}, "'y' is not part"),
    ],
)
def test_other_models_are_refused(other: dict[str, Tensor], expected: str) -> None:
    with pytest.raises(UpdateError, match=expected):
        interpolate(ONE, other, 0.5)
