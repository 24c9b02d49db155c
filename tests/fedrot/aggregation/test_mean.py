"""Means of tensors of every dtype and shape, and of rows that only some clients have trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedrot
from fedrot.aggregation import Fisher, Mean
from tests.fedrot.oracles import Array

Masks = dict[str, Tensor]


def folded(updates: list[dict[str, Tensor]], weights: list[float], masks: Any = None) -> Mean:
    mean = Mean()
    for index, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        mean.add(update, weight, {"trained": masks[index]} if masks else None)
    return mean


def mixed(count: int = 4) -> list[dict[str, Tensor]]:
    return [
        {
            "weight": torch.full((3, 5), float(i)),
            "scale": torch.tensor(2.0 * i),
            "steps": torch.tensor([i, 7]),
            "mask": torch.tensor([True, i == 0]),
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("masked", [False, True], ids=["", "masks of integers change nothing"])
def test_integers_and_booleans_are_averaged_and_rounded(masked: bool) -> None:
    rows = torch.tensor([True, False])
    masks = [{"steps": rows, "mask": rows}] * 4 if masked else None
    result = folded(mixed(), [1.0, 2.0, 3.0, 4.0], masks).result()
    assert result["steps"].tolist() == [2, 7]
    assert result["mask"].tolist() == [True, False]
    assert [tensor.dtype for tensor in result.values()] == [t.dtype for t in mixed()[0].values()]
    assert list(result) == list(mixed()[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_means_of_the_largest_and_smallest_integers(dtype: torch.dtype) -> None:
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ends = {"steps": torch.tensor([least, most], dtype=dtype)}
    found = folded([ends, ends], [1.0, 3.0]).result()["steps"].tolist()
    assert found[0] == least
    # float64 holds integers up to 2 ** 53 exactly.
    assert 0 <= most - found[1] <= (1024 if dtype == torch.int64 else 0)
    other = {"steps": torch.tensor([most, least], dtype=dtype)}
    middle = folded([ends, other], [1.0, 1.0]).result()["steps"].double()
    assert (middle - (least + most) / 2).abs().max() <= 0.5


def row_oracle(
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


@pytest.mark.parametrize("build", [Mean, lambda: Fisher(0.0)], ids=["Mean", "Fisher of ones"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kinds=st.lists(_MASK, min_size=1, max_size=4),
    shape=st.sampled_from([(4,), (4, 3), (4, 2, 3), (1, 2), ()]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]),
)
def test_rows_are_averaged_over_the_clients_that_trained_them(
    build: Callable[[], Any], seed: int, kinds: list[str], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Masks may come late, from some clients only, and differ in kind from client to client."""
    rng = np.random.default_rng(seed)
    updates, weights, masks = [], [], []
    aggregator = build()
    for kind in kinds:
        update = {k: torch.tensor(rng.normal(size=shape)).to(dtype) for k in ("w", "other", "last")}
        rows = torch.tensor(rng.random(shape[:1]) < 0.4)
        mask = rows if kind == "rows" else rows.flatten()[0]
        name = "other" if kind == "other tensor" else "w"
        updates.append(update)
        weights.append(float(rng.choice([0.5, 1.0, 8.0, 300.0])))
        masks.append({} if kind == "no statistics" else {name: mask})
        ones = {key: torch.ones_like(value) for key, value in update.items()}
        aggregator.add(update, weights[-1], {"fisher": ones, "trained": masks[-1]})
    result = aggregator.result()
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    for name in ("w", "other"):
        assert (result[name].dtype, result[name].shape) == (dtype, torch.Size(shape))
        own = [mask.get(name) for mask in masks]
        values = [update[name].reshape(shape or (1,)) for update in updates]
        for row in range(len(values[0])):
            expected = row_oracle(values, weights, own, row)
            found = result[name].reshape(shape or (1,))[row].double().numpy()
            assert np.abs(found - expected).max() <= tolerance * max(1, np.abs(expected).max())


@pytest.mark.parametrize("masked", [True, False])
def test_sums_are_kept_in_float32_for_half_precision(masked: bool) -> None:
    """A sum in float16 would overflow at 65504 and lose every small term."""
    updates = [{"w": torch.full((2, 3), size, dtype=torch.float16)} for size in [6e4] * 8 + [1.0] * 8]
    masks = [{"w": torch.tensor([True, i < 8 or not masked])} for i in range(16)]
    result = folded(updates, [1.0] * 16, masks if masked else None).result()
    assert result["w"].tolist() == [[30000.0] * 3, [60000.0 if masked else 30000.0] * 3]


def test_the_last_result_is_the_same_and_takes_no_copy() -> None:
    mean, other = (folded(mixed(), [1.0, 2.0, 3.0, 4.0]) for _ in range(2))
    held = {name: tensor.data_ptr() for name, tensor in mean.current.items()}
    expected, found = other.result(), mean.result("cpu", last=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    places = {name: t.data_ptr() for name, t in found.items() if t.is_floating_point()}
    assert places == {name: held[name] for name in ("weight", "scale")}
    with pytest.raises(fedrot.UpdateError, match="Nothing was added"):
        mean.result()
