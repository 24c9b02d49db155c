"""Everything that the laboratory adds to fedrot's registries, by ``import reproductions.plugins``."""

import reproductions.anchors
import reproductions.arms
import reproductions.lora_rivals
import reproductions.soup  # noqa: F401
