"""What a run shows: sentences, shares found beside chance, the map of regimes, merged subsets."""
