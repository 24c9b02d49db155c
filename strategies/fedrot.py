"""FedRot: FedAvg with alignment in front, and other ways to merge the aligned updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedrot.aggregation import Aggregator, Mean
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.statistic_kinds import FISHER, TRAINED, Statistics
from fedrot.strategies.aligned import Aggregated, Aligned
from fedrot.strategies.client_matching import OTHER_BASIS_OPTIONS
from fedrot.strategies.privacy import check_not_behind
from fedrot.strategies.round.inbox import Reply
from fedrot.strategies.round.merge import Folding
from fedrot.strategies.round.round_report import Round, Update
from fedrot.strategies.round.spill import Store
from fedrot.strategies.wire.records import STATISTICS


class FedRot(Aligned, FedAvg):
    """Aligned FedAvg: every FedAvg argument works, and ``align=False`` is FedAvg itself.

    Only where clients mark rows that they have not trained (``fedrot.completed``) the average leaves
    these out. ``train_metrics_aggr_fn`` sees the replies' metrics and small configurations; of
    updates that are folded in one at a time it does not see the arrays.

    Args:
        *args: of ``Aligned``, then of FedAvg.
        aggregation: a function without arguments, or a class whose constructor needs none, that builds
            what merges a round's aligned updates, ``fedrot.aggregation.RegMean``, say; FedAvg's
            weighted mean if None. Statistics that it needs are asked for in the clients'
            training configuration, see ``wanted_statistics``, and come back in a record of their own,
            ``statistics_record``. They are moved with the updates. Replies without them are dropped.
        statistics_every: ask for statistics every so many rounds, from the first one on; the rounds
            between are means. Gram matrices of BERT-base are larger than the model.
        **kwargs: of ``Aligned`` and FedAvg.

    Raises:
        FedrotError: as ``Aligned``; the aggregation needs diagonal Fisher information, which cannot
            follow the rotations that would be aligned.
    """

    def __init__(
        self,
        *args: Any,
        aggregation: Callable[[], Aggregator] | None = None,
        statistics_every: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if statistics_every < 1:
            raise FedrotError(f"statistics_every is {statistics_every}; it must be 1 or more.")
        self.aggregation = aggregation
        self.statistics_every = statistics_every
        if aggregation is not None and not callable(aggregation):
            raise FedrotError(
                f"aggregation is a {type(aggregation).__name__}; give a class, aggregation="
                "fedrot.aggregation.RegMean, or a function without arguments that builds an aggregator "
                "anew for every round."
            )
        needs = aggregation().needs if aggregation is not None else ()
        other_basis = self._other_basis.options
        given = [
            self.options,
            other_basis or OTHER_BASIS_OPTIONS if self._other_basis.model else other_basis,
        ]
        if self.align and FISHER in needs and any(map(_rotates, given)):
            raise FedrotError(
                "Diagonal Fisher information cannot follow rotations of the heads. Let the clients "
                "align before they compute it (fedrot.strategies.align_mod) and give align=False here, "
                "or align permutations only, options=AlignmentOptions(parts=('heads', 'ffn'))."
            )
        self._kinds = needs

    def summary(self) -> None:
        """Log how updates are merged, then the summary of alignment and FedAvg."""
        if self.aggregation is not None:
            name = type(self.aggregation()).__name__
            every = f" every {self.statistics_every} rounds" if self.statistics_every > 1 else ""
            log(INFO, "\t├──> Aggregation: %s%s", name, every if self._kinds else "")
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for statistics in the rounds that use them."""
        if self.aggregation is not None:
            check_not_behind(self)
        if self._kinds:
            config[STATISTICS] = ",".join(self._needs(server_round))
        return super().configure_train(server_round, arrays, config, grid)

    def _needs(self, server_round: int) -> tuple[str, ...]:
        return self._kinds if (server_round - 1) % self.statistics_every == 0 else ()

    def _aggregator(self, server_round: int) -> Callable[[], Aggregator] | None:
        if self.aggregation is not None and self._needs(server_round) == self._kinds:
            return self.aggregation
        return super()._aggregator(server_round)

    @property
    def _waits(self) -> bool:
        # FedAvg looks at every update, and whether some are marked is known once all have come.
        return super()._waits or (self.spill is not None and self._aggregator(1) is None)

    def _statistics(self, reply: Reply) -> Statistics:
        return reply.statistics

    def _handed_over(self, updates: Iterable[Update], this_round: Round, store: Store) -> Aggregated:
        held = list(updates)
        if any(update.statistics.get(TRAINED) for update in held):
            return self._folded(held, Folding(Mean), this_round)
        return super()._handed_over(held, this_round, store)


def _rotates(options: AlignmentOptions | None) -> bool:
    found = options is not None and "attention" in options.parts
    return found and options is not None and options.within_heads == "rotation"
