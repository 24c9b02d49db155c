"""Replies from another basis: the round's coordinates, and matching at the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from fedrot.alignment import Alignment
from fedrot.anchors import SAME_BASIS, Evidence, base_cosine
from fedrot.check import check_function
from fedrot.collect.activations import probing
from fedrot.collect.random_inputs import reads_text
from fedrot.collect.token_counts import tables_of
from fedrot.errors import SymmetryError, UpdateError
from fedrot.options import AlignmentOptions
from fedrot.strategies.client_matching import (
    OTHER_BASIS_OPTIONS,
    alignment_by,
    read_moves,
    request,
)
from fedrot.strategies.lazy_grid import streamed
from fedrot.strategies.round.round_report import Round
from fedrot.strategies.round.update import Update
from fedrot.strategies.settings import OtherBasis
from fedrot.symmetry import Symmetry
from fedrot.symmetry.canonical import check_rotates
from fedrot.symmetry.resolve import settings_of, tied_tensors
from fedrot.tensors import Tensors, check_finite


class Exchange(NamedTuple):
    """The grid, configuration and timeout with which clients are asked once more in a round."""

    grid: Grid
    config: ConfigRecord
    timeout: float | None

    def of(self, requests: Sequence[Message]) -> Iterable[Message]:
        """Send requests, and return the answers that come in time."""
        return streamed(self.grid.send_and_receive(requests, timeout=self.timeout)) if requests else ()


class OtherBases:
    """The settings ``OtherBasis`` at work; without settings, such replies are aligned like all others.

    Attributes:
        options: what to align in such replies; None aligns them like all others.
        evidence: returns activations on random tokens, once the model is verified; None before, for
            models without tokens, and where the residual stream is rotated.
        token_counts: the strategy's own; None for those that clients report.
    """

    def __init__(self, settings: OtherBasis | None) -> None:
        self.model = settings.model if settings is not None else None
        self.options = settings.options if settings is not None else None
        self.at_clients = settings is not None and settings.at_clients
        self.learning_passes = settings.learning_passes if settings is not None else 0
        self.evidence: Evidence | None = None
        self.token_counts = settings.token_counts if settings is not None else None
        self._default, self._prepared = OTHER_BASIS_OPTIONS, False

    @property
    def possible_options(self) -> AlignmentOptions | None:
        """The options, or those that ``prepare`` will choose."""
        return self.options or (self._default if self.model is not None else None)

    def as_it_is(self) -> None:
        """Bring no update to canonical form unless the options ask for it: statistics come with them."""
        self._default = self._default.as_it_is()
        self.options = self.options.as_it_is() if self.options is not None else None

    @property
    def rotates(self) -> bool:
        """Whether the residual stream is rotated, not permuted."""
        return self.options is not None and self.options.rotates

    @property
    def needs_all(self) -> bool:
        """True if the anchor, or the clients to ask, can only be chosen once every reply has arrived."""
        options = self.possible_options
        return options is not None and (self.at_clients or "residual" in options.parts)

    def prepare(self, symmetry: Symmetry) -> None:
        """Verify the model, once, before its residual stream is moved.

        Raises:
            SymmetryError: the model is not what its names say.
        """
        if self._prepared:
            return
        if self.model is None:
            self._decide(symmetry)
            self._prepared = True
            return
        # Building a model draws random numbers, which a resumed run would draw in another round.
        with torch.random.fork_rng(devices=[]):
            model = self.model()
        config = settings_of(model.config)
        # What a model ties is told by the model: arrays hold every tensor.
        self._decide(replace(symmetry, tied=symmetry.tied or tied_tensors(model.state_dict())))
        assert self.options is not None
        symmetry = symmetry.rotated if self.rotates else symmetry
        try:
            check_function(model, config, symmetry, self.options.parts)
        except SymmetryError as error:
            raise SymmetryError(
                "Replies from other bases cannot be matched with this 'model'. Leave the argument out "
                f"to align them like all others, or give 'options' with fewer parts. {error}"
            ) from error
        # Of rotated streams random tokens tell less than the weights do (docs/explanation/stream.md).
        if reads_text(config) and not self.rotates:
            self.evidence = probing(self.model, config, symmetry)
        self._prepared = True

    def _decide(self, symmetry: Symmetry) -> None:
        """Decide whether the residual stream is rotated; refuse that where no model could hold it."""
        chosen = self.possible_options
        self.options = chosen.for_model(symmetry) if chosen is not None else None
        if self.rotates:
            check_rotates(symmetry)

    def base(
        self,
        updates: Sequence[Update],
        places: Sequence[int],
        broadcast: Tensors,
        matchable: Callable[[Tensors], bool],
    ) -> Tensors:
        """Return the model whose coordinates the round takes, if the residual stream is matched.

        This is the broadcast model. If most updates come from another basis, it is the heaviest of
        these, which are at ``places``. If the broadcast model is not ``matchable``, it is the heaviest
        of the majority.
        """
        matched = self.options is not None and "residual" in self.options.parts
        if not matched or not places:
            return broadcast
        of = len(updates)
        if 2 * len(places) > of:
            chosen, why = places, f"{len(places)} of {of} replies come from other bases"
        elif not matchable(broadcast):
            chosen = [place for place in range(of) if place not in places]
            why = "The broadcast model cannot be matched"
        else:
            return broadcast
        update = max((updates[place] for place in chosen), key=lambda one: one.weight)
        log(INFO, "%s; the anchor is client %d's model.", why, update.client)
        return update.tensors

    def counts(self, updates: Sequence[Update], symmetry: Symmetry) -> Tensor | None:
        """Return how often each token occurs: the strategy's own counts, or the sum of the clients'.

        Counts that fit no table of the model are left out with a warning.
        """
        if self.token_counts is not None:
            return self.token_counts
        sizes = {symmetry.shapes[name][axis] for name, axis in tables_of(symmetry).items()}
        found = None
        for update in updates:
            given = update.token_counts
            if given is None:
                continue
            if len(given) in sizes and (found is None or len(found) == len(given)):
                found = given if found is None else found + given
            else:
                what = "Client %d counts %d tokens, but the model's tables have %s rows: left out."
                log(WARNING, what, update.client, len(given), " or ".join(map(str, sorted(sizes))))
        return found

    def matched_at_clients(
        self,
        updates: Sequence[Update],
        base: Tensors,
        symmetry: Symmetry,
        exchange: Exchange,
        this_round: Round,
    ) -> dict[int, Alignment]:
        """Return the alignments that clients found for their own updates, by place."""
        symmetry = symmetry.rotated if self.rotates else symmetry
        places = [i for i, update in enumerate(updates) if in_other_basis(update, base, symmetry)]
        requests = [
            request(
                base,
                updates[i].tensors,
                exchange.config,
                node_of(updates[i]),
                canonical_form=self.rotates,
            )
            for i in places
        ]
        found: dict[int, Alignment] = {}
        for place, answer in answers(requests, updates, places, exchange, this_round):
            update = updates[place]
            try:
                moves = read_moves(answer, symmetry)
                alignment = alignment_by(moves, update.tensors, base, symmetry)
                check_finite(alignment.apply(update.tensors))
            except UpdateError as error:
                log(WARNING, "Client %d is matched at the server: %s", update.client, error)
                continue
            found[place] = alignment
        return found

    def warn(self, count: int, of: int) -> None:
        """Say how many replies from another basis were aligned like all others, unless asked for."""
        if count and self.options is None and self.model is None:
            log(
                WARNING,
                "%d of %d replies seem not to have started from the broadcast model. Does the ClientApp "
                "load it? If these clients have starts of their own, give the strategy "
                "other_basis=OtherBasis(model=...) to match them as a whole.",
                count,
                of,
            )


def node_of(update: Update) -> int:
    """Return the node that sent an update."""
    return update.message.metadata.src_node_id


def answers(
    requests: Sequence[Message],
    updates: Sequence[Update],
    places: Iterable[int],
    exchange: Exchange,
    this_round: Round,
) -> Iterator[tuple[int, Message]]:
    """Yield the first answer of each sender of the updates at some places, as it comes."""
    asked = {node_of(updates[place]): place for place in places}
    for answer in this_round.waited(exchange.of(requests)):
        place = asked.pop(answer.metadata.src_node_id, None)
        if place is not None:
            yield place, answer


def in_other_basis(update: Update, base: Tensors, symmetry: Symmetry) -> bool:
    """Return whether an update comes from another basis."""
    return base_cosine(update.tensors, base, symmetry) < SAME_BASIS
