"""Everything that the laboratory adds to fedrot's registries, by ``import reproductions.plugins``."""

from pathlib import Path

import reproductions.kinds
import reproductions.optimal_transport
import reproductions.report.sections  # noqa: F401
from fedrot.simulations.experiment_files import FOLDERS

FOLDERS.append(Path(__file__).parent / "grids")
