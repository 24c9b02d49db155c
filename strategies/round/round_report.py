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
from fedrot.report import AlignmentReport, moved_units
from fedrot.strategies.reporting.json_log import log_fields
from fedrot.strategies.round.update import Update
from fedrot.tensors import Tensors, check_finite

T = TypeVar("T")

#: Characters of a reason in logs and reports; names in it may be a client's.
LONGEST_REASON = 500


@dataclass
class Round:
    """What happened in one round; reports, and reasons of lost replies, come with their clients."""

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
    guard: dict[str, float | int] = field(default_factory=dict)

    def drop(self, client: int, reason: str) -> None:
        """Note a reply that is not averaged, and why."""
        reason = legible(reason)
        self.dropped.append((client, reason))
        fields = {"client": client, "dropped": reason}
        self._log(WARNING, fields, "Reply of client %d dropped: %s", client, reason)

    def fail(self, client: int, reason: str, who: str = "Received error in reply from node") -> None:
        """Note a client that answered with an error."""
        reason = legible(reason)
        self.failed.append((client, reason))
        self._log(INFO, {"client": client, "failed": reason}, f"\t> {who} %d: %s", client, reason)

    def miss(self, client: int) -> None:
        """Note a client that did not answer."""
        self.fail(client, "No answer came in time.", who="Client")

    def take(self, update: Update) -> None:
        """Log a good reply, on the level of details."""
        fields = {"client": update.client, "weight": update.weight}
        self._log(DEBUG, fields, "Reply of client %d: weight %g", update.client, update.weight)

    def report(self, client: int, report: AlignmentReport) -> None:
        """Keep what the alignment of a reply did, and log it on the level of details."""
        self.reports.append((client, report))
        before, after = report.before, report.after
        fields = {"client": client, "before": before, "after": after, "seconds": report.seconds}
        message = "Reply of client %d aligned: squared distance %.4g -> %.4g"
        self._log(DEBUG, fields, message, client, before, after)

    def lose(self, reason: str) -> None:
        """Note that the round gives no model."""
        self.lost = reason
        message = "Round %d failed, the model stays as it was: %s"
        self._log(WARNING, {"lost": reason}, message, self.number, reason)

    def _log(self, level: int, fields: Mapping[str, Any], message: str, *args: object) -> None:
        log_fields(level, {"round": self.number, **fields}, message, *args)

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

    def metrics(self) -> dict[str, float | int]:
        """Return the round's figures, over all clients."""
        return {name: of(self) for name, of in FIGURES.items()} | self.guard

    def losses(self) -> dict[str, float | int]:
        """Return the figures that are reported without alignment, too: those of ``LOSSES`` but 0."""
        return {name: value for name in LOSSES if (value := FIGURES[name](self))}

    def check_start(self, nodes: Callable[[], Iterable[int]]) -> None:
        """End a run in whose first round every reply was dropped for the same reason.

        Such a reason is the program's, not a client's, and holds in every round. Where a client has
        failed or has not answered, or reasons differ, the next round may go better; so it may where a
        single client was asked and there are others. ``nodes`` returns the ids of all connected nodes.

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
        parts = (moved.format(**figures), counts.format(**figures))
        self._log(INFO, {"metrics": dict(figures)}, "Alignment: %s, %s", *parts)

    def rows(self) -> list[dict[str, Any]]:
        """Return the report's rows: per client and group, per reply lost, per note."""
        aligned = [{"client": client, **row} for client, report in self.reports for row in report.rows()]
        dropped = [{"client": client, "dropped": reason} for client, reason in self.dropped]
        failed = [{"client": client, "failed": reason} for client, reason in self.failed]
        notes = [{"tensor": tensor, "note": note} for tensor, note in self.notes.items()]
        lost = [{"lost": self.lost}] if self.lost else []
        rows = [*aligned, *dropped, *failed, *notes, *lost, *([self.guard] if self.guard else [])]
        return [{"round": self.number, **row} for row in rows]


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


def _mean(name: str) -> Callable[[Round], float]:
    return lambda r: sum(getattr(report, name) for _, report in r.reports) / max(len(r.reports), 1)


def _share(*parts: str) -> Callable[[Round], float]:
    def share(this_round: Round) -> float:
        removed = sum(report.share(*parts) * report.before for _, report in this_round.reports)
        before = sum(report.before for _, report in this_round.reports)
        return removed / before if before > 0 else 0.0

    return share


def _moved(part: str) -> Callable[[Round], int]:
    return lambda r: moved_units((report for _, report in r.reports), part)


#: The metrics of a round, in the order in which they are reported; docs/metrics.md explains them.
FIGURES: dict[str, Callable[[Round], float | int]] = {
    "fedrot-distance-before": _mean("before"),
    "fedrot-distance-after": _mean("after"),
    "fedrot-share-rotation": _share("attention"),
    "fedrot-share-permutation": _share("residual", "output", "heads", "ffn"),
    "fedrot-share-rescale": _share("rescale"),
    "fedrot-heads-rotated": _moved("attention"),
    "fedrot-heads-moved": _moved("heads"),
    "fedrot-neurons-moved": _moved("ffn"),
    "fedrot-stream-moved": _moved("residual"),
    "fedrot-groups-skipped": lambda r: sum(g.skipped for _, report in r.reports for g in report.groups),
    "fedrot-replies-other-basis": lambda r: r.other_basis,
    "fedrot-replies-accepted": lambda r: r.accepted,
    "fedrot-replies-dropped": lambda r: len(r.dropped),
    "fedrot-replies-failed": lambda r: len(r.failed),
    "fedrot-round-failed": lambda r: int(bool(r.lost)),
    "fedrot-statistics-bytes": lambda r: r.statistics_bytes,
    "fedrot-seconds-waiting": lambda r: r.waiting,
    "fedrot-seconds-aligning": lambda r: sum(report.seconds for _, report in r.reports),
    "fedrot-seconds-round": lambda r: time.perf_counter() - r.start,
}

#: The metrics that are reported with ``align=False``, too, unless they are 0.
LOSSES = (
    *("fedrot-replies-dropped", "fedrot-replies-failed", "fedrot-round-failed"),
    "fedrot-statistics-bytes",
)
