"""Aligners, which move each update of a round into the round's coordinates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from logging import WARNING

import torch
from flwr.common import log

from fedrot.aggregation import Mean
from fedrot.alignment.align import Alignment
from fedrot.alignment.anchors import (
    ANCHORS,
    AnchorRule,
    Evidence,
    Finder,
    decided,
    finder,
    in_other_basis,
)
from fedrot.alignment.by_layer import moved_by_layer
from fedrot.matching.anchor import Anchor
from fedrot.matching.pairs import covered
from fedrot.options import AlignmentOptions
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.round.update import Moved, MovedBroadcast, Update, Updates
from fedrot.symmetry import Symmetry
from fedrot.tensors import Tensors, check_finite, check_update

_OTHERS = (
    "%d of %d replies seem not to have started from the broadcast model. Check that "
    "the ClientApp loads it. If these clients have different initialisations, give the "
    "strategy other_basis=OtherBasis(model=...) to match whole models."
)


class Aligner:
    """Leaves every update as it was received; base class of the other aligners."""

    @property
    def measured(self) -> Collection[str]:
        """Names of tensors whose distance ``move`` computes.

        It drops an update in which they are not finite; all others are checked before.
        """
        return ()

    def prepare(self, held: Updates) -> Updates:
        """Choose the round's coordinates; return the updates to move, in order."""
        return held

    def move(self, update: Update) -> Moved:
        """Return the update in the round's coordinates.

        Raises:
            FedrotError: the update must be dropped.
        """
        return Moved(update, update.tensors, update.statistics)

    def follow(self, update: Update, added: Tensors) -> None:
        """Follow an update of the round's mean; ``added`` is from ``Merge.add``."""

    def close(self) -> None:
        """Log messages about all updates of the round."""

    def moved_broadcast(self) -> MovedBroadcast:
        """Return a function for the broadcast model in the round's coordinates.

        None if the broadcast model is already in these coordinates. The function raises
        ``UpdateError`` if the broadcast model cannot be matched.
        """
        return None


@dataclass(frozen=True)
class AlignmentPlan:
    """The symmetry, options and device of an aligned strategy, for all rounds."""

    symmetry: Symmetry
    options: AlignmentOptions
    device: torch.device


class ToAnchor(Aligner):
    """Aligns each update of one round to the round's anchor, ``rule``.

    On a GPU, with an anchor that is found ``by_layers``, an update is aligned layer by
    layer while it is added to a mean on the GPU. Otherwise updates are aligned as a
    whole. Updates are added to the mean ``shared`` before ``follow``; it is None with
    other aggregations.
    """

    #: True if updates can be aligned layer by layer.
    by_layers = True

    #: What to align in updates from another basis; None aligns them like all others.
    other_options: AlignmentOptions | None = None
    #: Activations by which such updates are matched, see ``OtherBases``.
    evidence: Evidence | None = None

    def __init__(
        self,
        plan: AlignmentPlan,
        broadcast: Tensors,
        record: RoundRecord,
        shared: Mean | None,
    ) -> None:
        self.plan = plan
        self.broadcast = broadcast
        #: The model in the round's coordinates.
        self.base = broadcast
        self.record = record
        self.shared = shared
        self.rule_class = ANCHORS[plan.options.anchor]
        on_gpu = plan.device.type != "cpu" and shared is not None
        self._by_layer = on_gpu and self.by_layers and self.rule_class.by_layers
        check_update(broadcast, plan.symmetry.shapes)
        self._compared = 0
        self.rule = self.rule_at(broadcast, shared)

    @property
    def measured(self) -> Collection[str]:
        """Names of the tensors that the round's groups cover, see ``Aligner``."""
        computes = self.rule_class.align is AnchorRule.align and not self._by_layer
        # A canonical form is measured, not the update, and another basis not at all.
        if not computes or self.other_options is not None or self.canonical:
            return ()
        return covered(self.plan.options.groups(self.plan.symmetry), self.broadcast)

    def rule_at(self, base: Tensors, shared: Mean | None) -> AnchorRule:
        """Return the anchor of a round in the coordinates of ``base``."""
        base = self.there(base)
        mean = shared if self.rule_class.follows_mean else None
        return self.rule_class(Anchor(base), self.finder(base), mean)

    def finder(self, base: Tensors) -> Finder:
        """Return the function that finds one update's alignment to one anchor."""
        return finder(
            base,
            self.plan.symmetry,
            self.plan.options,
            self.other_options,
            self.evidence,
        )

    @property
    def canonical(self) -> bool:
        """True if the round brings its updates to canonical form."""
        options, _ = decided(self.plan.options, self.other_options, self.plan.symmetry)
        return bool(options.canonical)

    def move(self, update: Update) -> Moved:
        """Return the update in the round's coordinates, see ``Aligner``."""
        plan = self.plan
        self._compared += 1
        self.record.other_basis += in_other_basis(
            update.tensors, self.broadcast, plan.symmetry
        )
        if not self._by_layer:
            return self.moved_to_anchor(update)
        layers, statistics, report = moved_by_layer(
            update.tensors,
            self.rule.current,
            plan.symmetry,
            plan.options,
            plan.device,
            update.statistics,
        )
        return Moved(update, {}, statistics, report, layers)

    def moved_to_anchor(self, update: Update) -> Moved:
        """Return a whole update, moved to the round's anchor."""
        tensors = self.there(update.tensors)
        return self.moved(update, tensors, self.rule.align(tensors))

    def moved(self, update: Update, tensors: Tensors, alignment: Alignment) -> Moved:
        """Return an update moved by an alignment, given its tensors on the device."""
        statistics = alignment.transport(
            {kind: self.there(by_name) for kind, by_name in update.statistics.items()}
        )
        moved = self.there(alignment.move(tensors))
        changed = {n: tensor for n, tensor in moved.items() if tensor is not tensors[n]}
        # The canonical form of huge values overflows.
        check_finite(changed)
        return Moved(update, moved, statistics, lambda: alignment.report)

    def follow(self, update: Update, added: Tensors) -> None:
        """Pass the update to an anchor that follows the round."""
        self.rule.accept(added, update.weight)

    def close(self) -> None:
        """Log how many replies seem to come from another basis."""
        if self.record.other_basis:
            log(WARNING, _OTHERS, self.record.other_basis, self._compared)

    def moved_broadcast(self) -> MovedBroadcast:
        """Return a function for the broadcast model in these coordinates, or None."""
        there = self.base is self.broadcast and not self.canonical
        return None if there else self._broadcast_moved

    def _broadcast_moved(self) -> Tensors:
        model = self.there(self.broadcast)
        base = self.there(self.base)
        return self.finder(base)(model, Anchor(base)).move(model)

    def there(self, tensors: Tensors) -> Tensors:
        """Return tensors on the device for whole updates.

        A tensor under several names stays one.
        """
        device = self.plan.device
        if self._by_layer or device.type == "cpu":
            return tensors
        # A mapping may make its tensors when they are read; ids need kept ones.
        known = dict(tensors)
        moved = {id(tensor): tensor.to(device) for tensor in known.values()}
        return {name: moved[id(tensor)] for name, tensor in known.items()}
