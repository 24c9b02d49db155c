"""Coordinate descent over the groups, and the solvers of their actions."""

# Solvers register themselves when they are imported.
from fedrot.matching import experts, heads, inside_heads, streams, units

__all__ = ["experts", "heads", "inside_heads", "streams", "units"]
