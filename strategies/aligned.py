"""The mixin ``Aligned``: Flower's hooks, with alignment in front of any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from operator import attrgetter
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedrot._io import append_rows
from fedrot.aggregation import Aggregator, Mean
from fedrot.aggregation.layerwise import checked_device
from fedrot.anchors import ANCHORS, check_anchor
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions, checked_options
from fedrot.strategies import arguments
from fedrot.strategies.flower_compat import figures_of
from fedrot.strategies.lazy_grid import LazyGrid, streamed
from fedrot.strategies.reporting.rows import (
    EVALUATE,
    TRAIN,
    begin_rows,
    report_metrics,
    reporting_evaluations,
)
from fedrot.strategies.reporting.verdict import NOBODY, OFF, empty_rounds, run_lines
from fedrot.strategies.resume.checkpoints import Checkpoints
from fedrot.strategies.resume.loop import run
from fedrot.strategies.round.aligner import Plan
from fedrot.strategies.round.guard import Guard, comparison_of
from fedrot.strategies.round.inbox import Asked, Inbox, readable_evaluations, sent_by
from fedrot.strategies.round.merge import (
    OF_THE_MEAN,
    Aggregated,
    AggregatorMerge,
    ListMerge,
    Merge,
    Wrapped,
)
from fedrot.strategies.round.other_basis import Exchange, OtherBases
from fedrot.strategies.round.outbox import common_model, integers_of, plain, to_send
from fedrot.strategies.round.round_report import Round
from fedrot.strategies.round.run_round import aligned_merge, run_round
from fedrot.strategies.round.update import Schema, Update
from fedrot.strategies.round.waiting import Store, Waiting
from fedrot.strategies.settings import Checkpointing, Execution, OtherBasis, Reporting, Robustness
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.symmetry import Symmetry
from fedrot.tensors import Tensors

#: The anchor that docs/results/one-shot.md found best over all its settings.
DEFAULT_ANCHOR = "running"


class Aligned(Strategy):
    """Mixin that aligns every reply before the Flower strategy behind it aggregates.

    ``class MyStrategy(Aligned, FedAdam): ...``, then ``MyStrategy(config, eta=0.01)``. Put it in
    front of differential-privacy wrappers such as ``DifferentialPrivacyServerSideFixedClipping``; these
    take ``anchor="global"`` only.

    Replies are aligned and added to the mean one at a time, in the order of arrival. All of a round's
    updates are kept by strategies that look at every update (medians, Krum, privacy wrappers), by the
    anchor ``consensus``, by ``align=False``, and by the settings that say so. A reply is dropped with a
    warning if it is not a finite update of the broadcast model, has no examples, comes twice, or was not
    asked for.

    Args:
        symmetry: the model's transformers configuration (object or dictionary), or a ``Symmetry``.
            ``align=False`` needs neither.
        *args: of the strategy behind, like ``**kwargs``.
        anchor: of updates, see ``fedrot.align_round``; ``running`` if not given.
        options: what to align, see ``fedrot.AlignmentOptions``.
        align: False aligns nothing: accepted replies reach the strategy behind as they are.
        other_basis: how to align replies from another basis; None aligns them like all others.
        robustness: when a reply, or a round, is not used.
        execution: device, precision on the wire, spill folder, determinism.
        checkpointing: where to write checkpoints, and where to resume.
        reporting: files that receive what happened.
        guard: name of a metric, or ``Guard``: the plain mean is kept where it is better.

    Raises:
        FedrotError: ``symmetry`` is something else; the anchor is unknown, or would undo the
            privacy of the strategy behind; the spill folder cannot be written to. In the first round:
            the symmetry does not fit the model, a privacy wrapper is around this strategy, or every
            reply is dropped for the same reason.
    """

    #: True if statistics of replies are used.
    uses_statistics = False

    #: True in simulations, where no client lies: deterministic rounds follow the clients' own ids.
    trusts_ids = False

    #: Attributes that a checkpoint leaves out: they are given anew, or belong to one round.
    not_in_checkpoints: tuple[str, ...] = (
        *("symmetry", "options", "robustness", "execution", "checkpointing", "reporting"),
        *("other_bases", "comparison", "_checkpoints", "_device", "_broadcast", "_config"),
        *("_grid", "_timeout", "_sent", "_sent_to_evaluate", "_begun"),
    )

    def __init__(
        self,
        symmetry: Symmetry | Mapping[str, Any] | object | None = None,
        *args: Any,
        anchor: str = DEFAULT_ANCHOR,
        options: AlignmentOptions | None = None,
        align: bool = True,
        other_basis: OtherBasis | None = None,
        robustness: Robustness | None = None,
        execution: Execution | None = None,
        checkpointing: Checkpointing | None = None,
        reporting: Reporting | None = None,
        guard: str | Guard | None = None,
        **kwargs: Any,
    ) -> None:
        arguments.check_described(type(self).__name__, symmetry, align)
        super().__init__(*args, **kwargs)
        check_anchor(anchor)
        if align:
            arguments.check_in_front(self, anchor, other_basis is not None)
        self.symmetry = symmetry
        self.anchor = anchor
        self.options = checked_options(options)
        self.align = align
        self.other_bases = OtherBases(other_basis)
        self.comparison = comparison_of(guard, align, self.options, self.other_bases.possible_options)
        self.robustness = robustness or Robustness()
        self.execution = execution or Execution()
        self.checkpointing = checkpointing or Checkpointing()
        self.reporting = reporting or Reporting()
        with Store(self.execution.spill):
            pass  # A folder that cannot be written to is an error before clients train.
        self._device = checked_device(self.execution.device)
        folder = self.checkpointing.folder
        self._checkpoints = Checkpoints(folder, self.checkpointing.keep) if folder is not None else None
        self._broadcast = ArrayRecord()
        self._config = ConfigRecord()
        self._grid: Grid | None = None
        self._timeout: float | None = None
        self._sent: list[Metadata] | None = None
        self._sent_to_evaluate: list[Metadata] | None = None
        self._begun: int | None = None
        self._clients: dict[int, int] = {}
        self._verdicts: dict[int, str] = {}

    def summary(self) -> None:
        """Log what is aligned and how replies are taken, then the summary of the strategy behind."""
        what = f"{' + '.join(self.options.parts)} to anchor '{self.anchor}'" if self.align else "off"
        log(INFO, "\t├──> Alignment: %s", what)
        streams = self.aggregator(1) is not None and not self.waits
        how = "averaged as they arrive" if streams else "kept until all have come"
        order = ", in an order that their contents give" if self.execution.deterministic else ""
        where = f", in {spill}" if (spill := self.execution.spill) and self.waits else ""
        log(INFO, "\t├──> Replies: %s%s%s", how, order, where)
        if self.comparison is not None:
            log(INFO, "\t├──> Guard: the better mean by '%s'", self.comparison.guard.metric)
        super().summary()  # type: ignore[safe-super]

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
        **further: Any,
    ) -> Result:
        """Run the rounds, as ``Strategy.start`` of Flower does; replies are fetched one at a time.

        Args:
            should_stop: as in Flower 1.43 and later. A resumed run asks it first about the checkpoint's
                round, so that a run that it has stopped stays so.
            **further: arguments of a later Flower, which are passed on.

        Raises:
            FedrotError: ``initial_arrays`` is no model; rounds, nodes or fractions are impossible; a
                checkpoint is wrong, see ``loop.run``; or the installed Flower, or a run with
                checkpoints, has no such argument.
        """
        arguments.check_initial_arrays(initial_arrays, self.symmetry, self.align)
        arguments.check_numbers(self._weighting, num_rounds)
        if should_stop is not None:
            further["should_stop"] = should_stop
        with_loop = self._checkpoints is not None or self.checkpointing.resume is not None
        arguments.check_further(further, super().start, run if with_loop else None)
        self._timeout = timeout
        self._sent = self._sent_to_evaluate = self._begun = None
        self._grid = lazy = grid if isinstance(grid, LazyGrid) else LazyGrid(grid)
        if self.comparison is not None:
            evaluate_fn = self.comparison.evaluating(evaluate_fn, self.aggregator(1) is not None)
        evaluating = reporting_evaluations(self.reporting, evaluate_fn)
        given = (num_rounds, timeout, train_config, evaluate_config, evaluating)
        if with_loop:
            further |= {"checkpoints": self._checkpoints, "resume": self.checkpointing.resume}
            result = run(self, lazy, initial_arrays, *given, **further)
        else:
            self.begin(None)
            result = super().start(lazy, initial_arrays, *given, **further)
        # Before 1.43, Flower returned no model if every round had failed.
        result.arrays = result.arrays or initial_arrays
        if empty := empty_rounds(self._verdicts):
            log(WARNING, empty)
        for line in run_lines(result.train_metrics_clientapp, self._verdicts, self.reporting.rows_path):
            log(INFO, line)
        return result

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """Refuse Flower's legacy server, which calls this first."""
        raise FedrotError(arguments.LEGACY.format(name=type(self).__name__))

    def begin(self, after_round: int | None) -> None:
        """Prepare for a run: the file of rows, see ``begin_rows``, and clients' own ids."""
        begin_rows(self.reporting.rows_path, after_round)
        self._verdicts = {n: said for n, said in self._verdicts.items() if n <= (after_round or 0)}
        self._clients = self._clients if after_round else {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Keep the broadcast model and who was asked: ``aggregate_train`` is not given them."""
        self._config, self._grid = config, grid
        self._begin_round(server_round, arrays)
        readable = plain(arrays)
        messages = super().configure_train(  # type: ignore[safe-super]
            server_round, readable, config, grid
        )
        sent = to_send(messages, readable, arrays, self.execution.wire)
        self._sent = [message.metadata for message in sent]
        return sent

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model in the precision of the wire, and keep who was asked."""
        messages = super().configure_evaluate(  # type: ignore[safe-super]
            server_round, arrays, config, grid
        )
        sent = to_send(messages, arrays, arrays, self.execution.wire)
        self._sent_to_evaluate = [message.metadata for message in sent]
        return sent

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Align the replies, let the strategy behind aggregate them, and report."""
        sent = sent_by(self._grid, self._sent)
        if not sent and not replies:
            self._verdicts[server_round] = NOBODY
            return None, None
        if not self._knows_model(server_round):
            return self._passed_on(server_round, replies)
        this_round = Round(server_round)
        with Store(self.execution.spill) as store:
            asked = Asked(sent, self._clients)
            # A subclass that was given the replies first may read them before and afterwards.
            one_pass = replies if self._in_front else streamed(replies)
            merge = self._collected(one_pass, asked, this_round, store)
            arrays, metrics = merge.result(self._wrapped())
        # Without alignment the metrics are the strategy's own; only what went wrong is added.
        every = self.reporting.all_metrics
        ours = this_round.metrics(every) if self.align else this_round.losses()
        if self.reporting.rows_path is not None:
            append_rows(self.reporting.rows_path, this_round.rows())
        self._verdicts[server_round] = this_round.log_end(self.align)
        metrics = MetricRecord({**(metrics or {}), **ours}) if ours or metrics is not None else None
        report_metrics(self.reporting, server_round, TRAIN, metrics)
        this_round.check_start(lambda: self._grid.get_node_ids() if self._grid is not None else ())
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the strategy behind aggregate the evaluations that it can read."""
        asked = Asked(sent_by(self._grid, self._sent_to_evaluate))
        readable = readable_evaluations(replies, asked, self._weighted_by)
        if not readable:
            return None
        found = super().aggregate_evaluate(server_round, readable)  # type: ignore[safe-super]
        report_metrics(self.reporting, server_round, EVALUATE, found)
        return found

    # What a subclass may override

    def schema(self, broadcast: Tensors) -> Schema:
        """Return the tensors that a reply may hold: those of the broadcast model."""
        return Schema(broadcast)

    def aggregator(self, server_round: int) -> Callable[[], Aggregator] | None:
        """Return the function that builds a round's aggregator.

        None gives all updates to the strategy behind.
        """
        return Mean if self.align and self.wrapped_class in OF_THE_MEAN else None

    def needs(self, server_round: int) -> tuple[str, ...]:
        """Return the kinds of statistics that every reply of a round must bring."""
        return ()

    @property
    def waits(self) -> bool:
        """True if a round keeps all updates until every reply has arrived."""
        of_all = self.align and (ANCHORS[self.anchor].needs_all or self.other_bases.needs_all)
        return self.execution.deterministic or of_all

    def merge(self, this_round: Round) -> Merge:
        """Return what takes a round's updates."""
        build = self.aggregator(this_round.number)
        if build is None:
            integers = integers_of(self._broadcast) if self.align else ArrayRecord()
            return ListMerge(this_round, integers)
        return AggregatorMerge(build, this_round, Mean() if build is Mean else None, self.comparison)

    def on_update(self, update: Update) -> None:
        """Called with every update in the round's coordinates, before it is merged."""

    @property
    def wrapped_class(self) -> type:
        """The class whose ``aggregate_train`` receives the aligned updates."""
        mro = type(self).__mro__
        after = mro[mro.index(Aligned) + 1 :]
        return next(cls for cls in after if "aggregate_train" in vars(cls))

    @property
    def plan(self) -> Plan:
        """What is aligned in every round; known once the first model has been broadcast."""
        assert isinstance(self.symmetry, Symmetry)
        return Plan(self.symmetry, self.options, self.anchor, self.other_bases, self._device)

    def check_own_messages(self, messages: Sequence[Message]) -> None:
        """Called with a round's messages if a subclass made them without ``configure_train`` of ours.

        Raises:
            FedrotError: the clients were not told what they need to know.
        """

    def _begin_round(self, server_round: int, arrays: ArrayRecord) -> None:
        """Keep the broadcast model, and find its symmetry."""
        self._begun, self._broadcast = server_round, arrays
        if self.align:
            arguments.check_not_behind(self)
            self.symmetry = arguments.symmetry_for(self.symmetry, arrays)
            self.symmetry.select(self.options.parts, self.options.layer_indices(self.symmetry.layers))
            self.other_bases.prepare(self.symmetry)

    def _knows_model(self, server_round: int) -> bool:
        """Return whether the round's broadcast model is known, if need be from the messages."""
        if self._begun == server_round:
            return True
        messages = [*self._grid.replies.asked.values()] if isinstance(self._grid, LazyGrid) else []
        if not messages:
            return bool(self._broadcast)
        self.check_own_messages(messages)
        arrays = common_model(messages, getattr(self._weighting, "arrayrecord_key", None))
        if arrays is not None:
            self._begin_round(server_round, arrays)
        return arrays is not None

    def _passed_on(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Let the strategy behind aggregate replies to a model that is not known."""
        if self.align or self.aggregator(server_round) is not None:
            raise FedrotError(arguments.UNKNOWN_MODEL.format(name=type(self).__name__, n=server_round))
        arrays, metrics = super().aggregate_train(server_round, replies)  # type: ignore[safe-super]
        self._verdicts[server_round] = NOBODY if arrays is None else OFF
        report_metrics(self.reporting, server_round, TRAIN, metrics)
        return arrays, metrics

    @property
    def _in_front(self) -> str:
        """The method ``aggregate_train`` of a subclass or of the instance, empty if it is ours."""
        if getattr(self.aggregate_train, "__func__", None) is Aligned.aggregate_train:
            return ""
        first = next(cls for cls in type(self).__mro__ if "aggregate_train" in vars(cls))
        return f"{first.__name__}.aggregate_train"

    def _collected(
        self, replies: Iterable[Message], asked: Asked, this_round: Round, store: Store
    ) -> Merge:
        """Return what has taken the updates of a round; everything else of the round is released."""
        broadcast = from_arrays(self._broadcast, writable=self.execution.deterministic)
        exchange = Exchange(self._grid, self._config, self._timeout) if self._grid is not None else None
        plan, merge = self.plan if self.align else None, self.merge(this_round)
        merge, aligner = aligned_merge(merge, plan, broadcast, this_round, exchange)
        inbox = Inbox(
            asked,
            self.schema(broadcast),
            this_round,
            weighted_by=self._weighted_by,
            needs=self.needs(this_round.number),
            uses_statistics=self.uses_statistics,
            copy=self.execution.deterministic,
            figures=figures_of(self) | figures_of(self._weighting),
            in_front=self._in_front,
        )
        run_round(
            replies,
            inbox,
            aligner,
            merge,
            waiting=self._waiting(store) if self.waits else None,
            on_update=self.on_update,
        )
        return merge

    def _waiting(self, store: Store) -> Waiting:
        if not self.execution.deterministic:
            return Waiting(store)
        if self.trusts_ids:
            return Waiting(store, attrgetter("client"), mixes=False)
        return Waiting(store, attrgetter("checksum"))

    def _wrapped(self) -> Wrapped:
        return Wrapped(
            strategy=self,
            wrapped_class=self.wrapped_class,
            aggregate=super().aggregate_train,  # type: ignore[safe-super]
            weighted_by=self._weighted_by,
            broadcast=self._broadcast,
            align=self.align,
            min_replies=self.robustness.min_replies,
        )

    @property
    def _weighting(self) -> object:
        return getattr(self, "strategy", self)  # a privacy wrapper has the strategy that weights updates

    @property
    def _weighted_by(self) -> str:
        return str(getattr(self._weighting, "weighted_by_key", "num-examples"))
