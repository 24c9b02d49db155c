"""Alignment in front of any Flower strategy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fedrot.anchors import ANCHORS, SAME_BASE, AlignedUpdate, Evidence, align_round, base_cosine
from fedrot.contract import check_function
from fedrot.errors import FedrotError, SymmetryError, UpdateError
from fedrot.inputs import reads_text
from fedrot.matching.activations import probing
from fedrot.options import AlignmentOptions
from fedrot.strategies.matching import FOREIGN_OPTIONS, read_answer, request
from fedrot.strategies.privacy import check_in_front, check_not_behind
from fedrot.strategies.records import (
    STATISTICS,
    model_records,
    replace_changed,
    statistics_bytes,
    to_tensors,
)
from fedrot.strategies.replies import Reply, client_id, read_reply, with_common_layout
from fedrot.strategies.rounds import Merged, Round, Update
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.symmetry.resolve import settings_of
from fedrot.validation import check_finite

#: The anchor that docs/results.md found best over all its settings.
DEFAULT_ANCHOR = "running"


class Aligned(Strategy):
    """Mixin: put it in front of a Flower strategy and every reply is aligned before that one sees it.

    ``class MyStrategy(Aligned, FedAdam): ...``; keep it outside clipping and differential-privacy
    wrappers, ``class Private(Aligned, DifferentialPrivacyServerSideFixedClipping): ...``, which take
    ``anchor="global"`` only. Replies are taken in the order of the clients' own ids, so that results
    do not depend on which client was fastest. A reply that is not a finite update of the broadcast
    model, or comes without examples, is set aside with a warning and the round goes on with the others.

    Args:
        symmetry: a ``Symmetry``, or the model's transformers configuration (object or dictionary),
            from which the symmetry is built when the first model is broadcast.
        *args: passed to the strategy.
        anchor: whom to align to, see ``fedrot.align_round``; ``running`` if not given.
        options: what to align, see ``fedrot.AlignmentOptions``.
        model: returns a model of the broadcast architecture. With it, replies that come from another
            base than the broadcast model (of clients that trained from a start of their own, or join
            late with their own model) are matched as a whole, by weights and by activations on
            random tokens, without any data, once it is certain that this preserves the model's
            function. If most replies are foreign, the heaviest of them is the round's anchor in the
            broadcast model's place.
        foreign: what to align in such replies; the whole model if None and ``model`` is given. Giving
            it without ``model`` is a promise that the model is a standard one of its family.
        match_at_clients: ask the senders of foreign replies to match themselves on their own data,
            which needs ``model`` or ``foreign`` here and ``match_at_client`` on their ``ClientApp``. It
            costs one more exchange of two models; where most replies are foreign, one of the two is
            another client's.
        align: False moves nothing: good replies reach the strategy behind as they are.
        report_path: a JSON-lines file that receives one row per round, client and group, and one per
            reply set aside.
        **kwargs: passed to the strategy.

    Raises:
        FedrotError: the anchor is unknown, or it would undo the differential privacy of the strategy
            behind; on the first round, the symmetry does not fit the model, or a privacy wrapper is
            around this strategy.
    """

    def __init__(
        self,
        symmetry: Symmetry | Mapping[str, Any] | object,
        *args: Any,
        anchor: str = DEFAULT_ANCHOR,
        options: AlignmentOptions | None = None,
        model: Callable[[], nn.Module] | None = None,
        foreign: AlignmentOptions | None = None,
        match_at_clients: bool = False,
        align: bool = True,
        report_path: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if anchor not in ANCHORS:
            raise FedrotError(f"Unknown anchor '{anchor}'; choose from {', '.join(ANCHORS)}.")
        if match_at_clients and model is None and foreign is None:
            raise FedrotError(
                "match_at_clients is for foreign replies: give 'model', or 'foreign', too."
            )
        if align:
            check_in_front(self, anchor, foreign=model is not None or foreign is not None)
        self.symmetry = symmetry
        self.anchor = anchor
        self.options = options or AlignmentOptions()
        self.foreign = foreign
        self.model = model
        self.match_at_clients = match_at_clients
        self.align = align
        self.report_path = Path(report_path) if report_path is not None else None
        self._broadcast = ArrayRecord()
        self._config = ConfigRecord()
        self._grid: Grid | None = None
        self._evidence: Evidence | None = None
        self._prepared = False

    def summary(self) -> None:
        """Log what is aligned, then the strategy's own summary."""
        what = f"{' + '.join(self.options.parts)} to anchor '{self.anchor}'" if self.align else "off"
        log(INFO, "\t├──> Alignment: %s", what)
        super().summary()  # type: ignore[safe-super]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the broadcast model, which ``aggregate_train`` is not given."""
        self._broadcast, self._config, self._grid = arrays, config, grid
        if self.align:
            check_not_behind(self)
            if not isinstance(self.symmetry, Symmetry):
                self.symmetry = symmetry_of(self.symmetry, to_tensors(arrays))
            shapes = {name: tuple(array.shape) for name, array in arrays.items()}
            different = sorted(dict(shapes.items() ^ self.symmetry.shapes.items()))
            if different:
                raise SymmetryError(
                    f"The symmetry was built for another model: '{different[0]}' differs from what is "
                    "broadcast. Pass the configuration, or the symmetry, of this model."
                )
            self._prepare_for_foreign(self.symmetry)
        return super().configure_train(  # type: ignore[safe-super]
            server_round, arrays, config, grid
        )

    def _prepare_for_foreign(self, symmetry: Symmetry) -> None:
        """Make sure, once, that the model is what its names say before its residual stream is moved."""
        if self._prepared or self.model is None:
            return
        self._prepared = True
        model = self.model()
        config = settings_of(model.config)
        parts = FOREIGN_OPTIONS.parts if self.foreign is None else self.foreign.parts
        try:
            check_function(model, config, symmetry, parts)
        except SymmetryError as error:
            log(WARNING, "Replies from other bases will be aligned like all others: %s", error)
            self.foreign = None
            return
        self.foreign = self.foreign or FOREIGN_OPTIONS
        if reads_text(config):
            self._evidence = probing(self.model, config, symmetry)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Align the replies, let the strategy behind aggregate them, and report."""
        ordered = sorted(replies, key=client_id)
        failed = [message for message in ordered if message.has_error()]
        this_round = Round(server_round, failed=len(failed))
        this_round.statistics_bytes = sum(map(statistics_bytes, ordered))
        broadcast = to_tensors(self._broadcast)
        good = self._good(ordered, broadcast, this_round)
        if self.align:
            moved = self._aligned(good, broadcast, this_round)
        else:
            moved = [(r, Update(client_id(r.message), r.tensors, r.weight, r.statistics)) for r in good]
        merged = self._merged([update for _, update in moved], this_round)
        if merged is not None:
            accepted = {id(update) for update in merged.accepted}
            moved = [(reply, update) for reply, update in moved if id(update) in accepted]
        messages = [_with_tensors(reply, update.tensors) for reply, update in moved]
        if not messages and (merged is not None or not failed):
            # Strategies divide by the number of replies.
            return None, self._report(this_round, None)
        arrays, metrics = super().aggregate_train(  # type: ignore[safe-super]
            server_round, messages + failed
        )
        if merged is not None:
            arrays = merged.arrays
        if arrays is not None and (self.align or merged is not None):
            self._keep_dtypes(arrays)
        return arrays, self._report(this_round, metrics)

    def _needs(self, server_round: int) -> tuple[str, ...]:
        """Return the kinds of statistics that every reply of a round has to bring."""
        return ()

    def _merged(self, updates: Sequence[Update], this_round: Round) -> Merged | None:
        """Merge the updates in the place of the strategy behind, which then only sees the accepted.

        None leaves it to that strategy, which knows nothing of statistics.
        """
        dropped = sorted({kind for update in updates for kind in update.statistics})
        if dropped:
            log(WARNING, "The statistics '%s' are not used: that takes FedRot.", "', '".join(dropped))
        return None

    def _good(
        self, replies: list[Message], broadcast: Mapping[str, Tensor], this_round: Round
    ) -> list[Reply]:
        """Return the replies that may enter the average; set the others aside."""
        weighting = getattr(self, "strategy", self)
        weighted_by = getattr(weighting, "weighted_by_key", "num-examples")
        needs = self._needs(this_round.number)
        passed: list[Reply] = []
        for message in replies:
            if message.has_error():
                continue
            try:
                passed.append(read_reply(message, broadcast, weighted_by, needs))
            except UpdateError as error:
                this_round.put_aside(client_id(message), str(error))
        good, odd = with_common_layout(passed)
        for reply in odd:
            this_round.put_aside(
                client_id(reply.message),
                f"Its records and metrics are {reply.layout}, most clients' are {good[0].layout}. Send "
                "the same metrics from every client.",
            )
        return good

    def _aligned(
        self, replies: list[Reply], broadcast: Mapping[str, Tensor], this_round: Round
    ) -> list[tuple[Reply, Update]]:
        """Return the replies in the round's coordinates, their statistics moved with them.

        Those whose statistics cannot follow are set aside.
        """
        assert isinstance(self.symmetry, Symmetry)
        base = self._base(replies, broadcast, self.symmetry, this_round)
        found: dict[int, AlignedUpdate] = {}
        if self.match_at_clients and self.foreign is not None and this_round.foreign:
            found = self._matched_at_clients(replies, base, self.symmetry)
        others = [index for index in range(len(replies)) if index not in found]
        aligned = align_round(
            ((replies[index].tensors, replies[index].weight) for index in others),
            base,
            self.symmetry,
            self.options,
            self.anchor,
            self.foreign,
            self._evidence,
        )
        found |= dict(zip(others, aligned, strict=True))
        moved = []
        for index, reply in enumerate(replies):
            result, client = found[index], client_id(reply.message)
            this_round.reports.append((client, result.alignment.report))
            try:
                statistics = result.alignment.transport(reply.statistics)
            except FedrotError as error:
                this_round.put_aside(client, str(error))
                continue
            tensors = _without_integers(result.tensors, broadcast)
            moved.append((reply, Update(client, tensors, result.weight, statistics)))
        return moved

    def _base(
        self,
        replies: list[Reply],
        broadcast: Mapping[str, Tensor],
        symmetry: Symmetry,
        this_round: Round,
    ) -> Mapping[str, Tensor]:
        """Return whose coordinates the round is in: the broadcast model's, unless few share them."""
        foreign = [r for r in replies if base_cosine(r.tensors, broadcast, symmetry) < SAME_BASE]
        this_round.foreign = len(foreign)
        if foreign and self.foreign is None and self.model is None:
            log(
                WARNING,
                "%d of %d replies come from other bases than the broadcast model; give the strategy "
                "'model' to match them as a whole.",
                len(foreign),
                len(replies),
            )
        matched = self.foreign is not None and "residual" in self.foreign.parts
        if not matched or 2 * len(foreign) <= len(replies):
            return broadcast
        heaviest = max(foreign, key=lambda reply: reply.weight)
        log(
            INFO,
            "%d of %d replies come from other bases; the anchor is client %d's model.",
            len(foreign),
            len(replies),
            client_id(heaviest.message),
        )
        return heaviest.tensors

    def _matched_at_clients(
        self, replies: list[Reply], base: Mapping[str, Tensor], symmetry: Symmetry
    ) -> dict[int, AlignedUpdate]:
        """Return the updates that their senders matched to the base, by place among the replies."""
        assert self._grid is not None
        asked = {
            reply.message.metadata.src_node_id: index
            for index, reply in enumerate(replies)
            if base_cosine(reply.tensors, base, symmetry) < SAME_BASE
        }
        requests = []
        for node, index in asked.items():
            (update,) = model_records(replies[index].message.content).values()
            requests.append(request(base, update, self._config, node))
        found = {}
        for answer in self._grid.send_and_receive(requests):
            index = asked[answer.metadata.src_node_id]
            reply = replies[index]
            try:
                alignment = read_answer(answer, reply.tensors, base, symmetry)
                moved = alignment.apply(reply.tensors)
                check_finite(moved)
            except UpdateError as error:
                log(WARNING, "Client %d is matched at the server: %s", client_id(reply.message), error)
                continue
            found[index] = AlignedUpdate(moved, reply.weight, alignment)
        return found

    def _keep_dtypes(self, arrays: ArrayRecord) -> None:
        """Keep the broadcast model's integer and boolean buffers, and its precision elsewhere."""
        for name, array in self._broadcast.items():
            if name not in arrays:
                continue
            if not array.dtype.startswith("float"):
                arrays[name] = array
            elif arrays[name].dtype != array.dtype:
                arrays[name] = Array(arrays[name].numpy().astype(array.dtype))

    def _report(self, this_round: Round, metrics: MetricRecord | None) -> MetricRecord | None:
        if self.align:
            ours = this_round.metrics()
            log(
                INFO,
                "Alignment: distance %.4g -> %.4g (rotation %.1f%%, permutation %.1f%%), "
                "%d groups below the threshold skipped, %d replies set aside, %.2f s",
                ours["fedrot-distance-before"],
                ours["fedrot-distance-after"],
                100 * ours["fedrot-share-rotation"],
                100 * ours["fedrot-share-permutation"],
                ours["fedrot-groups-skipped"],
                ours["fedrot-replies-set-aside"],
                ours["fedrot-seconds"],
            )
        else:
            # Nothing but what went wrong: without alignment the metrics are the strategy's own.
            ours = {**this_round.losses()}
        if self.report_path is not None:
            self.report_path.parent.mkdir(parents=True, exist_ok=True)
            with self.report_path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in this_round.rows()))
        return MetricRecord({**(metrics or {}), **ours}) if ours or metrics is not None else None


def _without_integers(
    tensors: Mapping[str, Tensor], broadcast: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors with the broadcast model's integer and boolean buffers, as floats.

    The new model keeps the broadcast ones, and strategies measure distances over everything.
    """
    return {name: t if t.is_floating_point() else broadcast[name].float() for name, t in tensors.items()}


def _with_tensors(reply: Reply, tensors: Mapping[str, Tensor]) -> Message:
    """Return a copy of the reply's message with other tensors and without statistics."""
    content = RecordDict(dict(reply.message.content))
    if STATISTICS in content.array_records:
        del content[STATISTICS]
    ((name, arrays),) = content.array_records.items()
    content[name] = replace_changed(arrays, reply.tensors, tensors)
    message = copy.copy(reply.message)
    message.content = content
    return message
