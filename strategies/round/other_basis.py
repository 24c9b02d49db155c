"""Replies from another basis: the round's coordinates, and matching at clients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from operator import attrgetter
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from fedrot.aggregation import Mean
from fedrot.alignment.align import Alignment
from fedrot.alignment.anchors import Evidence, in_other_basis
from fedrot.check import check_function
from fedrot.collect.activations import probing
from fedrot.collect.random_inputs import reads_text
from fedrot.errors import SymmetryError, UpdateError
from fedrot.matching.descent import compact
from fedrot.strategies.client.moves import (
    OTHER_BASIS_OPTIONS,
    alignment_by,
    read_moves,
    request,
)
from fedrot.strategies.round.aligner import AlignmentPlan, ToAnchor
from fedrot.strategies.round.asked import Asked, Question
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.round.update import Moved, Update, Updates
from fedrot.strategies.settings import OtherBasis
from fedrot.strategies.wire.lazy_grid import streamed
from fedrot.symmetry import Symmetry
from fedrot.symmetry.canonical import canonical, check_rotates
from fedrot.symmetry.resolve import settings_of, tied_tensors
from fedrot.tensors import Tensors, check_finite

#: With a larger share of the mean's weight, the mean of the other clients would be a
#: rounding error.
LARGEST_SHARE = 0.999

#: Alignments by the requests whose answers hold the updates.
Found = dict[Question, Alignment]


class ClientRequests(NamedTuple):
    """The grid, configuration and timeout for further requests in a round."""

    grid: Grid
    config: ConfigRecord
    timeout: float | None


class OtherBases:
    """The settings ``OtherBasis``, verified for the model of a run.

    Attributes:
        options: what to align in such replies; ``prepare`` decides on ``canonical``.
        evidence: returns activations on random tokens. None before the model is
            verified, for models without tokens, and if the residual stream is rotated.
    """

    def __init__(self, settings: OtherBasis) -> None:
        self.settings = settings
        self.options = settings.options or OTHER_BASIS_OPTIONS
        self.evidence: Evidence | None = None
        self._prepared = False

    @property
    def needs_all(self) -> bool:
        """True if the anchor, or the clients to ask, depend on every reply."""
        return self.settings.at_clients or "residual" in self.options.parts

    def prepare(self, symmetry: Symmetry) -> None:
        """Verify the model's function once, before its residual stream is moved."""
        if self._prepared:
            return
        build = self.settings.model
        if build is not None:
            # Building a model draws random numbers; a resumed run would draw them in
            # another round.
            with torch.random.fork_rng(devices=[]):
                model = build()
            # Ties are read from the model, because a record of arrays may hold tied
            # tensors separately.
            tied = symmetry.tied or tied_tensors(model.state_dict())
            symmetry = replace(symmetry, tied=tied)
        self.options = self.options.for_model(symmetry)
        if self.options.rotates:
            check_rotates(symmetry)
        if build is None:
            return
        config = settings_of(model.config)
        symmetry = symmetry.rotated if self.options.rotates else symmetry
        try:
            check_function(model, config, symmetry, self.options.parts)
        except SymmetryError as error:
            raise SymmetryError(
                "Replies from other bases cannot be matched with this 'model'. Omit "
                "other_basis to align them like all others, or give 'options' with "
                f"fewer parts. {error}"
            ) from error
        # For rotated streams, weights are better evidence than random tokens
        # (docs/explanation/stream.md).
        if reads_text(config) and not self.options.rotates:
            self.evidence = probing(build, config, symmetry)
        self._prepared = True


