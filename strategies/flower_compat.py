"""Flower's internals that fedrot leans on, each with the reason and the versions it is tested on.

======================  ================================================================  ============
what                    why                                                               tested with
======================  ================================================================  ============
``metrics_function``    the function that a strategy aggregates training metrics with is  flwr 1.41
                        an attribute of FedAvg, without a public accessor
======================  ================================================================  ============
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]

_METRICS_FUNCTION = "train_metrics_aggr_fn"


def metrics_function(strategy: Strategy) -> MetricsFunction:
    """Return the function with which a strategy aggregates the clients' metrics of training."""
    found: MetricsFunction = vars(strategy)[_METRICS_FUNCTION]
    return found


@contextmanager
def without_metrics(strategy: Strategy) -> Iterator[None]:
    """Let a strategy aggregate no metrics of training inside the ``with`` block."""
    before = metrics_function(strategy)
    vars(strategy)[_METRICS_FUNCTION] = lambda *_: MetricRecord()
    try:
        yield
    finally:
        vars(strategy)[_METRICS_FUNCTION] = before
