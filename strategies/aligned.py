"""The mixin ``Aligned``, which adds alignment to any Flower strategy."""

from __future__ import annotations

from logging import INFO
from typing import Any

from flwr.app import ArrayRecord
from flwr.common import log

from fedrot.aggregation import Mean
from fedrot.alignment.anchors import check_anchor
from fedrot.options import AlignmentOptions, checked_options
from fedrot.strategies import arguments
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.round.aligner import Aligner, AlignmentPlan, ToAnchor
from fedrot.strategies.round.guard import Comparison, Guard
from fedrot.strategies.round.merge import OF_THE_MEAN
from fedrot.strategies.round.other_basis import (
    ClientRequests,
    FromOtherBases,
    OtherBases,
)
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.round.update import Builder
from fedrot.strategies.settings import OtherBasis
from fedrot.symmetry import Symmetry
from fedrot.tensors import Tensors

DEFAULT_ALIGNMENT = AlignmentOptions()


class Aligned(ReplyStrategy):
    """Mixin that aligns every reply before the base strategy aggregates it.

    ``class MyStrategy(Aligned, FedAdam): ...``, then ``MyStrategy(config, eta=0.01)``.
    With a differential-privacy wrapper such as
    ``DifferentialPrivacyServerSideFixedClipping``, name ``Aligned`` first, and give
    ``alignment=AlignmentOptions(anchor="global")``.

    Replies are aligned and added to the mean one at a time, in the order of arrival.
    All updates of a round are held with base strategies that need all of them (medians,
    Krum, privacy wrappers), ``alignment=None``, and some settings of ``server`` and
    ``other_basis``. See ``ReplyStrategy`` for replies that are dropped.

    Args:
        model_config: the model's transformers configuration (object or dictionary), or
            a ``Symmetry``; may be None with ``alignment=None``.
        *args: of the base strategy.
        alignment: what to align, and to which anchor, see ``fedrot.AlignmentOptions``.
            None aligns nothing: accepted replies reach the base strategy unchanged.
        other_basis: how to align replies from another basis; None aligns them like all
            others.
        guard: name of a metric, or ``Guard``: the mean without alignment is kept if it
            is better.
        **kwargs: of ``ReplyStrategy``, and of the base strategy.

    Raises:
        FedrotError: ``model_config`` has another type; the anchor is unknown, or would
            break the privacy guarantee of the base strategy. In the first round: the
            symmetry does not fit the model, a privacy wrapper contains this strategy,
            or every reply is dropped for the same reason.
    """

    #: Builds the aggregator of a round; None for the mean, see ``FedRot``.
    aggregation: Builder | None = None

    def __init__(
        self,
        model_config: arguments.Described | None = None,
        *args: Any,
        alignment: AlignmentOptions | None = DEFAULT_ALIGNMENT,
        other_basis: OtherBasis | None = None,
        guard: str | Guard | None = None,
        **kwargs: Any,
    ) -> None:
        arguments.check_described(
            type(self).__name__, model_config, alignment is not None
        )
        super().__init__(*args, **kwargs)
        if alignment is not None:
            check_anchor(checked_options(alignment, "alignment").anchor)
            arguments.check_in_front(self, alignment.anchor, other_basis is not None)
        self.aligns = self.needs_model = alignment is not None
        self.model_config = model_config
        self.symmetry: Symmetry | None = None
        self.alignment = alignment
        self.other_bases = OtherBases(other_basis) if other_basis is not None else None
        if self.aligns and self.other_bases is not None:
            self.waits = self.waits or self.other_bases.needs_all
        if guard is not None:
            self.comparison = Comparison(
                guard, self.all_options, aggregates=self.aggregation is not None
            )

    @property
    def all_options(self) -> list[AlignmentOptions]:
        """What to align: the options for all replies, and those from another basis."""
        options = [] if self.alignment is None else [self.alignment]
        if options and self.other_bases is not None:
            options.append(self.other_bases.options)
        return options

    def summary(self) -> None:
        """Log what is aligned, then the summaries behind."""
        chosen = self.alignment
        what = (
            f"{' + '.join(chosen.parts)} to anchor '{chosen.anchor}'"
            if chosen
            else "off"
        )
        log(INFO, "\t├──> Alignment: %s", what)
        if self.comparison is not None:
            log(
                INFO,
                "\t├──> Guard: the better mean by '%s'",
                self.comparison.guard.metric,
            )
        super().summary()

    def aggregator(self, server_round: int) -> Builder | None:
        """Return the function that builds a round's aggregator, see ``PlaysRounds``."""
        return Mean if self.aligns and self.wrapped_class in OF_THE_MEAN else None

    def begin_round(self, arrays: ArrayRecord) -> None:
        """Find the symmetry of the model that a round broadcasts."""
        if self.alignment is None:
            return
        symmetry = arguments.symmetry_for(self.symmetry or self.model_config, arrays)
        # A part or layer that this model lacks is an error before clients train.
        self.alignment.groups(symmetry)
        self.symmetry = symmetry
        if self.other_bases is not None:
            self.other_bases.prepare(symmetry)

    def aligner(
        self, broadcast: Tensors, mean: Mean | None, record: RoundRecord
    ) -> Aligner:
        """Return the aligner of a round's updates."""
        if self.alignment is None:
            return super().aligner(broadcast, mean, record)
        assert self.symmetry is not None  # from begin_round
        plan = AlignmentPlan(self.symmetry, self.alignment, self._device)
        if self.other_bases is None:
            return ToAnchor(plan, broadcast, record, mean)
        assert self._grid is not None  # from configure_train
        return FromOtherBases(
            plan,
            self.other_bases,
            broadcast,
            record,
            mean,
            ClientRequests(self._grid, self._config, self._timeout),
        )
