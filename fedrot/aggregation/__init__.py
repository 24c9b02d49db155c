"""Incremental aggregators: ``add`` one update at a time, then take the ``result``."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from fedrot.aggregation.fisher_mean import Fisher
from fedrot.aggregation.mean import Mean
from fedrot.aggregation.regmean import RegMean
from fedrot.research.optimal_transport import OptimalTransport
from fedrot.research.soup import GreedySoup
from fedrot.statistic_kinds import Statistics, check_statistics


class Aggregator(Protocol):
    """How updates in the same coordinates become one model.

    Attributes:
        needs: kinds of statistics that every update must bring.
    """

    needs: tuple[str, ...]

    @property
    def notes(self) -> Mapping[str, str]:
        """What was out of the ordinary in the last result, by tensor."""

    def add(
        self, update: Mapping[str, Tensor], weight: float, statistics: Statistics | None = None
    ) -> None:
        """Fold one update in; raises ``UpdateError``, and has added nothing then."""

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors so far."""


__all__ = [
    "Aggregator",
    "Fisher",
    "GreedySoup",
    "Mean",
    "OptimalTransport",
    "RegMean",
    "Statistics",
    "check_statistics",
]
