"""Coordinate descent over the groups, and the solvers of their actions."""

import fedrot.matching.solvers  # noqa: F401 (registers the solvers)
