"""The record of one round: alignment reports, dropped and failed replies, figures, rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from logging import DEBUG, INFO, WARNING
from typing import Any, TypeVar

from flwr.common import log

from fedrot.errors import FedrotError, UpdateError
from fedrot.report import AlignmentReport
from fedrot.strategies.reporting.figures import FIGURES
from fedrot.strategies.reporting.json_log import log_fields
from fedrot.strategies.round.update import Update
from fedrot.tensors import Tensors, check_finite

T = TypeVar("T")


#: Characters of a reason in logs and reports; names in it may be a client's.
LONGEST_REASON = 500


@dataclass
class Round:
    """What happened in one round: reports and set-aside reasons, each with its client."""

    number: int
    failed: list[tuple[int, str]] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)
    reports: list[tuple[int, AlignmentReport]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    accepted: int = 0
    lost: str = ""
    other_basis: int = 0
    notes: dict[str, str] = field(default_factory=dict)
    statistics_bytes: int = 0
    waiting: float = 0.0

    def drop(self, client: int, reason: str) -> None:
        """Note a reply that is not averaged, and why."""
        reason = legible(reason)
        self.dropped.append((client, reason))
        fields = {"round": self.number, "client": client, "dropped": reason}
        log_fields(WARNING, fields, "Reply of client %d dropped: %s", client, reason)

    def fail(self, client: int, reason: str) -> None:
        """Note a client that answered with an error."""
        self._failed(client, reason, "\t> Received error in reply from node %d: %s")

    def miss(self, client: int) -> None:
        """Note a client that did not answer."""
        self._failed(client, "No answer came in time.", "\t> Client %d: %s")

    def _failed(self, client: int, reason: str, message: str) -> None:
        reason = legible(reason)
        self.failed.append((client, reason))
        fields = {"round": self.number, "client": client, "failed": reason}
        log_fields(INFO, fields, message, client, reason)

    def take(self, update: Update) -> None:
        """Log a good reply, on the level of details."""
        fields = {"round": self.number, "client": update.client, "weight": update.weight}
        log_fields(DEBUG, fields, "Reply of client %d: weight %g", update.client, update.weight)

    def report(self, client: int, report: AlignmentReport) -> None:
        """Keep what the alignment of a reply did, and log it on the level of details."""
        self.reports.append((client, report))
        before, after = report.before, report.after
        fields = {
            "round": self.number,
            "client": client,
            "before": before,
            "after": after,
            "seconds": report.seconds,
        }
        message = "Reply of client %d aligned: squared distance %.4g -> %.4g"
        log_fields(DEBUG, fields, message, client, before, after)

    def lose(self, reason: str) -> None:
        """Note that the round gives no model."""
        self.lost = reason
        fields = {"round": self.number, "lost": reason}
        message = "Round %d failed, the model stays as it was: %s"
        log_fields(WARNING, fields, message, self.number, reason)

    def note(self, notes: Mapping[str, str]) -> None:
        """Keep what the aggregation found out of the ordinary, by tensor, and log the first."""
        self.notes = dict(notes)
        for name, what in islice(notes.items(), 1):
            log(INFO, "Aggregation, '%s' (%d notes in all): %s", name, len(notes), what)

    def waited(self, replies: Iterable[T]) -> Iterator[T]:
        """Return the replies as they come, and count the seconds spent on waiting for them."""
        return _Timed(iter(replies), self)

    def enough(self, min_replies: int) -> bool:
        """Return whether enough replies were accepted; if not, the round fails."""
        if self.accepted >= min_replies:
            return True
        self.lose(f"{self.accepted} good replies, {min_replies} needed.")
        return False

    def finite(self, tensors: Tensors) -> bool:
        """Return whether a new model is finite; if not, the round fails."""
        try:
            check_finite(tensors)
        except UpdateError as error:
            self.lose(f"the aggregation is not finite. {error}")
            return False
        return True

    @property
    def seconds(self) -> float:
        """How long the round has taken so far."""
        return time.perf_counter() - self.start

    def losses(self) -> dict[str, float | int]:
        """Return the figures that count without alignment, too, as far as they are not 0."""
        found = {figure.name: figure.of(self) for figure in FIGURES if figure.always}
        return {name: value for name, value in found.items() if value}

    def metrics(self) -> dict[str, float | int]:
        """Return the round's figures, over all clients."""
        return {figure.name: figure.of(self) for figure in FIGURES}

    def check_start(self, nodes: Callable[[], Iterable[int]]) -> None:
        """End a run in whose first round every reply was dropped for the same reason.

        Such a reason is the program's, not a client's, and holds in every round. Where a client has
        failed or has not answered, or reasons differ, the next round may go better; so it may where a
        single client was asked and there are others.

        Args:
            nodes: returns the ids of all connected nodes.

        Raises:
            FedrotError: with the reason.
        """
        reasons = {reason for _, reason in self.dropped}
        clients = {client for client, _ in self.dropped}
        if self.number > 1 or len(reasons) != 1 or self.accepted or self.failed:
            return
        if len(clients) > 1 or len(list(nodes())) <= 1:
            raise FedrotError(
                "Every reply of the first round was dropped for the same reason; fix the ClientApp "
                f"and start again. The reason: {reasons.pop()}"
            )

    def log_end(self, figures: Mapping[str, float | int], aligned: bool) -> None:
        """Log the round's figures."""
        moved = (
            "distance {fedrot-distance-before:.4g} -> {fedrot-distance-after:.4g} (rotation "
            "{fedrot-share-rotation:.1%}, permutation {fedrot-share-permutation:.1%}), "
            "{fedrot-groups-skipped} groups below the threshold skipped"
            if aligned
            else "off"
        )
        counts = (
            "{fedrot-replies-accepted} replies accepted, {fedrot-replies-dropped} dropped, "
            "{fedrot-replies-failed} failed, {fedrot-seconds-waiting:.2f} s of waiting, "
            "{fedrot-seconds-aligning:.2f} s of alignment"
        )
        fields = {"round": self.number, "metrics": dict(figures)}
        log_fields(INFO, fields, "Alignment: %s, %s", moved.format(**figures), counts.format(**figures))

    def rows(self) -> list[dict[str, Any]]:
        """Return the report's rows: per client and group, per reply lost, per note."""
        aligned = [{"client": client, **row} for client, report in self.reports for row in report.rows()]
        dropped = [{"client": client, "dropped": reason} for client, reason in self.dropped]
        failed = [{"client": client, "failed": reason} for client, reason in self.failed]
        notes = [{"tensor": tensor, "note": note} for tensor, note in self.notes.items()]
        lost = [{"lost": self.lost}] if self.lost else []
        return [{"round": self.number, **row} for row in [*aligned, *dropped, *failed, *notes, *lost]]


def legible(reason: str) -> str:
    """Return a reason, which may quote a client, on one line and of limited length."""
    return "".join(c if c.isprintable() else " " for c in reason[:LONGEST_REASON])


class _Timed(Iterator[T]):
    """An iterator that counts the seconds of ``next``, and keeps nothing of what it returns."""

    def __init__(self, items: Iterator[T], this_round: Round) -> None:
        self._items, self._round = items, this_round

    def __next__(self) -> T:
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self._round.waiting += time.perf_counter() - start
