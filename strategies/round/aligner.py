"""A round's updates in common coordinates: aligned whole, or layer by layer on another device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.aggregation import Mean, Statistics
from fedrot.anchors import AlignedUpdate, align_round
from fedrot.errors import FedrotError
from fedrot.matching.pairs import model_distance
from fedrot.matching.problem import Anchor
from fedrot.options import AlignmentOptions
from fedrot.strategies.round.inbox import Reply
from fedrot.strategies.round.layerwise import fold_by_layer
from fedrot.strategies.round.merge import Folding
from fedrot.strategies.round.other_basis import Exchange, OtherBasis, in_other_basis
from fedrot.strategies.round.round_report import Round, Update
from fedrot.symmetry import Symmetry
from fedrot.tensors import Tensors


@dataclass(frozen=True)
class Coordinates:
    """Whom a round's updates are aligned to, how, and where.

    Attributes:
        symmetry: of the broadcast model.
        options: what is aligned.
        anchor: its name, see ``fedrot.align_round``.
        other_basis: what is done with updates from other bases.
        device: where updates are aligned and averaged.
        statistics: returns those of a reply's statistics that are used.
        exchange: by which clients can be asked to match themselves.
    """

    symmetry: Symmetry
    options: AlignmentOptions
    anchor: str
    other_basis: OtherBasis
    device: torch.device
    statistics: Callable[[Reply], Statistics]
    exchange: Exchange | None

    def updates(
        self,
        replies: Iterable[Reply],
        broadcast: Tensors,
        this_round: Round,
        running: Mean | None = None,
    ) -> Iterator[Update]:
        """Yield the updates in the round's coordinates, their statistics moved with them.

        Those whose statistics cannot follow are dropped.

        Args:
            running: the mean that they are folded into, see ``align_round``; None if that is none.
        """
        symmetry, matching, base = self.symmetry, self.other_basis, broadcast
        own = Mean() if running is None and self.anchor == "running" else None

        def moved(reply: Reply, result: AlignedUpdate) -> Iterator[Update]:
            for update in self._moved(reply, result, broadcast, this_round):
                yield update
                if own is not None:
                    own.fold(update.tensors, update.weight)

        found: dict[int, AlignedUpdate] = {}
        if isinstance(replies, Sequence) and matching.needs_all:
            places = [i for i, reply in enumerate(replies) if in_other_basis(reply, broadcast, symmetry)]
            this_round.other_basis = len(places)
            base = matching.base(replies, places, broadcast)
            if matching.match_at_clients and places and self.exchange is not None:
                asked = (replies, base, symmetry, self.exchange, this_round)
                found = matching.matched_at_clients(*asked)
            for index, result in sorted(found.items()):
                yield from moved(replies[index], result)
        given = deque[Reply]()

        def pairs() -> Iterator[tuple[Tensors, float]]:
            index = -1
            # Not with enumerate, which keeps the last reply until it has the next one.
            for reply in replies:
                index += 1
                if index in found:
                    continue
                if not matching.needs_all:
                    this_round.other_basis += in_other_basis(reply, broadcast, symmetry)
                given.append(reply)
                yield self._there(reply.tensors), reply.weight
                del reply

        aligned = align_round(
            pairs(),
            self._there(base),
            symmetry,
            self.options,
            self.anchor,
            matching.options,
            matching.evidence,
            running or own,
        )
        for result in aligned:
            yield from moved(given.popleft(), result)
            del result
        matching.warn(this_round.other_basis, len(this_round.reports))

    def _moved(
        self, reply: Reply, result: AlignedUpdate, broadcast: Tensors, this_round: Round
    ) -> Iterator[Update]:
        """Yield a reply's update, unless its statistics cannot follow."""
        this_round.report(reply.client, result.alignment.report)
        try:
            given = {kind: self._there(by_name) for kind, by_name in self.statistics(reply).items()}
            statistics = result.alignment.transport(given)
        except FedrotError as error:
            this_round.drop(reply.client, str(error))
            return
        tensors = _without_integers(self._there(result.tensors), broadcast)
        yield Update(reply, tensors, result.weight, statistics)

    @property
    def by_layer(self) -> bool:
        """Whether updates go through another device's memory layer by layer."""
        alone = self.other_basis.options is None and self.anchor in ("global", "running")
        return self.device.type != "cpu" and alone

    def fold_by_layer(
        self, replies: Iterable[Reply], broadcast: Tensors, this_round: Round, folding: Folding
    ) -> None:
        """Align the replies and fold them into the mean on the device, a layer at a time."""
        assert folding.mean is not None
        mean, anchor = folding.mean, Anchor(broadcast)
        how = self.symmetry, self.options, self.device
        for reply in replies:
            this_round.other_basis += in_other_basis(reply, broadcast, self.symmetry)
            update, before = _without_integers(reply.tensors, broadcast), mean.weight
            statistics = self.statistics(reply)
            try:
                report = fold_by_layer(mean, update, reply.weight, anchor, *how, statistics)
            except FedrotError as error:
                this_round.drop(reply.client, str(error))
                continue
            this_round.report(reply.client, report)
            folding.note(reply)
            del reply, update
            if self.anchor == "running":
                anchor = anchor.towards_last(mean.current, 1 - before / mean.weight)
        self.other_basis.warn(this_round.other_basis, len(this_round.reports))

    def distances(self, replies: Iterable[Reply], broadcast: Tensors) -> Iterator[float]:
        """Yield every update's distance from the broadcast model, in the coordinates of that one."""
        given = ((self._there(reply.tensors), reply.weight) for reply in replies)
        base, other_basis = self._there(broadcast), self.other_basis
        how = (self.symmetry, self.options, "global", other_basis.options, other_basis.evidence)
        for result in align_round(given, base, *how):
            yield model_distance(result.tensors, base)

    def _there(self, tensors: Tensors) -> Tensors:
        """Return tensors where updates are aligned; what is one tensor under several names stays one."""
        if self.device.type == "cpu":
            return tensors
        given = dict(tensors)
        moved = {id(tensor): tensor.to(self.device) for tensor in given.values()}
        return {name: moved[id(tensor)] for name, tensor in given.items()}


def _without_integers(tensors: Tensors, broadcast: Tensors) -> dict[str, Tensor]:
    """Return the tensors with the broadcast model's integer and boolean buffers, as floats.

    The new model keeps the broadcast ones, and strategies measure distances over everything.
    """
    return {
        name: t if t.is_floating_point() else broadcast[name].float().to(t.device)
        for name, t in tensors.items()
    }
