"""The laboratory's grids: what they describe exists, and their small variants are small."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.grids import bundled_grids, read_grid
from reproductions.barriers.grid import Grid


@pytest.mark.parametrize("name", bundled_grids("setting"))
def test_every_bundled_grid_of_settings_has_a_quick_variant(name: str) -> None:
    whole, quick = (
        [SimulationConfig.from_flat(entry) for entry in read_grid(Path(name), "setting", quick=small)]
        for small in (False, True)
    )
    assert {config.setting for config in quick} <= {config.setting for config in whole}
    assert sum(map(_rows_trained, quick)) <= 200_000


def _rows_trained(config: SimulationConfig) -> float:
    """Rows in training steps of all cells; 200,000 rows are minutes for models of two small layers."""
    assert config.train_limit is not None, "a limit makes it small"
    epochs = sum(map(config.epochs, range(1, config.rounds + 1)))
    return config.train_limit * epochs * len(config.cells())


@pytest.mark.parametrize("name", bundled_grids("task"))
def test_every_bundled_grid_of_barriers_has_a_quick_variant(name: str) -> None:
    whole, quick = (Grid.read(Path(name), quick=small) for small in (False, True))
    assert {cell.name for cell in quick.cells} <= {cell.name for cell in whole.cells}
    assert sum(len(cell.pairs) * len(cell.methods) * cell.points for cell in quick.cells) <= 200
