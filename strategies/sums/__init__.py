"""Sums over clients: RegMean under secure aggregation, losses on held-out rows, fitted task heads."""
