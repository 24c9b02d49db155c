"""Fisher-weighted averages against a plain loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.aggregation import Fisher
from tests.fedrot.oracles import Array
from tests.models import fresh_model, inputs, largest_difference, near, state_of

Client = tuple[dict[str, Tensor], float, Mapping[str, Mapping[str, Tensor]]]


def _merged(clients: Sequence[Client], floor: float = 0.0) -> dict[str, Tensor]:
    fisher = Fisher(floor)
    for client in clients:
        fisher.add(*client)
    return fisher.result()


def _client(value: Array, fisher: Array, weight: float) -> Client:
    update = {"w": torch.tensor(value), "b": torch.full((2,), float(value.sum())).double()}
    return update, weight, {"fisher": {"w": torch.tensor(fisher)}}


def _expected(clients: Sequence[Client], floor: float) -> Array:
    """Return ``sum w F theta / sum w F`` with a share of the mean of all ``F`` added to each."""
    values = np.stack([update["w"].double().numpy() for update, _, _ in clients])
    known = np.stack([statistics["fisher"]["w"].double().numpy() for _, _, statistics in clients])
    weights = np.array([w for _, w, _ in clients]).reshape(-1, *[1] * (values.ndim - 1))
    common = np.average([k.mean() for k in known], weights=weights.ravel())
    return np.asarray(np.average(values, axis=0, weights=weights * (known + floor * common)))


def _random(seed: int, count: int, zeros: float = 0.3, shape: tuple[int, ...] = (3, 4)) -> list[Client]:
    rng = np.random.default_rng(seed)
    return [
        _client(
            rng.normal(size=shape),
            np.where(rng.random(shape) < zeros, 0.0, 10.0 ** rng.uniform(-8, 2, size=shape)),
            float(rng.choice([0.1, 1.0, 30.0])),
        )
        for _ in range(count)
    ]


def test_the_floor_is_a_share_of_the_common_mean() -> None:
    """An entry that only one client knows a trace of is not decided by that trace alone."""
    one = _client(np.array([0.0, 0.0]), np.array([1e-30, 2.0]), 1.0)
    other = _client(np.array([6.0, 6.0]), np.array([0.0, 4.0]), 1.0)
    assert _merged([one, other], 0.0)["w"].tolist() == pytest.approx([0.0, 4.0])
    assert _merged([one, other], 1e-6)["w"].tolist() == pytest.approx([3.0, 4.0], rel=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
)
def test_shapes_and_dtypes_stay(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    clients = [
        ({k: v.to(dtype) for k, v in u.items()}, w, {"fisher": {"w": s["fisher"]["w"].to(dtype)}})
        for u, w, s in _random(3, 3, 0.2, shape)
    ]
    merged = _merged(clients, 1e-6)
    assert (merged["w"].dtype, merged["w"].shape) == (dtype, torch.Size(shape))
    expected = _expected(clients, 1e-6)
    assert np.abs(merged["w"].double().numpy() - expected).max() <= tolerance * max(
        1.0, np.abs(expected).max()
    )


def test_tied_tensors_stay_equal() -> None:
    """A state dict names tied weights twice; whichever is loaded last must not undo the merge."""
    name = "bert-mlm"
    fisher = Fisher()
    for seed in (1, 2):
        model = fresh_model(name)
        model.load_state_dict(near(state_of(name), 0.1, seed))
        fisher.add(model.state_dict(), 1.0, fedrot.collect_fisher(model, [inputs()]))
    merged = fisher.result()
    embeddings = merged["bert.embeddings.word_embeddings.weight"]
    assert (
        largest_difference({"w": merged["cls.predictions.decoder.weight"]}, {"w": embeddings}) <= 1e-12
    )


# Errors


@pytest.mark.parametrize("floor", [-1e-9, float("nan"), float("inf")])
def test_a_floor_out_of_range_is_refused(floor: float) -> None:
    with pytest.raises(fedrot.FedrotError, match="floor"):
        Fisher(floor)
