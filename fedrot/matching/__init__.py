"""Coordinate descent over the groups, and the solvers of their actions."""

# The import registers the solvers.
from fedrot.matching import (
    experts,
    heads,
    inside_heads,
    rotary,
    streams,
    units,
)

__all__ = [
    "experts",
    "heads",
    "inside_heads",
    "rotary",
    "streams",
    "units",
]
