"""Everything that the laboratory adds to fedrot's registries, by ``import reproductions.plugins``."""

from pathlib import Path

from fedrot.simulations.grids import FOLDERS

FOLDERS.append(Path(__file__).parent / "grids")
