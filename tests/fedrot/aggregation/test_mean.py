"""The running mean against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedrot
from fedrot.aggregation import Mean
from tests.fedrot.oracles import Array


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


def test_integers_and_booleans_are_averaged_and_rounded() -> None:
    result = _fold(_updates(torch.float32), [1.0, 2.0, 3.0, 4.0])
    assert result["steps"].tolist() == [2, 7]
    assert result["mask"].tolist() == [True, False]
    assert [result[name].dtype for name in ("steps", "mask")] == [torch.int64, torch.bool]
    assert list(result) == list(_updates(torch.float32)[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_means_of_the_largest_and_smallest_integers(dtype: torch.dtype) -> None:
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ends = {"steps": torch.tensor([least, most], dtype=dtype)}
    found = _fold([ends, ends], [1.0, 3.0])["steps"].tolist()
    assert found[0] == least
    # float64 holds integers up to 2 ** 53 exactly.
    assert 0 <= most - found[1] <= (1024 if dtype == torch.int64 else 0)
    other = {"steps": torch.tensor([most, least], dtype=dtype)}
    middle = _fold([ends, other], [1.0, 1.0])["steps"].double()
    assert (middle - (least + most) / 2).abs().max() <= 0.5


# Rows that only some clients trained


Masks = dict[str, Tensor]


def _masked(
    updates: list[dict[str, Tensor]], weights: list[float], masks: list[Masks | None]
) -> dict[str, Tensor]:
    mean = Mean()
    for update, weight, mask in zip(updates, weights, masks, strict=True):
        mean.add(update, weight, None if mask is None else {"trained": mask})
    return mean.result()


def _rows_oracle(
    values: list[Tensor], weights: list[float], masks: list[Tensor | None], row: int
) -> Array:
    """Return one row: the mean over those who trained it, over all where nobody did."""
    trained = [mask is None or bool(mask if mask.ndim == 0 else mask[row]) for mask in masks]
    counted = trained if any(trained) else [True] * len(values)
    top, bottom = np.zeros(values[0].shape[1:]), 0.0
    for value, weight, counts in zip(values, weights, counted, strict=True):
        if counts:
            top, bottom = top + weight * value[row].double().numpy(), bottom + weight
    return np.asarray(top / bottom)


_MASK = st.sampled_from(["no statistics", "other tensor", "scalar", "rows", "rows", "rows"])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kinds=st.lists(_MASK, min_size=1, max_size=4),
    shape=st.sampled_from([(4,), (4, 3), (4, 2, 3), (1, 2)]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]),
)
def test_rows_are_averaged_over_the_clients_that_trained_them(
    seed: int, kinds: list[str], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Masks may come late, from some clients only, and differ in kind from client to client."""
    rng = np.random.default_rng(seed)
    updates, weights, masks = [], [], []
    for kind in kinds:
        updates.append({k: torch.tensor(rng.normal(size=shape)).to(dtype) for k in ("w", "other")})
        weights.append(float(rng.choice([0.5, 1.0, 8.0, 300.0])))
        rows = torch.tensor(rng.random(shape[0]) < 0.4)
        mask = rows if kind == "rows" else rows[0]
        name = "other" if kind == "other tensor" else "w"
        masks.append(None if kind == "no statistics" else {name: mask})
    result = _masked(updates, weights, masks)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    for name in ("w", "other"):
        assert (result[name].dtype, result[name].shape) == (dtype, torch.Size(shape))
        own = [(m or {}).get(name) for m in masks]
        for row in range(shape[0]):
            expected = _rows_oracle([u[name] for u in updates], weights, own, row)
            found = result[name][row].double().numpy()
            assert np.abs(found - expected).max() <= tolerance * max(1, np.abs(expected).max())


@pytest.mark.parametrize("trained", [[True, True], [True, False], [False, False]])
def test_a_scalar_tensor_can_be_masked_and_stays_a_scalar(trained: list[bool]) -> None:
    updates = [{"scale": torch.tensor(2.0)}, {"scale": torch.tensor(8.0)}]
    result = _masked(updates, [1.0, 2.0], [{"scale": torch.tensor(t)} for t in trained])
    assert result["scale"].shape == ()
    expected = {(True, True): 6.0, (True, False): 2.0, (False, False): 6.0}[tuple(trained)]  # type: ignore[index]
    assert result["scale"].item() == pytest.approx(expected)


@pytest.mark.parametrize("masked", [True, False])
def test_sums_are_kept_in_float32_for_half_precision(masked: bool) -> None:
    """A sum in float16 would overflow at 65504 and lose every small term."""
    updates = [{"w": torch.full((2, 3), 60000.0, dtype=torch.float16)} for _ in range(8)]
    updates += [{"w": torch.full((2, 3), 1.0, dtype=torch.float16)} for _ in range(8)]
    masks: list[Masks | None] = [{"w": torch.tensor([True, i < 8 or not masked])} for i in range(16)]
    result = _masked(updates, [1.0] * 16, masks if masked else [None] * 16)
    assert result["w"].tolist() == [[30000.0] * 3, [60000.0 if masked else 30000.0] * 3]


def test_masks_of_integer_tensors_change_nothing() -> None:
    updates = _updates(torch.float32)
    rows = torch.tensor([True, False])
    result = _masked(updates, [1.0] * 4, [{"steps": rows, "mask": rows}] * 4)
    expected = _fold(updates, [1.0] * 4)
    assert torch.equal(result["steps"], expected["steps"])
    assert torch.equal(result["mask"], expected["mask"])


def test_the_last_result_is_the_same_and_takes_no_copy() -> None:
    updates = _updates(torch.float32)
    mean, other = Mean(), Mean()
    for weight, update in enumerate(updates, 1):
        mean.add(update, weight)
        other.add(update, weight)
    held = {name: tensor.data_ptr() for name, tensor in mean.current.items()}
    expected, found = other.result(), mean.result("cpu", last=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    places = {name: t.data_ptr() for name, t in found.items() if t.is_floating_point()}
    assert places == {name: held[name] for name in ("weight", "scale")}
    with pytest.raises(fedrot.UpdateError, match="Nothing was added"):
        mean.result()
