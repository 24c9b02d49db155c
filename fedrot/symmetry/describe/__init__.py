"""Spaces, projections, layers and task heads: what a family's description consists of."""
