"""Coordinate descent over the groups, and the solvers of their actions."""

# Solvers register themselves when they are imported.
from fedrot.matching import solvers

__all__ = ["solvers"]
