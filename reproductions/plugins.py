"""Everything that the laboratory adds to fedrot's registries, by ``import reproductions.plugins``."""

from pathlib import Path

import reproductions.anchors
import reproductions.arms
import reproductions.barriers.methods
import reproductions.lora_rivals
import reproductions.report.sections
import reproductions.soup  # noqa: F401
from fedrot.simulations.grids import FOLDERS

FOLDERS.append(Path(__file__).parent / "grids")
