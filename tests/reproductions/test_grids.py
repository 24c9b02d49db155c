"""The laboratory's files: what they describe exists, and their small variants are small."""

from __future__ import annotations

from pathlib import Path

import pytest

import reproductions.plugins
from fedrot.simulations.cli.experiment_commands import experiments_of
from fedrot.simulations.experiment_files import bundled_files
from reproductions.barriers.grid import read_cells

OURS = {file.stem for file in (Path(reproductions.plugins.__file__).parent / "grids").iterdir()}


def test_all_files_are_bundled() -> None:
    assert {*bundled_files(), *bundled_files("task")} >= OURS


@pytest.mark.parametrize("name", sorted(OURS & {*bundled_files()}))
def test_experiments_of_files_are_possible_and_small_ones_train_on_few_rows(name: str) -> None:
    whole, quick = (experiments_of(Path(name), {}, quick=small) for small in (False, True))
    assert [one.name for one in quick] == [one.name for one in whole]
    for one, small in zip(whole, quick, strict=True):
        assert len(small.seeds) <= 2
        assert small.rounds <= min(2, one.rounds)
        assert small.train_limit is not None
        assert small.train_limit <= 1500
        assert all(strategy.kind == "fedrot" or not strategy.code(one) for strategy in one.strategies)


@pytest.mark.parametrize("name", sorted(OURS & {*bundled_files("task")}))
def test_every_bundled_file_of_barriers_has_a_quick_variant(name: str) -> None:
    whole, quick = (read_cells(Path(name), quick=small) for small in (False, True))
    assert {cell.name for cell in quick} <= {cell.name for cell in whole}
    assert sum(len(cell.pairs) * len(cell.methods) * cell.points for cell in quick) <= 200


def test_pairs_and_subsets_of_clients_are_strategies_of_their_own() -> None:
    (subsets,) = (
        one for one in experiments_of(Path("domains"), {}, quick=False) if one.name == "subsets"
    )
    found = {strategy.name: strategy.clients for strategy in subsets.strategies}
    assert found["fisher of 1+3"] == (1, 3)
    assert found["fedavg of 0+1+2+4"] == (0, 1, 2, 4)
    assert found["fedavg"] == ()
    sizes = [len(clients) for name, clients in found.items() if name.startswith("fedavg of")]
    assert [sizes.count(size) for size in range(7)] == [0, 5, 10, 10, 5, 0, 0]
    assert sum(name.startswith("fisher of") for name in found) == 10
