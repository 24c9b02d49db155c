"""Aggregators: add one aligned update at a time, then take the result."""

from fedrot.aggregation.fisher_mean import Fisher
from fedrot.aggregation.mean import Mean
from fedrot.aggregation.registry import (
    Aggregator,
    aggregation_named,
    aggregations,
    register_aggregation,
)
from fedrot.aggregation.regmean import RegMean
from fedrot.collect.statistics import Statistics, check_statistics

__all__ = [
    "Aggregator",
    "Fisher",
    "Mean",
    "RegMean",
    "Statistics",
    "aggregation_named",
    "aggregations",
    "check_statistics",
    "register_aggregation",
]
