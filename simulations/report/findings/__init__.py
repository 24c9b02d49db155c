"""Findings of a run: sentences, shares beside chance, the map of regimes, merged subsets."""
