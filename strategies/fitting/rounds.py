"""The mixin ``FitsTaskHead``: task heads fitted before and after every round."""

from __future__ import annotations

from collections.abc import Mapping
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from torch import Tensor

from fedrot.errors import FedrotError, refusal
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.fitting.ask import Clients
from fedrot.strategies.fitting.fit_task_head import TaskHeadFitting
from fedrot.strategies.fitting.result import FittedTaskHead
from fedrot.strategies.fitting.sites import Sites, reported
from fedrot.strategies.reporting.rows import SITE_ROW, SITES, report_metrics
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.wire.label_names import Names


class FitsTaskHead(ReplyStrategy):
    """Mixin that fits task heads with the argument ``fit_head``.

    Before the first round the head is fitted to the first model. After a round the
    clients' held-out rows choose among the model before the round, the round's model,
    and the model half way, the last two with fitted heads. So no round is worse than
    the one before on the rows of all clients together; a single client may lose.

    After the last round each site reports what it gains (``report_sites``). The metrics
    of the last round then have ``fedrot-sites``, ``fedrot-sites-better`` and others in
    ``result.train_metrics_clientapp``; ``Reporting`` writes a row for each site.

    Args:
        *args: of the strategy behind.
        fit_head: whether to fit; a name fits the layer of this name.
        trusted: whether all sites trust each other, see ``fit_task_head``.
        **kwargs: of the strategy behind.
    """

    #: Whether sites report after the last round. Simulations measure them themselves.
    reports_sites = True

    def __init__(
        self,
        *args: Any,
        fit_head: bool | str = False,
        trusted: bool = False,
        **kwargs: Any,
    ) -> None:
        self.fit_head = fit_head
        super().__init__(*args, **kwargs)
        # Checkpoints hold every tensor, also one of before the first round.
        self._priors: Tensor | None = None
        self.needs_model = self.needs_model or bool(fit_head)
        self._fitting = TaskHeadFitting(
            self.model_config,
            fit_head if isinstance(fit_head, str) else None,
            self.server.wire,
            trusted,
        )

    @property
    def priors(self) -> list[float]:
        """Shares of classes in the bias of the newest model, for ``site_model``.

        Empty if they are not known.
        """
        return [] if self._priors is None else self._priors.tolist()

    @property
    def half_way(self) -> bool:
        """Whether the model half way is a candidate."""
        return True

    @property
    def labels_of_nodes(self) -> Mapping[int, Names]:
        """The names of labels that nodes have said for a fit, by node."""
        return self._fitting.names

    def summary(self) -> None:
        """Log that heads are fitted, then the summaries behind."""
        if self.fit_head:
            log(
                INFO,
                "\t├──> Task head: fitted in every round; clients call "
                "answer_with_sums(app, ...)",
            )
        super().summary()

    def prepared(
        self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord
    ) -> ArrayRecord:
        """Return the first model of a run, with a fitted head."""
        if not self.fit_head:
            return arrays
        config = ConfigRecord({**config, "server-round": 0})
        clients = self._fitting.clients(grid, config, self._timeout, arrays)
        names = ("min_available_nodes", "min_train_nodes")
        # Waits for so many.
        sample_nodes(grid, max(getattr(self._weighting, name, 0) for name in names), 0)
        result = self._fitting.fit(clients, arrays)
        result.log("Before round 1")
        self._remember(result)
        return result.arrays

    def _remember(self, result: FittedTaskHead) -> None:
        # The old model has its old shares; a head that is trained on from a fitted one
        # has about those.
        if result.priors:
            self._priors = torch.tensor(result.priors, dtype=torch.float64)

    def finished(self, arrays: ArrayRecord, record: RoundRecord) -> ArrayRecord:
        """Return the best model that a round offers, or the one before."""
        if not self.fit_head:
            return arrays
        try:
            result = self._fitting.fit(
                self._asked(arrays), arrays, self._broadcast, self.half_way
            )
        except FedrotError as error:
            result = FittedTaskHead(arrays, reason=str(error))
        result.log(f"Round {record.number}")
        self._remember(result)
        record.measured = {**record.measured, **result.metrics()}
        if result.share == 0:
            # The round's updates are not in the model.
            record.origins.clear()
        return result.arrays

    def ended(self, result: Result, first: ArrayRecord) -> None:
        """Let the sites report, see ``report_sites``; a failure is a warning."""
        if not (self.fit_head and self.reports_sites):
            return
        arrays = result.arrays
        try:
            sites = reported(
                self._fitting, self._asked(arrays), arrays, first, self.priors
            )
            self._report(sites, result.train_metrics_clientapp)
        except Exception as error:
            log(WARNING, "The sites have not reported: %s", refusal(error))

    def _report(self, sites: Sites, noted: dict[int, MetricRecord]) -> None:
        sites.log()
        last = max(noted, default=0)
        metrics = sites.metrics()
        ours = {f"fedrot-{name}": value for name, value in metrics.items()}
        noted.setdefault(last, MetricRecord()).update(ours)
        of_last = {"round": last, "stage": SITE_ROW}
        clients = self._clients
        rows = [
            # Clients are named as in other rows.
            {**of_last, **row, "client": clients.get(row["client"], row["client"])}
            for row in sites.rows
        ]
        self.reporting.append(rows)
        report_metrics(self.reporting, last, SITES, metrics)

    def _asked(self, arrays: ArrayRecord) -> Clients:
        """Return the clients, to be asked after a round."""
        assert self._grid is not None  # from start
        return self._fitting.clients(self._grid, self._config, self._timeout, arrays)
