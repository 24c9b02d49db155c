"""Findings of a run: sentences, and shares that alignment found compared with chance."""
