"""Fisher weighting with scaled information, against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedrot.errors import UpdateError
from reproductions.damped_fisher import DampedFisher

SHAPES = {"bert.up.weight": (3, 4), "bert.up.bias": (3,), "bert.pooler.dense.weight": (2, 2)}
SHAPES |= {"classifier.weight": (2, 3), "classifier.bias": (2,), "bert.embeddings.words.weight": (5, 2)}


def clients(seed: int) -> list[tuple[dict[str, Tensor], float, dict[str, dict[str, Tensor]]]]:
    rng = np.random.default_rng(seed)
    found = []
    for weight in (1.0, 30.0, 0.2):
        update = {name: torch.tensor(rng.normal(size=shape)) for name, shape in SHAPES.items()}
        size = 10.0 ** rng.uniform(-6, 3)
        fisher = {name: torch.tensor(size * rng.random(size=shape)) for name, shape in SHAPES.items()}
        found.append((update, weight, {"fisher": fisher}))
    return found


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("floor", [0.0, 0.1, 10.0])
def test_every_entry_is_weighted_by_its_share_of_the_tensors_mean(seed: int, floor: float) -> None:
    fisher = DampedFisher(floor)
    for client in clients(seed):
        fisher.add(*client)
    for name, found in fisher.result().items():
        for index in np.ndindex(*SHAPES[name]):
            top = bottom = 0.0
            for update, weight, statistics in clients(seed):
                information = statistics["fisher"][name]
                last = "classifier" in name or "pooler" in name
                share = 1.0 if last else float(information[index] / information.mean()) + floor
                top, bottom = top + weight * share * float(update[name][index]), bottom + weight * share
            assert abs(float(found[index]) - top / bottom) <= 1e-9


def test_a_tensor_without_information_is_averaged() -> None:
    fisher, expected = DampedFisher(0.0), torch.zeros(3, dtype=torch.float64)
    for update, weight, statistics in clients(2):
        statistics["fisher"]["bert.up.bias"] = torch.zeros(3, dtype=torch.float64)
        fisher.add(update, weight, statistics)
        expected += weight / 31.2 * update["bert.up.bias"]
    torch.testing.assert_close(fisher.result()["bert.up.bias"], expected)


def test_an_update_without_information_is_refused() -> None:
    with pytest.raises(UpdateError, match="no Fisher information"):
        DampedFisher().add(clients(0)[0][0], 1.0)
