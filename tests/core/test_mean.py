"""The running mean against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.aggregation import Mean


def _updates(dtype: torch.dtype, count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "weight": torch.randn(3, 5, generator=generator).to(dtype),
            "scale": torch.randn((), generator=generator).to(dtype),
            "steps": torch.tensor([i, 7]),
            "mask": torch.tensor([True, i == 0]),
        }
        for i in range(count)
    ]


def _fold(updates: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    mean = Mean()
    for update, weight in zip(updates, weights, strict=True):
        mean.add(update, weight)
    return mean.result()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)],
)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0, 1.0], [10.0, 0.5, 3.0, 1e3], [7, 1, 2, 3]])
def test_mean_equals_a_plain_loop(dtype: torch.dtype, tolerance: float, weights: list[float]) -> None:
    updates = _updates(dtype)
    result = _fold(updates, weights)
    for name in ("weight", "scale"):
        expected = np.zeros(updates[0][name].shape)
        for update, weight in zip(updates, weights, strict=True):
            expected = expected + weight / sum(weights) * update[name].double().numpy()
        assert result[name].dtype == dtype
        assert np.abs(result[name].double().numpy() - expected).max() <= tolerance


def test_sums_are_kept_in_float32_for_half_precision() -> None:
    """A sum in float16 would overflow at 65504 and lose every small term."""
    updates = [{"w": torch.full((4,), 60000.0, dtype=torch.float16)} for _ in range(8)]
    updates += [{"w": torch.full((4,), 1.0, dtype=torch.float16)} for _ in range(8)]
    result = _fold(updates, [1.0] * 16)
    assert result["w"].tolist() == [30000.0] * 4


def test_integers_and_booleans_are_the_first_update_s() -> None:
    updates = _updates(torch.float32)
    result = _fold(updates, [1.0, 2.0, 3.0, 4.0])
    assert torch.equal(result["steps"], updates[0]["steps"])
    assert torch.equal(result["mask"], updates[0]["mask"])
    assert list(result) == list(updates[0])


def test_inputs_are_not_changed_and_results_share_nothing() -> None:
    updates = _updates(torch.float32)
    kept = [{k: v.clone() for k, v in update.items()} for update in updates]
    mean = Mean()
    mean.add(updates[0], 1.0)
    only = mean.result()
    for name in only:
        assert torch.equal(only[name], kept[0][name])
        only[name].zero_()
    mean.add(updates[1], 3.0)
    later = mean.result()
    expected = (kept[0]["weight"] + 3 * kept[1]["weight"]) / 4
    assert (later["weight"] - expected).abs().max() <= 1e-6
    later["weight"].zero_()
    assert (mean.result()["weight"] - expected).abs().max() <= 1e-6
    for before, now in zip(kept, updates, strict=True):
        assert all(torch.equal(before[k], now[k]) for k in before)


def test_gradients_are_not_recorded() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    result = _fold([{"w": parameter}, {"w": parameter}], [1.0, 1.0])
    assert not result["w"].requires_grad


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_positive_is_refused(weight: float) -> None:
    with pytest.raises(fedrot.UpdateError, match="weight"):
        Mean().add(_updates(torch.float32)[0], weight)


def test_an_empty_mean_is_refused() -> None:
    with pytest.raises(fedrot.UpdateError, match="Nothing was added"):
        Mean().result()


def test_a_refused_update_leaves_the_mean_as_it_was() -> None:
    first, second, *_ = _updates(torch.float64)
    mean = Mean()
    mean.add(first, 2.0)
    bad: list[tuple[dict[str, Tensor], float]] = [
        ({k: v for k, v in second.items() if k != "scale"}, 1.0),
        ({**second, "more": torch.ones(1)}, 1.0),
        ({**second, "weight": torch.ones(3, 4)}, 1.0),
        (second, 0.0),
    ]
    for update, weight in bad:
        with pytest.raises(fedrot.UpdateError):
            mean.add(update, weight)
    mean.add(second, 6.0)
    expected = (2 * first["weight"] + 6 * second["weight"]) / 8
    assert (mean.result()["weight"] - expected).abs().max() <= 1e-14