class FromOtherBases(ToAnchor):
    """Aligns the updates of one round if some may come from another basis."""

    by_layers = False

    def __init__(
        self,
        plan: AlignmentPlan,
        others: OtherBases,
        broadcast: Tensors,
        record: RoundRecord,
        shared: Mean | None,
        exchange: ClientRequests,
    ) -> None:
        self.others = others
        self.exchange = exchange
        self.other_options = others.options
        self.evidence = others.evidence
        self._matched: Found = {}
        #: Returns the request to a client about its tensors.
        self._request = partial(
            request, exchange.config, canonical_form=others.options.rotates
        )
        super().__init__(plan, broadcast, record, shared)

    def _check(self, tensors: Tensors, with_activations: bool) -> None:
        form = self.there(tensors)
        if self.canonical:
            form = canonical(form, self.plan.symmetry)
            check_finite(form)
        if with_activations and self.others.evidence is not None:
            self.others.evidence(form, form)

    def prepare(self, held: Updates) -> Updates:
        """Choose the round's coordinates; updates matched at clients come first.

        An update whose canonical form or activations overflow is dropped, because it
        must not define the round's coordinates.
        """
        others = self.others
        if not others.needs_all:
            return held
        updates = list[Update]()
        far = list[Update]()
        near = list[Update]()
        for update in held:
            with self.record.dropping(update.client):
                other = in_other_basis(
                    update.tensors, self.broadcast, self.plan.symmetry
                )
                self._check(update.tensors, with_activations=other)
                updates.append(update)
                (far if other else near).append(update)
        self.record.other_basis = len(far)
        self.base = self._chosen_base(far, near)
        if not far:
            self.other_options = self.evidence = None
        elif others.settings.at_clients:
            self._matched = self._matched_at_clients(updates)
        if far and others.settings.learning_passes and len(updates) > 1:
            self._matched = self._learned_together(updates)
        self.rule = self.rule_at(self.base, self.shared)
        return self._matched_first(updates)

    def _matched_first(self, updates: Updates) -> Updates:
        return sorted(updates, key=lambda update: update.question not in self._matched)

    def _chosen_base(self, far: Updates, near: Updates) -> Tensors:
        """Return the model that defines the round's coordinates.

        This is the broadcast model, with two exceptions if the residual stream is
        matched. If most updates come from another basis (``far``), it is the one of
        these with the largest weight. If the broadcast model cannot be matched, it is
        the one with the largest weight among the other updates.
        """
        if "residual" not in self.others.options.parts or not far:
            return self.broadcast
        if len(far) > len(near):
            why = f"{len(far)} of {len(far) + len(near)} replies come from other bases"
            chosen = far
        elif not self._matchable(self.broadcast):
            chosen = near
            why = "The broadcast model cannot be matched"
        else:
            return self.broadcast
        heaviest = max(chosen, key=attrgetter("weight"))
        log(INFO, "%s; the anchor is client %d's model.", why, heaviest.client)
        return heaviest.tensors

    def _matchable(self, model: Tensors) -> bool:
        with suppress(UpdateError):
            self._check(model, with_activations=True)
            return True
        return False

    @property
    def _symmetry(self) -> Symmetry:
        """The symmetry of the moves that clients send."""
        rotates = self.others.options.rotates
        return self.plan.symmetry.rotated if rotates else self.plan.symmetry

    def _matched_at_clients(self, updates: Updates) -> Found:
        """Return the alignments that clients found for their own updates."""
        asked = [
            update
            for update in updates
            if in_other_basis(update.tensors, self.base, self._symmetry)
        ]
        requests = [
            self._request(update.question.node, self.base, update.tensors)
            for update in asked
        ]
        return self._answers(
            requests, asked, {}, "Client %d is matched at the server: %s"
        )

    def _answers(
        self,
        requests: Sequence[Message],
        asked: Updates,
        before: Found,
        otherwise: str,
    ) -> Found:
        """Return the alignments that clients found, each after the one ``before``.

        The first answer to a request counts. An answer that is no alignment, or whose
        result is not finite, is left out, and the warning ``otherwise`` tells why.
        """
        if not requests:
            return {}
        exchange = self.exchange
        # Requests have ids once they are sent.
        answers = exchange.grid.send_and_receive(requests, timeout=exchange.timeout)
        sent = Asked(message.metadata for message in requests)
        silent = dict(zip(sent.questions, asked, strict=True))
        alignments: Found = {}
        for answer in streamed(answers):
            update = silent.pop(sent.question(answer), None)
            if update is None:
                continue
            try:
                moves = read_moves(answer, self._symmetry)
                if update.question in before:
                    moves = compact([*before[update.question].moves, *moves])
                alignment = alignment_by(
                    moves, update.tensors, self.base, self._symmetry
                )
                check_finite(alignment.move(update.tensors))
            except UpdateError as error:
                log(WARNING, otherwise, update.client, error)
            else:
                alignments[update.question] = alignment
        return alignments

    def _learned_together(self, updates: Updates) -> Found:
        """Return the alignments of all updates after clients learn a common basis.

        In each pass all clients learn at the same time, each against the mean of the
        others after the pass before. The alignment of a client does not change if its
        answer is missing or invalid, or if the client has nearly all of the weight
        (``LARGEST_SHARE``).
        """
        now = self._aligned_alone(updates)
        updates = [update for update in updates if update.question in now]
        for number in range(self.others.settings.learning_passes):
            mean = Mean()
            for update in updates:
                mean.add(now[update.question].move(update.tensors), update.weight)
            most = LARGEST_SHARE * mean.weight
            asked = [update for update in updates if update.weight <= most]
            requests = [
                self._to_learn(update, now[update.question], mean) for update in asked
            ]
            learned = self._answers(
                requests,
                asked,
                now,
                "The rotations of client %d stay unchanged: %s",
            )
            now |= learned
            log(
                INFO,
                "Common basis, pass %d: %d of %d clients.",
                number + 1,
                len(learned),
                len(now),
            )
        return now

    def _aligned_alone(self, updates: Updates) -> Found:
        """Return the alignments to start from: of clients, or by an own anchor.

        Updates that cannot be aligned are left out.
        """
        alignments = dict(self._matched)
        rule = self.rule_at(self.base, None)
        for update in self._matched_first(updates):
            question = update.question
            tensors = self.there(update.tensors)
            if question in self._matched:
                rule.include(alignments[question].move(tensors), update.weight)
                continue
            with suppress(UpdateError):
                alignment = rule.align(tensors)
                rule.accept(alignment.move(tensors), update.weight)
                alignments[question] = alignment
        return alignments

    def _to_learn(self, update: Update, alignment: Alignment, mean: Mean) -> Message:
        """Return the request to learn between a client's model and all others' mean."""
        moved = alignment.move(update.tensors)
        share = update.weight / mean.weight
        rest = dict(moved)
        for name, total in mean.current.items():
            if moved[name].is_floating_point():
                rest[name] = (total - share * moved[name]) / (1 - share)
        return self._request(update.question.node, rest, moved, learn=True)

    def move(self, update: Update) -> Moved:
        """Return the update, moved by its client's alignment if there is one."""
        matched = self._matched.get(update.question)
        if matched is not None:
            return self.moved(update, update.tensors, matched)
        if self.others.needs_all:
            return self.moved_to_anchor(update)
        return super().move(update)

    def follow(self, update: Update, added: Tensors) -> None:
        """Pass the update to an anchor that follows the round."""
        if update.question in self._matched:
            self.rule.include(added, update.weight)
        else:
            super().follow(update, added)

    def close(self) -> None:
        """Log nothing: such replies are expected."""
