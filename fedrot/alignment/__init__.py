"""Alignment of updates to an anchor: one update, a round, a GPU, learned, diagnosed."""

from fedrot.alignment.align import Alignment, align, random_equivalent

__all__ = ["Alignment", "align", "random_equivalent"]
