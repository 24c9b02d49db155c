"""Research methods: tested and documented, but no published table of ours recommends them yet.

``GreedySoup`` and ``OptimalTransport`` are aggregations. ``regmean_plus_plus`` merges models layer by
layer. ``learn_alignment`` and ``learn_together`` learn group elements by gradient descent. ``repair``
restores the variance of an average's units. ``loss_barrier`` measures the loss between two models.
"""

from fedrot.research.interpolation import Barrier, interpolate, loss_barrier
from fedrot.research.learning import (
    CommonBasis,
    Learned,
    LearningOptions,
    learn_alignment,
    learn_together,
    loss_of,
)
from fedrot.research.optimal_transport import OptimalTransport
from fedrot.research.regmean_plus_plus import Candidate, regmean_plus_plus
from fedrot.research.soup import GreedySoup
from fedrot.research.variance import (
    UnitStatistics,
    average_statistics,
    repair,
    unit_statistics,
    variance_ratio,
)

__all__ = [
    "Barrier",
    "Candidate",
    "CommonBasis",
    "GreedySoup",
    "Learned",
    "LearningOptions",
    "OptimalTransport",
    "UnitStatistics",
    "average_statistics",
    "interpolate",
    "learn_alignment",
    "learn_together",
    "loss_barrier",
    "loss_of",
    "regmean_plus_plus",
    "repair",
    "unit_statistics",
    "variance_ratio",
]
