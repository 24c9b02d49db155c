"""The loop of a round: read each reply, align its update, merge it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count

from flwr.app import Message

from fedrot.strategies.round.aligner import Aligner, LayerwiseAligner, Plan, Unaligned
from fedrot.strategies.round.inbox import Inbox
from fedrot.strategies.round.merge import AggregatorMerge, LayerwiseMerge, Merge
from fedrot.strategies.round.other_basis import Exchange
from fedrot.strategies.round.round_report import Round
from fedrot.strategies.round.update import Update
from fedrot.strategies.round.waiting import Waiting
from fedrot.tensors import Tensors


def run_round(
    replies: Iterable[Message],
    inbox: Inbox,
    aligner: Unaligned,
    merge: Merge,
    *,
    waiting: Waiting | None = None,
    on_update: Callable[[Update], None] = lambda update: None,
) -> None:
    """Take the replies of a round one at a time, in the order of arrival.

    The inbox checks a reply or drops it, the aligner brings its update into the round's coordinates, and
    the merge takes it.

    Args:
        waiting: keeps all updates until every reply has arrived; None keeps one at a time.
        on_update: called with every aligned update, before it is merged.
    """

    def take(update: Update | None, place: int = 0) -> None:
        aligned = None
        if update is not None:
            with this_round.dropping(update.client):
                aligned = aligner.align(update, place)
        if aligned is not None:
            on_update(aligned)
            if merge.add(aligned):
                aligner.accept(aligned, place)

    def check(update: Update, place: int) -> None:
        with this_round.dropping(update.client):
            aligner.check(update)
            sound.add(place)

    this_round, sound = inbox.this_round, set[int]()
    # ``map`` keeps no item: a loop variable would keep one until the next reply has come.
    updates = map(inbox.read, this_round.waited(replies))
    if waiting is None:
        _exhaust(map(take, updates))
        inbox.close()
    else:
        _exhaust(map(waiting.add, updates))
        inbox.close()
        waiting.close()
        if aligner.checks:
            _exhaust(map(check, waiting, count()))
            waiting.remove({*range(len(waiting))} - sound)
        for place in aligner.prepare(waiting):
            take(waiting[place], place)
    aligner.close()


def aligned_merge(
    merge: Merge, plan: Plan | None, broadcast: Tensors, this_round: Round, exchange: Exchange | None
) -> tuple[Merge, Unaligned]:
    """Return a round's merge with the aligner in front of it; a GPU does both at once, layer by layer.

    Without a plan nothing is aligned.
    """
    if plan is None:
        return merge, Unaligned(broadcast)
    ours = merge if isinstance(merge, AggregatorMerge) else None
    mean, comparison = (ours.mean, ours.comparison) if ours is not None else (None, None)
    if plan.by_layer and mean is not None:
        layerwise = LayerwiseAligner(plan, broadcast, this_round, mean)
        return LayerwiseMerge(this_round, mean, layerwise, comparison), layerwise
    return merge, Aligner(plan, broadcast, this_round, mean, exchange)


def _exhaust(items: Iterable[object]) -> None:
    deque(items, maxlen=0)
