"""The mixin ``ReplyStrategy``: Flower's hooks, which check every reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging import INFO, WARNING
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedrot.errors import FedrotError
from fedrot.strategies import arguments
from fedrot.strategies.reporting.rows import (
    EVALUATE,
    TRAIN,
    begin_rows,
    report_metrics,
    reporting_evaluations,
)
from fedrot.strategies.reporting.verdict import (
    NOBODY,
    OFF,
    empty_rounds,
    run_lines,
    told,
)
from fedrot.strategies.resume.run import Stop, run
from fedrot.strategies.resume.state import State
from fedrot.strategies.round.asked import Asked, Sent, sent_by
from fedrot.strategies.round.evaluations import readable_evaluations
from fedrot.strategies.round.outbox import common_model, plain, to_send
from fedrot.strategies.round.play import PlaysRounds
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.settings import Checkpointing, Reporting, Server
from fedrot.strategies.wire.arrays import STATISTICS, from_arrays
from fedrot.strategies.wire.fitting_messages import PRIORS
from fedrot.strategies.wire.flower_compat import (
    Aggregated,
    Evaluate,
    Messages,
    StageMetrics,
)
from fedrot.strategies.wire.lazy_grid import LazyGrid, streamed
from fedrot.tensors import checked_device

#: Attributes with data of one round, or of one call of ``start``.
_OF_ONE_ROUND = (
    "_broadcast",
    "_config",
    "_grid",
    "_timeout",
    "_begun",
    "_sent",
    "_sent_to_evaluate",
)


class ReplyStrategy(PlaysRounds):
    """Mixin that reads and checks every reply before the base strategy aggregates.

    This class does not align. ``Aligned`` and ``AlignedLoRA`` inherit from it, and
    override the methods that move and merge a round's updates. A reply is dropped with
    a warning if it is not a finite update of the broadcast model, has no positive
    weight (``num-examples``), is sent twice, or matches no request of the round.

    Args:
        *args: of the base strategy, like ``**kwargs``.
        server: see ``Server``.
        checkpoints: where to write checkpoints, and to resume from them.
        reporting: files and functions that receive reports of the rounds.

    Raises:
        FedrotError: in the first round, if every reply is dropped for the same reason.
    """

    #: True if a round whose broadcast model is unknown is an error, not only unchecked.
    needs_model = False

    #: Whether, or by which name, the task head is fitted; None without such an option.
    fit_head: bool | str | None = None

    def __init__(
        self,
        *args: Any,
        server: Server | None = None,
        checkpoints: Checkpointing | None = None,
        reporting: Reporting | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.server = server or Server()
        self.reporting = reporting or Reporting()
        self._device = checked_device(self.server.device)
        self.waits = self.server.deterministic
        self.checkpoints = checkpoints
        # A privacy wrapper contains the strategy with weights.
        self._weighting = getattr(self, "strategy", self)
        self._broadcast = ArrayRecord()
        self._config = ConfigRecord()
        self._grid: Grid | None = None
        self._timeout = 3600.0
        self._sent: Sent = None
        self._sent_to_evaluate: Sent = None
        self._begun: int | None = None
        self._clients: dict[int, int] = {}
        self._verdicts: dict[int, str] = {}

    def summary(self) -> None:
        """Log what happens to replies, then the summary of the base strategy."""
        streams = self.aggregator(1) is not None and not self.waits
        how = "averaged as they arrive" if streams else "held until all have arrived"
        log(
            INFO,
            "\t├──> Replies: %s%s",
            how,
            ", sorted by their contents" if self.server.deterministic else "",
        )
        if kinds := self.needs(1):
            log(
                INFO,
                "\t├──> Statistics: every reply needs '%s'; clients call "
                "fedrot.strategies.add_statistics(content, message, model, batches)",
                "', '".join(kinds),
            )
        super().summary()  # type: ignore[safe-super]

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
        should_stop: Stop | None = None,
        **further: Any,
    ) -> Result:
        """Run the rounds as Flower's ``Strategy.start``; replies are fetched singly.

        Args:
            evaluate_fn: returns a ``MetricRecord``, a dictionary of numbers, or None.
            should_stop: as in Flower 1.43 and later. A resumed run calls it first with
                the checkpoint's round, so that a stopped run stays stopped.
            **further: arguments of later versions of Flower, which are passed on.

        Raises:
            FedrotError: ``initial_arrays`` is not a model; rounds, nodes or fractions
                are impossible; or a checkpoint is wrong, see ``run``.
            TypeError: the installed Flower, or a run with checkpoints, has no such
                argument.
        """
        self.check_initial(initial_arrays)
        arguments.check_numbers(self._weighting, num_rounds)
        if should_stop is not None:
            further["should_stop"] = should_stop
        self._timeout = timeout
        self._sent = self._sent_to_evaluate = self._begun = None
        self._grid = lazy = grid if isinstance(grid, LazyGrid) else LazyGrid(grid)
        if self.checkpoints is None or not self.checkpoints.rounds():
            initial_arrays = self.prepared(
                lazy, initial_arrays, train_config or ConfigRecord()
            )
        evaluating = evaluate_fn and arguments.read_evaluate(evaluate_fn)
        if self.comparison is not None:
            evaluating = self.comparison.evaluating(
                evaluating, self.aggregator(1) is not None
            )
        if evaluating is not None:
            evaluating = reporting_evaluations(self.reporting, evaluating)
        play_all: Callable[..., Result] = super().start
        if self.checkpoints is not None:
            play_all = partial(run, self, checkpoints=self.checkpoints)
        else:
            self.begin(None)
        result = play_all(
            lazy,
            initial_arrays,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            evaluating,
            **further,
        )
        # Before 1.43, Flower returned no model if every round had failed.
        result.arrays = result.arrays or initial_arrays
        self.ended(result, initial_arrays)
        if empty := empty_rounds(self._verdicts):
            log(WARNING, empty)
        for line in run_lines(
            result.train_metrics_clientapp, self._verdicts, self.reporting.rows_path
        ):
            log(INFO, line)
        return result

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """Refuse Flower's legacy server, which calls this method first."""
        raise FedrotError(
            f"{type(self).__name__} cannot be run by Flower's legacy server "
            "(ServerAppComponents, ServerApp(server_fn=...)): write app = ServerApp(), "
            "and in a function main(grid, context) under @app.main() "
            "strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=...)."
        )

    def begin(self, after_round: int | None) -> None:
        """Prepare the file of rows, see ``begin_rows``, and the ids of clients."""
        if self.reporting.rows_path is not None:
            begin_rows(self.reporting.rows_path, after_round)
        self._verdicts = {
            n: verdict
            for n, verdict in self._verdicts.items()
            if n <= (after_round or 0)
        }
        self._clients = self._clients if after_round else {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Messages:
        """Ask for statistics; store the model and requests for ``aggregate_train``."""
        if self.priors:
            config[PRIORS] = self.priors
        self._config = config
        self._grid = grid
        kinds = self.needs(server_round)
        if kinds or STATISTICS in config:
            config[STATISTICS] = ",".join(kinds)
        self._begin_round(server_round, arrays)
        readable = plain(arrays)
        messages = super().configure_train(  # type: ignore[safe-super]
            server_round, readable, config, grid
        )
        sent = to_send(messages, readable, arrays, self.server.wire)
        self._sent = [message.metadata for message in sent]
        return sent

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Messages:
        """Send the model in the precision of the wire, and store the requests."""
        if self.priors:
            config[PRIORS] = self.priors
        messages = super().configure_evaluate(  # type: ignore[safe-super]
            server_round, arrays, config, grid
        )
        sent = to_send(messages, arrays, arrays, self.server.wire)
        self._sent_to_evaluate = [message.metadata for message in sent]
        return sent

    def aggregate_train(self, server_round: int, replies: Messages) -> Aggregated:
        """Read and move replies, let the base strategy aggregate them, and report."""
        sent = sent_by(self._grid, self._sent)
        if not sent and not replies:
            self._verdicts[server_round] = NOBODY
            return None, None
        if not self._knows_model(server_round):
            return self._passed_on(server_round, replies)
        record = RoundRecord(server_round)
        in_front = self._in_front
        # A subclass that overrides this method may read the replies itself.
        one_pass = replies if in_front else streamed(replies)
        merge, moved_broadcast = self._played(
            one_pass, Asked(sent, self._clients), record, in_front
        )
        arrays, metrics = merge.result(self, moved_broadcast)
        if arrays is not None:
            arrays = self.finished(arrays, record)
        ours = record.metrics(self.aligns)
        if self.reporting.hashes:
            broadcast = from_arrays(self._broadcast)
            schema = self.schema(broadcast)
            if arrays is None:
                # A round without a new model has averaged nothing.
                record.origins.clear()
            record.add_hashes(
                broadcast,
                from_arrays(arrays or self._broadcast),
                {**schema.settings, **schema.about(broadcast)},
            )
        self.reporting.append(record.rows())
        self._verdicts[server_round] = record.log_end(
            self.aligns, self.fit_head is not False
        )
        if ours or metrics is not None:
            metrics = MetricRecord({**(metrics or {}), **ours})
        report_metrics(self.reporting, server_round, TRAIN, metrics)
        record.check_start(self._grid)
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Messages) -> StageMetrics:
        """Let the base strategy aggregate the readable evaluations."""
        sent = sent_by(self._grid, self._sent_to_evaluate)
        if sent == []:
            return None
        readable = readable_evaluations(replies, Asked(sent), self._weighted_by)
        if not readable:
            return None
        metrics = super().aggregate_evaluate(server_round, readable)  # type: ignore[safe-super]
        report_metrics(self.reporting, server_round, EVALUATE, metrics)
        return metrics

    # What a subclass may override

    def check_initial(self, arrays: ArrayRecord) -> None:
        """Check the first model before any client trains; raises ``FedrotError``."""
        arguments.check_initial_arrays(arrays, self.model_config, self.aligns)

    @property
    def priors(self) -> list[float]:
        """Shares of classes in the bias of the newest model; empty if not known.

        Requests for training and evaluation have them.
        """
        return []

    def prepared(
        self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord
    ) -> ArrayRecord:
        """Return the first model of a new run, given ``initial_arrays``."""
        return arrays

    def begin_round(self, arrays: ArrayRecord) -> None:
        """Called with the model that a round broadcasts, before any message is made."""

    def finished(self, arrays: ArrayRecord, record: RoundRecord) -> ArrayRecord:
        """Return a round's new model, given the merged one, after the last reply."""
        return arrays

    def ended(self, result: Result, first: ArrayRecord) -> None:
        """Called with the result of a run, after its last round.

        Args:
            first: the model before all rounds; its head may be a fitted one.
        """

    def check_own_messages(self, messages: Sequence[Message]) -> None:
        """Check messages that a subclass made without ``super().configure_train``.

        Raises:
            FedrotError: the messages lack something that clients need.
        """

    @property
    def wrapped_class(self) -> type:
        """The class whose ``aggregate_train`` receives the updates."""
        mro = type(self).__mro__
        behind = mro[mro.index(ReplyStrategy) + 1 :]
        return next(cls for cls in behind if "aggregate_train" in vars(cls))

    # Checkpoints

    def state(self) -> State:
        """Return by name what may be a run's state: attributes not of one round.

        A checkpoint holds those that changed since the run began. A subclass may leave
        out others.
        """
        kept = {
            name: value
            for name, value in vars(self).items()
            if name not in _OF_ONE_ROUND
        }
        return {**kept, "_verdicts": told(self._verdicts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the attributes that a checkpoint holds."""
        vars(self).update(state)

    def _aggregate_behind(self, server_round: int, replies: Messages) -> Aggregated:
        """Let the base strategy aggregate."""
        return super().aggregate_train(server_round, replies)  # type: ignore[safe-super]

    def _begin_round(self, server_round: int, arrays: ArrayRecord) -> None:
        if self.needs_model or self.aggregator(server_round) is not None:
            arguments.check_not_behind(self)
        self._begun = server_round
        self._broadcast = arrays
        self.begin_round(arrays)

    def _knows_model(self, server_round: int) -> bool:
        """Return whether the round's model is known, or is found in the messages."""
        if self._begun == server_round:
            return True
        if not isinstance(self._grid, LazyGrid) or not self._grid.replies.asked:
            return bool(self._broadcast)
        messages = [*self._grid.replies.asked.values()]
        self.check_own_messages(messages)
        arrays = common_model(
            messages, getattr(self._weighting, "arrayrecord_key", None)
        )
        if arrays is not None:
            self._begin_round(server_round, arrays)
        return arrays is not None

    def _passed_on(self, server_round: int, replies: Messages) -> Aggregated:
        """Let the base strategy aggregate replies to an unknown model."""
        if (
            self.needs_model
            or self.reporting.hashes
            or self.aggregator(server_round) is not None
        ):
            raise FedrotError(
                f"The model that the clients received in round {server_round} is not "
                f"known: {type(self).__name__} makes the messages itself, and these "
                "hold different ArrayRecords, or it overrides start. Call "
                "super().configure_train(server_round, arrays, config, grid) in its "
                "configure_train, and change the messages that this call returns."
            )
        arrays, metrics = self._aggregate_behind(server_round, replies)
        self._verdicts[server_round] = NOBODY if arrays is None else OFF
        report_metrics(self.reporting, server_round, TRAIN, metrics)
        return arrays, metrics

    @property
    def _in_front(self) -> str:
        """The name of an overriding ``aggregate_train``; empty without an override."""
        if (
            getattr(self.aggregate_train, "__func__", None)
            is ReplyStrategy.aggregate_train
        ):
            return ""
        first = next(
            cls for cls in type(self).__mro__ if "aggregate_train" in vars(cls)
        )
        return f"{first.__name__}.aggregate_train"
