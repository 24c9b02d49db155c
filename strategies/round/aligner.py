"""Aligners: they move each update of a round into the round's coordinates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedrot.aggregation import Mean
from fedrot.alignment import Alignment
from fedrot.anchors import ANCHORS, Evidence, GlobalAnchor, RunningAnchor, decided, finder
from fedrot.errors import UpdateError
from fedrot.matching.problem import Anchor
from fedrot.options import AlignmentOptions
from fedrot.strategies.round.common_basis import learned_together
from fedrot.strategies.round.other_basis import Exchange, OtherBases, in_other_basis
from fedrot.strategies.round.round_report import Round
from fedrot.strategies.round.update import Update
from fedrot.symmetry import Symmetry
from fedrot.symmetry.canonical import canonical
from fedrot.tensors import Tensors, check_finite


class Unaligned:
    """Leaves every update as it was received. The base of the other aligners."""

    def __init__(self, broadcast: Tensors) -> None:
        self.broadcast = broadcast

    @property
    def checks(self) -> bool:
        """Whether ``check`` may refuse an update."""
        return False

    def check(self, update: Update) -> None:
        """Look at an update of the round before ``prepare``, which sees all of them.

        Raises:
            FedrotError: the update has to be dropped.
        """

    def prepare(self, updates: Sequence[Update]) -> Iterable[int]:
        """Look at all updates of the round; return their places in the order to align them in."""
        return range(len(updates))

    def align(self, update: Update, place: int = 0) -> Update:
        """Return the update in the round's coordinates.

        Raises:
            FedrotError: the update has to be dropped.
        """
        return update

    def accept(self, update: Update, place: int = 0) -> None:
        """Take note of an aligned update that is merged."""

    def close(self) -> None:
        """Log what concerns all updates of the round."""


@dataclass(frozen=True)
class Plan:
    """What an aligned strategy aligns, and where; the same in every round.

    Attributes:
        symmetry: of the broadcast model.
        options: what is aligned; ``other_bases`` tells it for updates from another basis.
        anchor: name of the anchor, see ``fedrot.align_round``.
        device: where updates are aligned and averaged.
    """

    symmetry: Symmetry
    options: AlignmentOptions
    anchor: str
    other_bases: OtherBases
    device: torch.device

    @property
    def by_layer(self) -> bool:
        """True if a GPU can align and average the updates layer by layer."""
        alone = self.other_bases.options is None and self.anchor in ("global", "running")
        return self.device.type != "cpu" and alone

    def rule(
        self,
        base: Tensors,
        mixed: bool = True,
        token_counts: Tensor | None = None,
        shared: Mean | None = None,
    ) -> GlobalAnchor:
        """Return the anchor of a new round whose coordinates are those of ``base``.

        Args:
            mixed: False if no update of the round comes from another basis.
            token_counts: see ``fedrot.align``.
            shared: the mean that the round's updates are added to, if it is a plain one.
        """
        options, evidence = self.of_others(mixed)
        find = finder(base, self.symmetry, self.options, options, evidence, token_counts)
        if self.anchor == "running":
            return RunningAnchor(Anchor(base), find, shared)
        return ANCHORS[self.anchor](Anchor(base), find)

    def moved_to(self, model: Tensors, base: Tensors, mixed: bool) -> Tensors:
        """Return a model in the coordinates of a round whose base is another one."""
        there = on_device(model, self.device)
        rule = replace(self, anchor="global").rule(on_device(base, self.device), mixed)
        return rule.align(there).apply(there)

    def is_canonical(self, mixed: bool) -> bool:
        """Return whether a round brings its updates to canonical form."""
        others, _ = self.of_others(mixed)
        options, _ = decided(self.options, others, self.symmetry)
        return bool(options.canonical)

    def of_others(self, mixed: bool) -> tuple[AlignmentOptions | None, Evidence | None]:
        """Return options and evidence for updates from other bases; none if there are none.

        Options that are canonical make the whole round so, which has to have a reason.
        """
        return (self.other_bases.options, self.other_bases.evidence) if mixed else (None, None)


class Aligner(Unaligned):
    """Aligns each update of one round as a whole.

    ``shared`` is the mean that updates are added to before ``accept``, see ``RunningAnchor``; with an
    ``exchange`` clients are asked to match themselves; ``rule`` is the round's anchor.
    """

    def __init__(
        self,
        plan: Plan,
        broadcast: Tensors,
        this_round: Round,
        shared: Mean | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(broadcast)
        self.plan, self.this_round = plan, this_round
        self._shared, self._exchange = shared, exchange
        self._matched: dict[int, Alignment] = {}
        self._places: dict[int, int] = {}
        self._base, self._mixed = broadcast, True
        self.rule = plan.rule(self._there(broadcast), shared=shared)

    @property
    def checks(self) -> bool:
        """Whether updates are needed in canonical form, or their activations are."""
        return self.plan.is_canonical(mixed=True) or self.plan.other_bases.evidence is not None

    def check(self, update: Update) -> None:
        """Refuse an update whose canonical form, or whose activations, overflow where they are needed.

        It must not choose the round's coordinates or anchor.
        """
        asked = self.plan.other_bases.evidence is not None
        other = asked and in_other_basis(update, self.broadcast, self.plan.symmetry)
        self._check(update.tensors, with_activations=other)

    def _check(self, tensors: Tensors, with_activations: bool) -> None:
        plan, others, form = self.plan, self.plan.other_bases, self._there(tensors)
        if plan.is_canonical(mixed=True):
            form = canonical(form, plan.symmetry)
            check_finite(form)
        if with_activations and others.evidence is not None:
            others.evidence(form, form)

    def prepare(self, updates: Sequence[Update]) -> Iterable[int]:
        """Choose the round's coordinates and anchor; updates that their clients matched come first."""
        others, base, symmetry = self.plan.other_bases, self.broadcast, self.plan.symmetry
        if others.needs_all:
            places = [i for i, update in enumerate(updates) if in_other_basis(update, base, symmetry)]
            self.this_round.other_basis = len(places)
            base = others.base(updates, places, base, self._matchable)
            self._base, self._mixed = base, bool(places)
            counts = others.counts(updates, symmetry)
            if others.at_clients and places and self._exchange is not None:
                asked = (updates, base, symmetry, self._exchange, self.this_round)
                self._matched = others.matched_at_clients(*asked)
            coordinates = (self._there(base), bool(places), counts)
            if others.learning_passes and places and len(updates) > 1 and self._exchange is not None:
                found = self._all_aligned(updates, self.plan.rule(*coordinates))
                how = (base, symmetry, others, self._exchange, self.this_round)
                self._matched = learned_together(updates, found, *how)
            self.rule = self.plan.rule(*coordinates, self._shared)
        rest = [place for place in range(len(updates)) if place not in self._matched]
        self._places = {place: index for index, place in enumerate(rest)}
        if self.rule.needs_all:
            given = (updates[place] for place in rest)
            self.rule.prepare([(self._there(update.tensors), update.weight) for update in given])
        return [*sorted(self._matched), *rest]

    def _matchable(self, model: Tensors) -> bool:
        """Return whether updates from other bases can be matched with a model."""
        with suppress(UpdateError):
            self._check(model, with_activations=True)
            return True
        return False

    def _all_aligned(self, updates: Sequence[Update], rule: GlobalAnchor) -> dict[int, Alignment]:
        """Return the alignments of all updates by place: of their clients, or by a rule of their own.

        Updates that cannot be aligned are left out.
        """
        rest = [place for place in range(len(updates)) if place not in self._matched]
        if rule.needs_all:
            rule.prepare([(self._there(updates[p].tensors), updates[p].weight) for p in rest])
        found = dict(self._matched)
        for place, alignment in found.items():
            update = updates[place]
            rule.include(alignment.apply(self._there(update.tensors)), update.weight)
        for index, place in enumerate(rest):
            tensors = self._there(updates[place].tensors)
            with suppress(UpdateError):
                alignment = rule.align(tensors, index)
                rule.accept(alignment.apply(tensors), updates[place].weight)
                found[place] = alignment
        return found

    def align(self, update: Update, place: int = 0) -> Update:
        """Return the update with its statistics in the round's coordinates.

        Raises:
            FedrotError: it cannot be aligned, its statistics cannot follow, or it is not finite there:
                the canonical form of an update with huge values overflows.
        """
        plan, tensors, alignment = self.plan, update.tensors, self._matched.get(place)
        if alignment is None:
            if not plan.other_bases.needs_all:
                self.this_round.other_basis += in_other_basis(update, self.broadcast, plan.symmetry)
            tensors = self._there(tensors)
            alignment = self.rule.align(tensors, self._places.get(place, place))
        given = {kind: self._there(by_name) for kind, by_name in update.statistics.items()}
        statistics = alignment.transport(given)
        moved = self._there(alignment.apply(tensors))
        check_finite(moved)
        self.this_round.report(update.client, alignment.report)
        return replace(update, tensors=moved, statistics=statistics)

    def accept(self, update: Update, place: int = 0) -> None:
        """Let an anchor that follows the round know the update."""
        note = self.rule.include if place in self._matched else self.rule.accept
        note(update.tensors, update.weight)

    def close(self) -> None:
        """Say how many replies came from another basis, and whether the round's coordinates are new."""
        self.plan.other_bases.warn(self.this_round.other_basis, len(self.this_round.reports))
        if self._base is not self.broadcast or self.plan.is_canonical(self._mixed):
            given = (self.broadcast, self._base, self._mixed)
            self.this_round.moved_broadcast = partial(self.plan.moved_to, *given)

    def _there(self, tensors: Tensors) -> Tensors:
        return on_device(tensors, self.plan.device)


class LayerwiseAligner(Aligner):
    """Prepares updates for ``LayerwiseMerge``, which aligns them; here they stay in host memory."""

    def align(self, update: Update, place: int = 0) -> Update:
        """Return the update, after a look at its basis."""
        self.this_round.other_basis += in_other_basis(update, self.broadcast, self.plan.symmetry)
        return update

    def _there(self, tensors: Tensors) -> Tensors:
        return tensors


def on_device(tensors: Tensors, device: torch.device) -> Tensors:
    """Return tensors on a device; one tensor under several names stays one tensor."""
    if device.type == "cpu":
        return tensors
    given = dict(tensors)
    moved = {id(tensor): tensor.to(device) for tensor in given.values()}
    return {name: moved[id(tensor)] for name, tensor in given.items()}
