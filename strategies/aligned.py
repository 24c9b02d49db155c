"""The mixin ``Aligned``: alignment in front of any strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord
from flwr.common import log

from fedrot.aggregation import Aggregator, Mean
from fedrot.anchors import ANCHORS, check_anchor
from fedrot.options import AlignmentOptions, checked_options
from fedrot.strategies import arguments
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.reporting.rows import Evaluate
from fedrot.strategies.round.aligner import Aligner, Plan, ToAnchor
from fedrot.strategies.round.guard import Guard, comparison_of
from fedrot.strategies.round.merge import OF_THE_MEAN, Averaged, Listed, Merge
from fedrot.strategies.round.other_basis import Exchange, FromOtherBases, OtherBases
from fedrot.strategies.round.outbox import integers_of
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.settings import OtherBasis
from fedrot.symmetry import Symmetry
from fedrot.tensors import Tensors

#: The anchor that docs/results/one-shot.md found best over all its settings.
DEFAULT_ANCHOR = "running"


class Aligned(ReplyStrategy):
    """Mixin that aligns every reply before the Flower strategy behind it aggregates.

    ``class MyStrategy(Aligned, FedAdam): ...``, then ``MyStrategy(config, eta=0.01)``. Put it in
    front of differential-privacy wrappers such as ``DifferentialPrivacyServerSideFixedClipping``; these
    take ``anchor="global"`` only.

    Replies are aligned and added to the mean one at a time, in the order of arrival. All of a round's
    updates are kept by strategies that look at every update (medians, Krum, privacy wrappers), by the
    anchor ``consensus``, by ``align=False``, and by the settings that say so. See ``ReplyStrategy`` for
    replies that are dropped.

    Args:
        symmetry: the model's transformers configuration (object or dictionary), or a ``Symmetry``.
            ``align=False`` needs neither.
        *args: of the strategy behind.
        anchor: of updates, see ``fedrot.align_round``; ``running`` if not given.
        options: what to align, see ``fedrot.AlignmentOptions``.
        align: False aligns nothing: accepted replies reach the strategy behind as they are.
        other_basis: how to align replies from another basis; None aligns them like all others.
        guard: name of a metric, or ``Guard``: the plain mean is kept where it is better.
        **kwargs: of ``ReplyStrategy``, and of the strategy behind.

    Raises:
        FedrotError: ``symmetry`` is something else; the anchor is unknown, or would undo the
            privacy of the strategy behind; the spill folder cannot be written to. In the first round:
            the symmetry does not fit the model, a privacy wrapper is around this strategy, or every
            reply is dropped for the same reason.
    """

    not_in_checkpoints = ("symmetry", "options", "other_bases", "comparison")

    def __init__(
        self,
        symmetry: Symmetry | Mapping[str, Any] | object | None = None,
        *args: Any,
        anchor: str = DEFAULT_ANCHOR,
        options: AlignmentOptions | None = None,
        align: bool = True,
        other_basis: OtherBasis | None = None,
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

    def summary(self) -> None:
        """Log what is aligned, then how replies are taken and the summary of the strategy behind."""
        what = f"{' + '.join(self.options.parts)} to anchor '{self.anchor}'" if self.align else "off"
        log(INFO, "\t├──> Alignment: %s", what)
        if self.comparison is not None:
            log(INFO, "\t├──> Guard: the better mean by '%s'", self.comparison.guard.metric)
        super().summary()

    def check_initial(self, arrays: ArrayRecord) -> None:
        """Check the first model before any client trains; raises ``FedrotError``."""
        arguments.check_initial_arrays(arrays, self.symmetry, self.align)

    def evaluating(self, evaluate: Evaluate | None) -> Evaluate | None:
        """Return the server's evaluation function; a guard has no mean evaluated twice."""
        if self.comparison is None:
            return evaluate
        return self.comparison.evaluating(evaluate, self.aggregator(1) is not None)

    def aggregator(self, server_round: int) -> Callable[[], Aggregator] | None:
        """Return the function that builds a round's aggregator.

        None gives all updates to the strategy behind.
        """
        return Mean if self.align and self.wrapped_class in OF_THE_MEAN else None

    @property
    def aligns(self) -> bool:
        """True if a round's updates are aligned, which its metrics and its verdict tell."""
        return self.align

    @property
    def waits(self) -> bool:
        """True if a round keeps all updates until every reply has arrived."""
        of_all = self.align and (ANCHORS[self.anchor].needs_all or self.other_bases.needs_all)
        return of_all or super().waits

    def begin_round(self, arrays: ArrayRecord) -> None:
        """Find the symmetry of the model that a round broadcasts."""
        if self.align:
            arguments.check_not_behind(self)
            self.symmetry = arguments.symmetry_for(self.symmetry, arrays)
            self.symmetry.select(self.options.parts, self.options.layer_indices(self.symmetry.layers))
            self.other_bases.prepare(self.symmetry)

    def aligner(self, broadcast: Tensors, merge: Merge, record: RoundRecord) -> Aligner:
        """Return what moves a round's updates."""
        if not self.align:
            return super().aligner(broadcast, merge, record)
        assert isinstance(self.symmetry, Symmetry)
        plan = Plan(self.symmetry, self.options, self.anchor, self._device)
        if self.other_bases.options is None:
            return ToAnchor(plan, broadcast, record, merge.mean)
        grid = self._grid
        exchange = Exchange(grid, self._config, self._timeout) if grid is not None else None
        return FromOtherBases(plan, self.other_bases, broadcast, record, merge.mean, exchange)

    def merge(self, record: RoundRecord) -> Merge:
        """Return what takes a round's updates."""
        build = self.aggregator(record.number)
        if build is None:
            return Listed(record, integers_of(self._broadcast) if self.align else ArrayRecord())
        return Averaged(build, record, self.comparison)
