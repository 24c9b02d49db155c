"""The laboratory's grids: what they describe exists, and their small variants are small."""

from __future__ import annotations

from pathlib import Path

import pytest

import reproductions.plugins  # noqa: F401
from fedrot.simulations.grids import bundled_grids
from reproductions.barriers.grid import read_cells
from tests.simulations.test_grids import check_quick


@pytest.mark.parametrize("name", bundled_grids("setting"))
def test_every_bundled_grid_of_settings_has_a_quick_variant(name: str) -> None:
    check_quick(name)


@pytest.mark.parametrize("name", bundled_grids("task"))
def test_every_bundled_grid_of_barriers_has_a_quick_variant(name: str) -> None:
    whole, quick = (read_cells(Path(name), quick=small) for small in (False, True))
    assert {cell.name for cell in quick} <= {cell.name for cell in whole}
    assert sum(len(cell.pairs) * len(cell.methods) * cell.points for cell in quick) <= 200
