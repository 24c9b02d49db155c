"""``play``: one round, from the replies to the filled merge; and a strategy's choices.

``PlaysRounds`` has the methods by which a strategy chooses what ``play`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from operator import attrgetter

from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import Strategy

from fedrot.aggregation import Mean
from fedrot.strategies.round.aligner import Aligner
from fedrot.strategies.round.asked import Asked
from fedrot.strategies.round.guard import Comparison
from fedrot.strategies.round.inbox import Inbox, Schema
from fedrot.strategies.round.merge import Averaged, Listed, Merge
from fedrot.strategies.round.outbox import integers_of
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.round.update import Builder, MovedBroadcast, Update, Updates
from fedrot.strategies.settings import Reporting, Server
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.strategies.wire.flower_compat import Messages
from fedrot.strategies.wire.label_names import Names, check_names, wanted_names
from fedrot.strategies.wire.statistics_record import Kinds
from fedrot.tensors import Tensors, spare_threads

#: Returns all updates of a round in the order in which they are merged.
Order = Callable[[Updates], Updates]


def by_client(updates: Updates) -> Updates:
    """Sort by the ids that clients send, so that a client chooses its place."""
    return sorted(updates, key=attrgetter("client"))


def by_contents(updates: Updates) -> Updates:
    """Sort by a hash of each update's checksum and the checksums of all updates.

    A client cannot choose its place, because it does not know the updates of the
    others.
    """
    every = sorted(update.checksum for update in updates)

    def place(update: Update) -> bytes:
        return sha256(repr((every, update.checksum)).encode()).digest()

    return sorted(updates, key=place)


def play(
    replies: Messages,
    inbox: Inbox,
    aligner: Aligner,
    merge: Merge,
    *,
    order: Order | None = None,
) -> None:
    """Process the replies of a round one at a time, in the order of arrival.

    The inbox checks a reply, the aligner moves its update into the round's coordinates,
    and the merge adds the update. Each of them may drop it.

    Args:
        order: sorts all updates after every reply has arrived; None holds one update at
            a time.
    """
    record = inbox.record

    def take(update: Update) -> None:
        moved = None
        with record.dropping(update.client):
            moved = aligner.move(update)
        # The merge drops by itself what its aggregator refuses; another error there is
        # no client's.
        added = None if moved is None else merge.add(moved)
        if added is not None:
            aligner.follow(update, added)

    def receive(message: Message) -> None:
        with spare_threads():
            update = inbox.read(message)
            if update is not None:
                take(update)

    if order is None:
        # A loop variable would hold a message until the next one has arrived; ``map``
        # does not.
        for _ in map(receive, replies):
            pass
        inbox.close()
    else:
        held = order([*filter(None, map(inbox.read, replies))])
        inbox.close()
        for update in aligner.prepare(held):
            take(update)
    aligner.close()


class PlaysRounds(Strategy):
    """What a strategy chooses for a round; a subclass may override these methods."""

    #: True if statistics of replies are used.
    uses_statistics = False

    #: True in simulations: deterministic rounds sort replies by the ids that clients
    #: send.
    trusts_ids = False

    #: True if a round's updates are aligned; metrics and the verdict then report it.
    aligns = False

    #: Chooses between the result of a round and the plain mean, if there is a guard.
    comparison: Comparison | None = None

    #: The model's configuration or symmetry, if it is known.
    model_config: object = None

    server: Server
    reporting: Reporting
    #: True if a round holds all updates until every reply has arrived.
    waits: bool
    # The inbox and merges read these, too; base strategies may have the other names.
    _broadcast: ArrayRecord
    #: The strategy with weights: a privacy wrapper contains it.
    _weighting: object

    def schema(self, broadcast: Tensors) -> Schema:
        """Return the tensors that a reply must hold: those of the broadcast model."""
        return Schema(broadcast)

    def aggregator(self, server_round: int) -> Builder | None:
        """Return the function that builds a round's aggregator.

        None passes all updates on to the base strategy.
        """
        return None

    def needs(self, server_round: int) -> Kinds:
        """Return the kinds of statistics that every reply of a round must have."""
        return ()

    def check_labels(self, node: int, names: Names) -> None:
        """Raise ``UpdateError`` if a reply's labels have other names than the model's.

        Args:
            node: that has sent the reply.
            names: in the reply; if they are empty, those that the node has said for a
                fit count.
        """
        wanted = wanted_names(self.model_config, self.labels_of_nodes)
        check_names(names or self.labels_of_nodes.get(node, ()), wanted)

    def aligner(
        self, broadcast: Tensors, mean: Mean | None, record: RoundRecord
    ) -> Aligner:
        """Return the aligner of a round's updates.

        ``mean`` is the round's, if the base strategy only needs a mean.
        """
        return Aligner()

    def _played(
        self,
        replies: Messages,
        asked: Asked,
        record: RoundRecord,
        in_front: str,
    ) -> tuple[Merge, MovedBroadcast]:
        """Play a round; return the filled merge and ``Aligner.moved_broadcast``.

        All other objects of the round are released.
        """
        deterministic = self.server.deterministic
        broadcast = from_arrays(self._broadcast, writable=deterministic)
        build = self.aggregator(record.number)
        merge: Merge
        if build is not None:
            merge = Averaged(build, record, self.comparison)
        else:
            kept = integers_of(self._broadcast) if self.aligns else ArrayRecord()
            merge = Listed(record, kept)
        aligner = self.aligner(broadcast, merge.mean, record)
        order: Order | None = list if self.waits else None
        if deterministic:
            order = by_client if self.trusts_ids else by_contents
        schema = self.schema(broadcast)
        if order is None:
            # Held updates are checked whole: each of them counts in their order.
            schema = replace(schema, measured=aligner.measured)
        needs = self.needs(record.number)
        inbox = Inbox(self, asked, schema, record, needs, in_front)
        play(replies, inbox, aligner, merge, order=order)
        return merge, aligner.moved_broadcast()

    @property
    def labels_of_nodes(self) -> Mapping[int, Names]:
        """The names of labels that nodes have said for a fit, by node."""
        return {}

    @property
    def _weighted_by(self) -> str:
        return str(getattr(self._weighting, "weighted_by_key", "num-examples"))
