"""Updates folded into an aggregator as they come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from flwr.app import RecordDict

from fedrot.aggregation import Aggregator, Mean
from fedrot.errors import UpdateError
from fedrot.strategies.round.inbox import Reply
from fedrot.strategies.round.round_report import Round, Update
from fedrot.strategies.wire.records import without_arrays

#: An aggregator goes by the first update it is given. In case that was the odd one, others are built
#: from what it refuses; being odd in ever new ways costs no more memory than so many of them.
CANDIDATES = 3

_ODD = "Its statistics are of another form than most clients'. Collect them alike at every client."


@dataclass
class _Candidate:
    """An aggregator, and of what it took: the clients, why others refused them, the contents."""

    aggregator: Aggregator
    taken: list[tuple[int, str, RecordDict]] = field(default_factory=list)

    def add(self, update: Update, refusal: str) -> None:
        self.aggregator.add(update.tensors, update.weight, update.statistics)
        self.note(update.reply, refusal)

    def note(self, reply: Reply, refusal: str = "") -> None:
        self.taken.append((reply.client, refusal or _ODD, without_arrays(reply.message.content)))


class Folding:
    """The aggregators of one round: the one that most updates agree with counts.

    Args:
        build: returns a new aggregator.

    Attributes:
        anchor: the mean of the updates in the aggregator that is ahead: itself, if it is a plain mean.
    """

    def __init__(self, build: Callable[[], Aggregator]) -> None:
        self._build = build
        self._candidates = [_Candidate(build())]
        self._gone: list[tuple[int, str, RecordDict]] = []
        self.anchor = self.mean or Mean()

    @property
    def mean(self) -> Mean | None:
        """The aggregator, if it is a plain mean: no update is odd to that."""
        first = self._candidates[0].aggregator
        return first if type(first) is Mean else None

    def note(self, reply: Reply) -> None:
        """Note the reply whose update somebody else has folded into ``mean``."""
        self._candidates[0].note(reply)

    def add(self, update: Update) -> None:
        """Fold one update in.

        Raises:
            UpdateError: no aggregator takes it.
        """
        candidate = self._taker(update)
        if self.anchor is not self.mean and candidate is self._best:
            self.anchor.fold(update.tensors, update.weight)

    def _taker(self, update: Update) -> _Candidate:
        """Return the candidate that took an update."""
        refusals: list[UpdateError] = []
        for candidate in self._candidates:
            try:
                candidate.add(update, str(refusals[0]) if refusals else "")
            except UpdateError as error:
                refusals.append(error)
            else:
                return candidate
        another = _Candidate(self._build())
        with suppress(UpdateError):
            another.add(update, str(refusals[0]))
            if len(self._candidates) == CANDIDATES:
                # Those who are odd in ever new ways push each other out, and never who is ahead.
                fewest = min(reversed(self._candidates), key=lambda candidate: len(candidate.taken))
                self._candidates.remove(fewest)
                self._gone += fewest.taken
            self._candidates.append(another)
            return another
        raise refusals[0]

    @property
    def _best(self) -> _Candidate:
        """The candidate that took most so far, the first of equals."""
        return max(self._candidates, key=lambda candidate: len(candidate.taken))

    def chosen(self, this_round: Round) -> tuple[Aggregator, list[RecordDict]]:
        """Return the aggregator that took most, and the contents of its replies, without arrays.

        What the others took is dropped, and nothing is kept.
        """
        best = self._best
        others = [taken for one in self._candidates if one is not best for taken in one.taken]
        for client, refusal, _ in self._gone + others:
            this_round.drop(client, refusal)
        self._candidates, self._gone, self.anchor = [], [], Mean()
        return best.aggregator, [content for _, _, content in best.taken]
