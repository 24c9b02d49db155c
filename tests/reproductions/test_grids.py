"""The laboratory's files: what they describe exists."""

from __future__ import annotations

import pytest

import reproductions.plugins  # noqa: F401
from fedrot.simulations.experiment import read_experiments
from reproductions.barriers.grid import read_cells
from reproductions.commands import GRIDS

OF_BARRIERS = {file for file in GRIDS.iterdir() if "\n[[task]]" in file.read_text()}


@pytest.mark.parametrize(
    "file", sorted({*GRIDS.iterdir()} - OF_BARRIERS), ids=lambda file: file.stem
)
def test_experiments_of_files_are_possible(file):
    for one in read_experiments(file, {}):
        assert all(
            strategy.kind in ("fedrot", "head_only") or not strategy.code(one)
            for strategy in one.strategies
        )


@pytest.mark.parametrize("file", sorted(OF_BARRIERS), ids=lambda file: file.stem)
def test_pairs_of_files_are_possible(file):
    assert all(cell.pairs for cell in read_cells(file))
