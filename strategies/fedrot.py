"""The strategy ``FedRot``: aligned FedAvg, and other aggregations of updates."""

from __future__ import annotations

from logging import INFO

from flwr.common import log
from flwr.serverapp.strategy import FedAvg

from fedrot.aggregation import Aggregator, aggregation_named
from fedrot.collect.statistics import TRAINED, kind_named
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.strategies.aligned import DEFAULT_ALIGNMENT, Aligned
from fedrot.strategies.arguments import Described
from fedrot.strategies.fitting.rounds import FitsTaskHead
from fedrot.strategies.round.guard import Guard
from fedrot.strategies.round.update import Builder
from fedrot.strategies.settings import Checkpointing, OtherBasis, Reporting, Server
from fedrot.strategies.wire.flower_compat import MetricsFunction
from fedrot.strategies.wire.statistics_record import Kinds


class FedRot(FitsTaskHead, Aligned, FedAvg):
    """Aligned FedAvg.

    Write ``FedRot(config, fraction_train=0.5)`` instead of
    ``FedAvg(fraction_train=0.5)``; every argument of FedAvg works as before.
    ``FedRot(alignment=None)`` is FedAvg, except that the average leaves out rows that
    clients mark as not trained (``fedrot.collect.completed``).

    ``train_metrics_aggr_fn`` receives the metrics and small configurations of the
    replies, but not the arrays of updates that are added one at a time.

    Args:
        model_config: the model's transformers configuration, see ``Aligned``.
        fraction_train: of FedAvg, like all up to ``evaluate_metrics_aggr_fn``.
        aggregation: a name such as ``"regmean"``, a class such as
            ``fedrot.aggregation.RegMean``, or a function without arguments that builds
            an aggregator; None is FedAvg's weighted mean. If the aggregation needs
            statistics, the training configuration asks clients for them, and clients
            send them with ``add_statistics``. Replies without statistics are dropped.
            With statistics the residual stream is permuted and not rotated.
        alignment: of ``Aligned``, like ``other_basis`` and ``guard``.
        fit_head: whether to fit the task head before the first round
            (``fit_task_head``) and after every round, see ``FitsTaskHead``. The name of
            a layer in place of True fits this layer. Clients need ``answer_with_sums``
            on their ``ClientApp``. An error after a round is a warning, and the round's
            model is taken.
        trusted: with ``fit_head``, whether all sites trust each other, see
            ``fit_task_head``.
        server: of ``ReplyStrategy``, like ``checkpoints`` and ``reporting``.

    Raises:
        FedrotError: as ``Aligned``; the aggregation needs statistics, and the options
            say ``canonical=True``; it needs diagonal Fisher information, and heads are
            rotated; or, in ``start``, the model has no such task head.
    """

    uses_statistics = True

    def __init__(
        self,
        model_config: Described | None = None,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsFunction | None = None,
        evaluate_metrics_aggr_fn: MetricsFunction | None = None,
        *,
        aggregation: str | Builder | None = None,
        alignment: AlignmentOptions | None = DEFAULT_ALIGNMENT,
        other_basis: OtherBasis | None = None,
        guard: str | Guard | None = None,
        fit_head: bool | str = False,
        trusted: bool = False,
        server: Server | None = None,
        checkpoints: Checkpointing | None = None,
        reporting: Reporting | None = None,
    ) -> None:
        if isinstance(aggregation, str):
            aggregation = aggregation_named(aggregation)
        if aggregation is not None and not callable(aggregation):
            raise FedrotError(
                f"aggregation is a {type(aggregation).__name__}; give a name, or a "
                "class: RegMean."
            )
        self.aggregation = aggregation
        super().__init__(
            model_config,
            alignment=alignment,
            other_basis=other_basis,
            guard=guard,
            fit_head=fit_head,
            trusted=trusted,
            server=server,
            checkpoints=checkpoints,
            reporting=reporting,
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
            weighted_by_key=weighted_by_key,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
            train_metrics_aggr_fn=train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn=evaluate_metrics_aggr_fn,
        )
        self._kinds: Kinds = ()
        if self.aggregation is not None:
            aggregator: object = self.aggregation()
            if not isinstance(aggregator, Aggregator):
                raise FedrotError(
                    f"aggregation builds a {type(aggregator).__name__}, which is no "
                    "aggregator: let its class subclass fedrot.aggregation.Aggregator."
                )
            self._kinds = aggregator.needs
        self._let_statistics_follow()

    def _let_statistics_follow(self) -> None:
        """Align only as statistics can follow; raise if the options say otherwise."""
        if self.alignment is None or not {*self._kinds} - {TRAINED}:
            return
        # Clients' statistics are those of the sent update, not of its canonical form.
        self.alignment = self.alignment.as_it_is()
        if self.other_bases is not None:
            self.other_bases.options = self.other_bases.options.as_it_is()
        options = self.all_options
        if any(each.canonical for each in options):
            raise FedrotError(
                f"The statistics '{self._kinds[0]}' cannot be brought to canonical "
                "form. Give canonical=False, or None, in the options of alignment and "
                "other_basis."
            )
        rotates = any(
            "attention" in each.parts and each.within_heads == "rotation"
            for each in options
        )
        fixed = [kind for kind in self._kinds if not kind_named(kind).follows_rotations]
        if fixed and rotates:
            raise FedrotError(
                f"Rotations of heads cannot be applied to the statistics '{fixed[0]}'. "
                "Let the clients align before they compute statistics "
                "(fedrot.strategies.align_mod) and give alignment=None here, or align "
                "by permutations only, alignment=AlignmentOptions(parts=('heads', "
                "'ffn'))."
            )

    def summary(self) -> None:
        """Log how updates are merged, then the summaries behind."""
        if self.aggregation is not None:
            log(INFO, "\t├──> Aggregation: %s", type(self.aggregation()).__name__)
        super().summary()

    def needs(self, server_round: int) -> Kinds:
        """Return the aggregation's kinds of statistics."""
        return self._kinds

    def aggregator(self, server_round: int) -> Builder | None:
        """Return the aggregation."""
        return self.aggregation or super().aggregator(server_round)
