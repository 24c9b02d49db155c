"""What a family's description consists of: spaces, projections, layers, task heads."""
