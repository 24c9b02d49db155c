"""The mixin ``FitsTaskHead``: task heads fitted before and after every round."""

from __future__ import annotations

from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import sample_nodes

from fedrot.errors import FedrotError
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.fitting.fit_task_head import TaskHeadFitting
from fedrot.strategies.fitting.result import FittedTaskHead
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.wire.label_names import Names, check_names, wanted_names


class FitsTaskHead(ReplyStrategy):
    """Mixin that fits task heads with the argument ``fit_head``.

    Before the first round the head is fitted to the first model. After a round the
    clients' held-out rows choose among the model before the round, the round's model,
    and the model half way, the last two with fitted heads. So no round is worse than
    the one before on the rows of all clients together; a single client may lose.

    Args:
        *args: of the strategy behind.
        fit_head: whether to fit; a name fits the layer of this name.
        trusted: whether all sites trust each other, see ``fit_task_head``.
        **kwargs: of the strategy behind.
    """

    def __init__(
        self,
        *args: Any,
        fit_head: bool | str = False,
        trusted: bool = False,
        **kwargs: Any,
    ) -> None:
        self.fit_head = fit_head
        super().__init__(*args, **kwargs)
        self._fitting: TaskHeadFitting | None = None
        if fit_head:
            self.needs_model = True
            name = fit_head if isinstance(fit_head, str) else None
            # An adapter has no configuration of its model.
            self._fitting = TaskHeadFitting(
                getattr(self, "model_config", None), name, self.server.wire, trusted
            )

    @property
    def half_way(self) -> bool:
        """Whether the model half way is a candidate."""
        return True

    def check_labels(self, node: int, names: Names) -> None:
        """Use also the names that nodes have said for a fit."""
        by_node = {} if self._fitting is None else self._fitting.names
        wanted = wanted_names(self.model_config, by_node)
        check_names(names or by_node.get(node, ()), wanted)

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
        if self._fitting is None:
            return arrays
        config = ConfigRecord({**config, "server-round": 0})
        clients = self._fitting.clients(grid, config, self._timeout, arrays)
        names = ("min_available_nodes", "min_train_nodes")
        # Waits for so many.
        sample_nodes(grid, max(getattr(self._weighting, name, 0) for name in names), 0)
        result = self._fitting.fit(clients, arrays)
        result.log("Before round 1")
        return result.arrays

    def finished(self, arrays: ArrayRecord, record: RoundRecord) -> ArrayRecord:
        """Return the best model that a round offers, or the one before."""
        if self._fitting is None:
            return arrays
        assert self._grid is not None  # from configure_train
        try:
            clients = self._fitting.clients(
                self._grid, self._config, self._timeout, arrays
            )
            result = self._fitting.fit(clients, arrays, self._broadcast, self.half_way)
        except FedrotError as error:
            result = FittedTaskHead(arrays, reason=str(error))
        result.log(f"Round {record.number}")
        record.measured = {**record.measured, **result.metrics()}
        if result.share == 0:
            # The round's updates are not in the model.
            record.origins.clear()
        return result.arrays
