"""The laboratory's files: what they describe exists."""

from __future__ import annotations

from pathlib import Path

import pytest

import reproductions.plugins  # noqa: F401
from fedrot.simulations.settings import read_experiments
from reproductions.barriers.grid import read_cells
from reproductions.commands import GRIDS

OF_BARRIERS = {file for file in GRIDS.iterdir() if "\n[[task]]" in file.read_text()}


@pytest.mark.parametrize("file", sorted({*GRIDS.iterdir()} - OF_BARRIERS), ids=lambda file: file.stem)
def test_experiments_of_files_are_possible(file: Path) -> None:
    for one in read_experiments(file, {}):
        assert all(strategy.kind == "fedrot" or not strategy.code(one) for strategy in one.strategies)


@pytest.mark.parametrize("file", sorted(OF_BARRIERS), ids=lambda file: file.stem)
def test_pairs_of_files_are_possible(file: Path) -> None:
    assert all(cell.pairs for cell in read_cells(file))


def test_pairs_and_subsets_of_clients_are_strategies_of_their_own() -> None:
    (subsets,) = (one for one in read_experiments(GRIDS / "domains.toml", {}) if one.name == "subsets")
    found = {strategy.name: strategy.clients for strategy in subsets.strategies}
    assert found["fisher of 1+3"] == (1, 3)
    assert found["fedavg of 0+1+2+4"] == (0, 1, 2, 4)
    assert found["fedavg"] == ()
    sizes = [len(clients) for name, clients in found.items() if name.startswith("fedavg of")]
    assert [sizes.count(size) for size in range(7)] == [0, 5, 10, 10, 5, 0, 0]
    assert sum(name.startswith("fisher of") for name in found) == 10
