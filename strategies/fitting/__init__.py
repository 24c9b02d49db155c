"""Sums over clients: losses on held-out rows, fitted task heads."""
