"""A common basis that the clients of a round learn together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import INFO, WARNING

from flwr.app import Message
from flwr.common import log

from fedrot.aggregation import Mean
from fedrot.alignment import Alignment
from fedrot.errors import UpdateError
from fedrot.matching.descent import compact
from fedrot.strategies.client_matching import alignment_by, read_moves, request
from fedrot.strategies.round.other_basis import Exchange, OtherBases, answers, node_of
from fedrot.strategies.round.round_report import Round
from fedrot.strategies.round.update import Update
from fedrot.symmetry import Symmetry
from fedrot.tensors import Tensors, check_finite

#: Share of the mean's weight above which the mean of the other clients would be rounding.
LARGEST_SHARE = 0.999


def learned_together(
    updates: Sequence[Update],
    found: Mapping[int, Alignment],
    base: Tensors,
    symmetry: Symmetry,
    others: OtherBases,
    exchange: Exchange,
    this_round: Round,
) -> dict[int, Alignment]:
    """Return the alignments of all updates after the clients have learned a common basis.

    In every pass all clients learn at the same time, each against the mean of the others as they were
    after the pass before. A client that gives no valid answer keeps what it had, and so does one that is
    nearly all of the mean.

    Args:
        found: the alignments to start from, by place; updates without one take no part.
        base: the round's coordinates, for reports.
    """
    symmetry = symmetry.rotated if others.rotates else symmetry
    now = dict(found)
    for number in range(others.learning_passes):
        mean = Mean()
        for place, alignment in now.items():
            mean.add(alignment.apply(updates[place].tensors), updates[place].weight)
        asked = [place for place in now if updates[place].weight <= LARGEST_SHARE * mean.weight]
        requests = [_request(updates[p], now[p], mean, others, exchange) for p in asked]
        learned = 0
        for place, answer in answers(requests, updates, asked, exchange, this_round):
            update = updates[place]
            try:
                moves = compact([*now[place].moves, *read_moves(answer, symmetry)])
                alignment = alignment_by(moves, update.tensors, base, symmetry)
                check_finite(alignment.apply(update.tensors))
            except UpdateError as error:
                log(WARNING, "Client %d keeps its rotations: %s", update.client, error)
                continue
            now[place], learned = alignment, learned + 1
        log(INFO, "Common basis, pass %d: %d of %d clients.", number + 1, learned, len(now))
    return now


def _request(
    update: Update, alignment: Alignment, mean: Mean, others: OtherBases, exchange: Exchange
) -> Message:
    """Return the request to learn between a client's own model and the mean of all others."""
    own, share = alignment.apply(update.tensors), update.weight / mean.weight
    rest = {
        name: (total - share * own[name]) / (1 - share) if own[name].is_floating_point() else own[name]
        for name, total in mean.current.items()
    }
    node = node_of(update)
    return request(rest, own, exchange.config, node, canonical_form=others.rotates, learn=True)
