"""Incremental aggregators: ``add`` one update at a time, then take the ``result``."""

from fedrot.aggregation.mean import Mean

__all__ = ["Mean"]
