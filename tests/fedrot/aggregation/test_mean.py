"""Means of tensors of every dtype and shape, and of rows that only some clients have
trained.
"""

import pytest
import torch

from fedrot import UpdateError
from fedrot.aggregation import Fisher, Mean
from tests.fedrot.oracles import gap
from tests.models import same


def folded(updates, weights, masks=None):
    mean = Mean()
    for index, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        mean.add(update, weight, {"trained": masks[index]} if masks else None)
    return mean


def mixed(count=4):
    return [
        {
            "weight": torch.full((3, 5), float(i)),
            "scale": torch.tensor(2.0 * i),
            "steps": torch.tensor([i, 7]),
            "mask": torch.tensor([True, i == 0]),
        }
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "masked", [False, True], ids=["", "masks of integers change nothing"]
)
def test_integers_and_booleans_are_averaged_and_rounded(masked):
    rows = torch.tensor([True, False])
    masks = [{"steps": rows, "mask": rows}] * 4 if masked else None
    result = folded(mixed(), [1.0, 2.0, 3.0, 4.0], masks).result()
    assert result["steps"].tolist() == [2, 7]
    assert result["mask"].tolist() == [True, False]
    assert [tensor.dtype for tensor in result.values()] == [
        t.dtype for t in mixed()[0].values()
    ]
    assert list(result) == list(mixed()[0])


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
def test_means_of_the_largest_and_smallest_integers(dtype):
    least = torch.iinfo(dtype).min
    most = torch.iinfo(dtype).max
    ends = {"steps": torch.tensor([least, most], dtype=dtype)}
    found = folded([ends, ends], [1.0, 3.0]).result()["steps"].tolist()
    assert found[0] == least
    # float64 holds integers up to 2 ** 53 exactly.
    assert 0 <= most - found[1] <= (1024 if dtype == torch.int64 else 0)
    other = {"steps": torch.tensor([most, least], dtype=dtype)}
    middle = folded([ends, other], [1.0, 1.0]).result()["steps"].double()
    assert gap(middle, (least + most) / 2) <= 0.5


@pytest.mark.parametrize(
    "build", [Mean, lambda: Fisher(0.0)], ids=["Mean", "Fisher of ones"]
)
@pytest.mark.parametrize("shape", [(4, 2, 3), (4,), (1, 2), ()], ids=str)
def test_rows_of_any_shape_are_averaged_over_the_clients_that_trained_them(
    build, shape
):
    """Masks may come late, from some clients only; a number stands for all rows."""
    aggregator = build()
    rows = torch.arange(*shape[:1]) > 0 if shape else torch.tensor(False)
    masks = (
        {},
        {"other": torch.tensor(False)},
        {"w": torch.tensor(False)},
        {"w": rows},
    )
    for value, mask in zip((1.0, 3.0, 100.0, 8.0), masks, strict=True):
        update = {key: torch.full(shape, value) for key in ("w", "other")}
        ones = {key: torch.ones(shape) for key in update}
        aggregator.add(update, 1.0, {"fisher": ones, "trained": mask})
    found = aggregator.result()
    for row, value in zip(
        found["w"].reshape(rows.numel(), -1), rows.flatten(), strict=True
    ):
        assert row.tolist() == [4.0 if value else 2.0] * len(row)
    assert torch.allclose(found["other"], torch.full(shape, 109 / 3))


@pytest.mark.parametrize("masked", [True, False])
def test_sums_are_kept_in_float32_for_half_precision(masked):
    """A sum in float16 would overflow at 65504 and lose every small term."""
    updates = [
        {"w": torch.full((2, 3), size, dtype=torch.float16)}
        for size in [6e4] * 8 + [1.0] * 8
    ]
    masks = [{"w": torch.tensor([True, i < 8 or not masked])} for i in range(16)]
    result = folded(updates, [1.0] * 16, masks if masked else None).result()
    assert result["w"].tolist() == [[30000.0] * 3, [60000.0 if masked else 30000.0] * 3]


def test_the_last_result_is_the_same_and_takes_no_copy():
    mean, other = (folded(mixed(), [1.0, 2.0, 3.0, 4.0]) for _ in range(2))
    held = {name: tensor.data_ptr() for name, tensor in mean.current.items()}
    expected = other.result()
    found = mean.release()
    assert same(found, expected)
    places = {name: t.data_ptr() for name, t in found.items() if t.is_floating_point()}
    assert places == {name: held[name] for name in ("weight", "scale")}
    with pytest.raises(UpdateError, match="Nothing was added"):
        mean.result()
