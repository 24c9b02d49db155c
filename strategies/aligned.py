"""Alignment in front of any Flower strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NoReturn

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    Result,
    Strategy,
)
from torch import nn

from fedrot._io import append_rows
from fedrot.aggregation import Aggregator, Mean
from fedrot.anchors import OF_ALL
from fedrot.errors import FedrotError, SymmetryError, UpdateError
from fedrot.matching.pairs import model_distance
from fedrot.options import AlignmentOptions, checked_options
from fedrot.strategies import arguments
from fedrot.strategies.lazy_grid import LazyGrid
from fedrot.strategies.privacy import check_in_front, check_not_behind
from fedrot.strategies.reporting.json_log import log_fields
from fedrot.strategies.reporting.metrics_log import EVALUATE, TRAIN, MetricsLog
from fedrot.strategies.resume.checkpoints import Checkpoints
from fedrot.strategies.resume.loop import begin_rows, run
from fedrot.strategies.round.aligner import Coordinates
from fedrot.strategies.round.inbox import (
    Asked,
    Reply,
    client_id,
    metrics_layout,
    read_reply,
    read_weight,
    with_common_layout,
)
from fedrot.strategies.round.layerwise import checked_device
from fedrot.strategies.round.merge import Folding
from fedrot.strategies.round.other_basis import Exchange, OtherBasis
from fedrot.strategies.round.outbox import as_sent, of_mean, plain, restored, with_arrays, with_tensors
from fedrot.strategies.round.round_report import Round, Update, legible
from fedrot.strategies.round.spill import Store
from fedrot.strategies.round.waiting import Waiting, beyond
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.strategies.wire.records import statistics_bytes
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.tensors import Tensors, check_finite

#: What a round gives: the new model, None if the old one stays, and metrics.
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]

#: The anchor that docs/results.md found best over all its settings.
DEFAULT_ANCHOR = "running"

#: Strategies that look at the updates' mean and at nothing else.
OF_THE_MEAN = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)


class Aligned(Strategy):
    """Mixin: put it in front of a Flower strategy and every reply is aligned before that one sees it.

    ``class MyStrategy(Aligned, FedAdam): ...``; keep it outside clipping and differential-privacy
    wrappers, ``class Private(Aligned, DifferentialPrivacyServerSideFixedClipping): ...``, which take
    ``anchor="global"`` only.

    Replies are fetched, checked, aligned and folded into the mean one at a time, in the order of
    arrival, so that memory does not grow with the number of clients. Strategies that look at every
    update (medians, Krum, q-FedAvg, privacy wrappers) and the anchors ``consensus`` and ``medoid``
    hold all of them; so do ``align=False`` without an aggregation of fedrot's, ``deterministic``,
    ``norm_bound`` and matching replies in another basis as a whole.
    ``spill`` keeps on disk what waits. A reply that is not a finite update of the broadcast model,
    comes without examples, twice, or unasked, is dropped with a warning and the round goes on with
    the others.

    Args:
        symmetry: a ``Symmetry``, or the model's transformers configuration (object or dictionary),
            from which the symmetry is built when the first model is broadcast. ``align=False`` needs
            neither.
        *args: passed to the strategy.
        anchor: whom to align to, see ``fedrot.align_round``; ``running`` if not given.
        options: what to align, see ``fedrot.AlignmentOptions``.
        model: returns a model of the broadcast architecture. With it, replies that come from another
            base than the broadcast model (of clients that trained from a start of their own, or join
            late with their own model) are matched as a whole, by weights and by activations on
            random tokens, without any data, once it is certain that this preserves the model's
            function. If most replies are in another basis, the heaviest of them is the round's anchor
            in the
            broadcast model's place.
        other_basis: what to align in such replies; the whole model if None and ``model`` is given.
        Giving
            it without ``model`` is a promise that the model is a standard one of its family.
        match_at_clients: ask the senders of replies in another basis to match themselves on their own
        data,
            which needs ``model`` or ``other_basis`` here and ``match_at_client`` on their
            ``ClientApp``. It
            costs one more exchange of two models; where most replies are in another basis, one of the
            two is
            another client's.
        align: False moves nothing: good replies reach the strategy behind as they are.
        deterministic: take replies in the order of the clients' own ids, so that two runs agree to the
            last bit whoever was fastest.
        spill: a folder for updates that wait for others; None keeps them in memory.
        min_replies: with fewer good replies the round fails, and the model stays as it was.
        norm_bound: drop a reply whose distance from the broadcast model, once it is aligned to
            it, is more than so many times the round's median; needs three replies.
        wire: in which precision the model travels to the clients, float16 or bfloat16, while the
            server keeps its own; clients read it with ``from_arrays``, and may answer in any.
        device: where updates are aligned and averaged, ``cuda`` for the server's GPU. With the anchors
            ``global`` and ``running`` a plain mean is all that it holds beside two layers at a time;
            other anchors and aggregations, and replies in another basis, take whole updates there.
        checkpoints: a folder that receives a checkpoint after every round, see docs/checkpoints.md.
        keep_checkpoints: so many of them stay.
        resume: a folder of checkpoints to go on from; it may be the same, and empty at first.
        report_path: a JSON-lines file that receives one row per round, client and group, and one per
            reply that was lost.
        metrics_path: a JSON-lines file that receives one row per round and stage, see ``MetricsLog``.
        tensorboard: a folder for TensorBoard that receives the same, ``pip install
            'fedrot[tensorboard]'``.
        **kwargs: passed to the strategy.

    Raises:
        FedrotError: ``symmetry`` or ``model`` is something else; the anchor is unknown, or it would undo
            the differential privacy of the strategy behind; a number makes no sense; ``spill`` cannot be
            written to; TensorBoard is asked for and not installed; on the first round, the symmetry does
            not fit the model, ``model`` is not what its names say, a privacy wrapper is around this
            strategy, or every reply is dropped for the same reason.
    """

    #: What a checkpoint leaves out: it is given anew, or belongs to one round.
    not_in_checkpoints = (
        *("symmetry", "checkpoints", "resume", "metrics_log", "_other_basis", "_broadcast", "_config"),
        *("_grid", "_timeout", "_asked", "_asked_to_evaluate"),
    )

    def __init__(
        self,
        symmetry: Symmetry | Mapping[str, Any] | object | None = None,
        *args: Any,
        anchor: str = DEFAULT_ANCHOR,
        options: AlignmentOptions | None = None,
        model: Callable[[], nn.Module] | None = None,
        other_basis: AlignmentOptions | None = None,
        match_at_clients: bool = False,
        align: bool = True,
        deterministic: bool = False,
        spill: str | Path | None = None,
        min_replies: int = 1,
        norm_bound: float | None = None,
        wire: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        checkpoints: str | Path | None = None,
        keep_checkpoints: int = 3,
        resume: str | Path | None = None,
        report_path: str | Path | None = None,
        metrics_path: str | Path | None = None,
        tensorboard: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        arguments.check_described(type(self).__name__, symmetry, align, model)
        super().__init__(*args, **kwargs)
        matched = model is not None or other_basis is not None
        arguments.check_settings(anchor, match_at_clients, matched, min_replies, norm_bound, wire)
        arguments.check_paths(spill, report_path, metrics_path)
        if align:
            check_in_front(self, anchor, matched)
        self.symmetry = symmetry
        self.anchor = anchor
        self.options = checked_options(options)
        self.align = align
        self.deterministic = deterministic
        self.spill = Path(spill) if spill is not None else None
        with Store(self.spill):
            pass  # that it cannot be written to had better be known before clients train
        self.min_replies = min_replies
        self.norm_bound = norm_bound
        self.wire = wire
        self.device = checked_device(device)
        self.report_path = Path(report_path) if report_path is not None else None
        self.metrics_log = MetricsLog(metrics_path, tensorboard)
        self.checkpoints = (
            Checkpoints(checkpoints, keep_checkpoints) if checkpoints is not None else None
        )
        self.resume = resume
        self._other_basis = OtherBasis(other_basis, model, match_at_clients)
        self._broadcast = ArrayRecord()
        self._config = ConfigRecord()
        self._grid: Grid | None = None
        self._timeout: float | None = None
        self._asked = Asked()
        self._asked_to_evaluate = Asked()

    def summary(self) -> None:
        """Log what is aligned and how replies are taken, then the strategy's own summary."""
        what = f"{' + '.join(self.options.parts)} to anchor '{self.anchor}'" if self.align else "off"
        log(INFO, "\t├──> Alignment: %s", what)
        streams = self._aggregator(1) is not None and not self._waits
        how = "folded in as they arrive" if streams else "kept until all have come"
        order = ", in the order of the clients' ids" if self.deterministic else ""
        where = f", in {self.spill}" if self.spill is not None and not streams else ""
        log(INFO, "\t├──> Replies: %s%s%s", how, order, where)
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
    ) -> Result:
        """Run the rounds, as ``Strategy.start`` of Flower does; replies are fetched one at a time.

        Raises:
            FedrotError: ``initial_arrays`` is no model; or a checkpoint is wrong, see ``loop.run``.
        """
        arguments.check_initial_arrays(initial_arrays, self.symmetry, self.align)
        self._timeout = timeout
        lazy = grid if isinstance(grid, LazyGrid) else LazyGrid(grid)
        with self.metrics_log as metrics:
            evaluating = metrics.evaluating(evaluate_fn)
            given = (num_rounds, timeout, train_config, evaluate_config, evaluating)
            if self.checkpoints is None and self.resume is None:
                self.begin(None)
                return super().start(lazy, initial_arrays, *given)
            return run(
                self, lazy, initial_arrays, *given, checkpoints=self.checkpoints, resume=self.resume
            )

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """Refuse Flower's legacy server, which calls this first."""
        raise FedrotError(arguments.LEGACY.format(name=type(self).__name__))

    def begin(self, after_round: int | None) -> None:
        """Make the files of report and metrics ready, see ``begin_rows``; every run calls it."""
        # Both at once: files of one run get one number.
        begin_rows((self.report_path, self.metrics_log.path), after_round)
        self.metrics_log.begin(after_round)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the broadcast model and who was asked, which ``aggregate_train`` is not given."""
        self._broadcast, self._config, self._grid = arrays, config, grid
        if self.align:
            check_not_behind(self)
            if not isinstance(self.symmetry, Symmetry):
                self.symmetry = symmetry_of(self.symmetry, from_arrays(arrays))
            shapes = {name: tuple(array.shape) for name, array in arrays.items()}
            different = sorted(dict(shapes.items() ^ self.symmetry.shapes.items()))
            if different:
                raise SymmetryError(
                    f"The symmetry was built for another model: '{different[0]}' differs from what is "
                    "broadcast. Pass the configuration, or the symmetry, of this model."
                )
            # What cannot be moved had better be known before clients train.
            layers = self.options.layer_indices(self.symmetry.layers)
            self.symmetry.select(self.options.parts, layers)
            self._other_basis.prepare(self.symmetry)
        readable = plain(arrays)
        messages = super().configure_train(  # type: ignore[safe-super]
            server_round, readable, config, grid
        )
        sent = with_arrays(messages, readable, self._sent(arrays))
        self._asked = Asked([message.metadata for message in sent], self._asked.clients)
        return sent

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model in the precision in which it travels, and remember who was asked."""
        messages = super().configure_evaluate(  # type: ignore[safe-super]
            server_round, arrays, config, grid
        )
        sent = with_arrays(messages, arrays, self._sent(arrays))
        self._asked_to_evaluate = Asked([message.metadata for message in sent])
        return sent

    def _sent(self, arrays: ArrayRecord) -> ArrayRecord:
        return arrays if self.wire is None else to_arrays(from_arrays(arrays), self.wire)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Align the replies, let the strategy behind aggregate them, and report."""
        self._asked = self._really(self._asked)
        if not self._asked.anybody and not replies:
            return None, None
        this_round = Round(server_round)
        broadcast = from_arrays(self._broadcast, writable=self.deterministic)
        updates: Iterable[Update] = ()
        with Store(self.spill) as store:
            good: Iterable[Reply] = self._good(replies, broadcast, this_round)
            if self._waits:
                good = self._all(good, broadcast, this_round, store)
            build = self._aggregator(server_round)
            if build is None:
                updates = self._updates(good, broadcast, this_round)
                result = self._handed_over(updates, this_round, store)
            else:
                folding = Folding(build)
                if self.align and self._coordinates.by_layer and folding.mean is not None:
                    self._coordinates.fold_by_layer(good, broadcast, this_round, folding)
                else:
                    updates = self._updates(good, broadcast, this_round, folding.anchor)
                result = self._folded(updates, folding, this_round)
        arrays, metrics = self._reported(this_round, *result)
        self.metrics_log.write(server_round, TRAIN, metrics)
        this_round.check_start(self._nodes)
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the strategy behind aggregate the evaluations that it can read."""
        answers = self._really(self._asked_to_evaluate).answers()
        good: list[Message] = []
        failed: list[Message] = []

        def drop(message: Message, reason: str) -> None:
            client = client_id(message)
            fields = {"round": server_round, "stage": EVALUATE, "client": client, "dropped": reason}
            log_fields(WARNING, fields, "Evaluation of client %d dropped: %s", client, legible(reason))

        for message in replies:
            if message.has_error():
                failed.append(message)
                continue
            try:
                answers.check(message)
                read_weight(message.content, self._weighted_by)
            except UpdateError as error:
                drop(message, str(error))
            else:
                good.append(message)
        good, odd = with_common_layout(good, lambda message: metrics_layout(message.content))
        for message in odd:
            drop(message, "Its metrics are not like most.")
        if not sum(read_weight(message.content, self._weighted_by) for message in good):
            # Without an example there is nothing to average.
            good = []
        if not good and not failed:
            return None
        found: MetricRecord | None = super().aggregate_evaluate(  # type: ignore[safe-super]
            server_round, good + failed
        )
        self.metrics_log.write(server_round, EVALUATE, found)
        return found

    def _really(self, asked: Asked) -> Asked:
        """Return whom the grid sent messages to: a subclass may have sent others than were made here."""
        sent = self._grid.sent if isinstance(self._grid, LazyGrid) else []
        return Asked(sent, asked.clients) if sent else asked

    def _nodes(self) -> Iterable[int]:
        return self._grid.get_node_ids() if self._grid is not None else ()

    @property
    def _weighting(self) -> object:
        """The strategy that weights updates: this one, or the one that it wraps."""
        return getattr(self, "strategy", self)

    @property
    def _weighted_by(self) -> str:
        return str(getattr(self._weighting, "weighted_by_key", "num-examples"))

    @property
    def _waits(self) -> bool:
        """Whether nothing can be done with a reply before all have come."""
        of_all = self.align and (self.anchor in OF_ALL or self._other_basis.needs_all)
        return self.deterministic or self.norm_bound is not None or of_all

    @property
    def _behind(self) -> type:
        """The class whose ``aggregate_train`` receives what was aligned."""
        mro = type(self).__mro__
        after = mro[mro.index(Aligned) + 1 :]
        return next(cls for cls in after if "aggregate_train" in vars(cls))

    def _aggregator(self, server_round: int) -> Callable[[], Aggregator] | None:
        """Return what builds the aggregator that a round's updates are folded into.

        None hands all of them to the strategy behind.
        """
        return Mean if self.align and self._behind in OF_THE_MEAN else None

    def _needs(self, server_round: int) -> tuple[str, ...]:
        """Return the kinds of statistics that every reply of a round has to bring."""
        return ()

    def _statistics(self, reply: Reply) -> Mapping[str, Tensors]:
        """Return those of a reply's statistics that are used."""
        if reply.statistics:
            dropped = "', '".join(sorted(reply.statistics))
            log(WARNING, "The statistics '%s' are not used: that takes FedRot.", dropped)
        return {}

    def _good(
        self, replies: Iterable[Message], broadcast: Tensors, this_round: Round
    ) -> Iterator[Reply]:
        """Yield the replies that may enter the average, as they come; drop the others."""
        answers, needs = self._asked.answers(), self._needs(this_round.number)
        how = self.deterministic, getattr(self._weighting, "train_loss_key", None)
        for message in this_round.waited(replies):
            if message.has_error():
                reason = message.error.reason or "no reason given"
                client = answers.failed(message)
                if client is not None:
                    this_round.fail(client, reason)
                continue
            try:
                answers.check(message)
                this_round.statistics_bytes += statistics_bytes(message)
                reply = read_reply(message, broadcast, self._weighted_by, needs, *how)
            except UpdateError as error:
                this_round.drop(client_id(message), str(error))
                continue
            except Exception as error:
                # Nothing that a client sends may end the run.
                what = f"It cannot be read, {type(error).__name__}: {error}"
                this_round.drop(message.metadata.src_node_id, what)
                continue
            del message
            this_round.take(reply)
            yield reply
            # Or it would stay until the next one has come.
            del reply
        for client in answers.silent:
            this_round.miss(client)

    def _all(
        self, replies: Iterable[Reply], broadcast: Tensors, this_round: Round, store: Store
    ) -> Waiting:
        """Wait for all replies, and drop those that are too far away."""
        waiting = Waiting(replies, store)
        if self.norm_bound is not None:
            if self.align:
                distances = self._coordinates.distances(waiting, broadcast)
            else:
                distances = (model_distance(reply.tensors, broadcast) for reply in waiting)
            far = beyond(list(distances), self.norm_bound)
            for index, reason in far.items():
                this_round.drop(waiting[index].client, reason)
            waiting.remove(far)
        return waiting

    @property
    def _coordinates(self) -> Coordinates:
        assert isinstance(self.symmetry, Symmetry)
        matching = Exchange(self._grid, self._config, self._timeout) if self._grid is not None else None
        how = (self.symmetry, self.options, self.anchor, self._other_basis, self.device)
        return Coordinates(*how, self._statistics, matching)

    def _updates(
        self,
        replies: Iterable[Reply],
        broadcast: Tensors,
        this_round: Round,
        running: Mean | None = None,
    ) -> Iterator[Update]:
        """Yield the updates in the round's coordinates, see ``Coordinates.updates``."""
        if self.align:
            yield from self._coordinates.updates(replies, broadcast, this_round, running)
            return
        for reply in replies:
            yield Update(reply, reply.tensors, reply.weight, self._statistics(reply))
            del reply

    def _folded(self, updates: Iterable[Update], folding: Folding, this_round: Round) -> Aggregated:
        """Fold the updates into an aggregator one at a time, and give the strategy behind the result."""
        for update in updates:
            try:
                folding.add(update)
            except UpdateError as error:
                this_round.drop(update.reply.client, str(error))
            del update
        aggregator, contents = folding.chosen(this_round)
        this_round.accepted = len(contents)
        metrics = self._train_metrics(contents) if contents else None
        if not self._enough(this_round):
            return None, metrics
        merged = aggregator.result("cpu") if type(aggregator) is Mean else aggregator.result()
        this_round.note(aggregator.notes)
        del aggregator
        if not self._finite(merged, this_round):
            return None, metrics
        if self._behind is FedAvg:
            return as_sent(merged, self._broadcast), metrics
        # To strategies that look at nothing else, the mean is a round's only update.
        mean = of_mean(as_sent(merged, plain(self._broadcast)), self._weighted_by)
        ours = self._metrics_function
        self._metrics_function = lambda *_: MetricRecord()
        try:
            arrays, _ = super().aggregate_train(this_round.number, [mean])  # type: ignore[safe-super]
        finally:
            self._metrics_function = ours
        if arrays is None or not self._finite(from_arrays(arrays), this_round):
            return None, metrics
        return restored(arrays, self._broadcast), metrics

    def _handed_over(self, updates: Iterable[Update], this_round: Round, store: Store) -> Aggregated:
        """Give all updates to the strategy behind."""
        held = []
        for update in updates:
            message = with_tensors(update, store)
            held.append(replace(update.reply, message=message, tensors={}, statistics={}))
            del update
        good, odd = with_common_layout(held, lambda reply: reply.layout)
        for reply in odd:
            reason = f"Its records and metrics are {reply.layout}, most clients' are {good[0].layout}."
            this_round.drop(reply.client, f"{reason} Send the same metrics from every client.")
        this_round.accepted = len(good)
        if not self._enough(this_round):
            return None, None
        arrays, metrics = super().aggregate_train(  # type: ignore[safe-super]
            this_round.number, [reply.message for reply in good]
        )
        if arrays is None or not self._finite(from_arrays(arrays), this_round):
            return None, metrics
        return restored(arrays, self._broadcast) if self.align else arrays, metrics

    @staticmethod
    def _finite(tensors: Tensors, this_round: Round) -> bool:
        """Return whether a new model is finite; say so where it is not."""
        try:
            check_finite(tensors)
        except UpdateError as error:
            this_round.lose(f"the aggregation is not finite. {error}")
            return False
        return True

    def _train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Aggregate the clients' metrics like the strategy behind, over those that have the same."""
        good, odd = with_common_layout(contents, metrics_layout)
        if odd:
            log(WARNING, "The metrics of %d clients are left out: they are not like most.", len(odd))
        return self._metrics_function(good, self._weighted_by)

    @property
    def _metrics_function(self) -> Callable[[list[RecordDict], str], MetricRecord]:
        """The function with which the strategy behind aggregates metrics of training."""
        found: Callable[[list[RecordDict], str], MetricRecord] = vars(self)["train_metrics_aggr_fn"]
        return found

    @_metrics_function.setter
    def _metrics_function(self, function: Callable[[list[RecordDict], str], MetricRecord]) -> None:
        vars(self)["train_metrics_aggr_fn"] = function

    def _enough(self, this_round: Round) -> bool:
        """Return whether a round has enough good replies; say so where it has not."""
        enough = this_round.accepted >= self.min_replies
        if not enough:
            this_round.lose(f"{this_round.accepted} good replies, {self.min_replies} needed.")
        return enough

    def _reported(
        self, this_round: Round, arrays: ArrayRecord | None, metrics: MetricRecord | None
    ) -> Aggregated:
        """Log and write what happened, and add it to the metrics."""
        figures = this_round.metrics()
        this_round.log_end(figures, self.align)
        # Without alignment the metrics are the strategy's own; only what went wrong is added.
        ours = figures if self.align else this_round.losses()
        if self.report_path is not None:
            append_rows(self.report_path, this_round.rows())
        return arrays, MetricRecord({**(metrics or {}), **ours}) if ours or metrics is not None else None
