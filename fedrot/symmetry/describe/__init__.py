"""The elements of a family's description: spaces, projections, layers, task heads."""
