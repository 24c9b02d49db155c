"""One round of an aligned strategy: its updates, what they were merged to, what there is to report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from logging import INFO, WARNING
from typing import Any, NamedTuple

from flwr.app import ArrayRecord
from flwr.common import log
from torch import Tensor

from fedrot.aggregation import Statistics
from fedrot.report import AlignmentReport


class Update(NamedTuple):
    """A reply in the coordinates of its round: its client, tensors, weight and statistics."""

    client: int
    tensors: Mapping[str, Tensor]
    weight: float
    statistics: Statistics


class Merged(NamedTuple):
    """What a round's updates were merged to, None if to nothing, and which of them went in."""

    arrays: ArrayRecord | None
    accepted: Sequence[Update]


@dataclass
class Round:
    """What happened in one round: reports and set-aside reasons, each with its client."""

    number: int
    failed: int = 0
    start: float = field(default_factory=time.perf_counter)
    reports: list[tuple[int, AlignmentReport]] = field(default_factory=list)
    set_aside: list[tuple[int, str]] = field(default_factory=list)
    foreign: int = 0
    notes: dict[str, str] = field(default_factory=dict)
    statistics_bytes: int = 0

    def put_aside(self, client: int, reason: str) -> None:
        self.set_aside.append((client, reason))
        log(WARNING, "Reply of client %d set aside: %s", client, reason)

    def note(self, notes: Mapping[str, str]) -> None:
        """Keep what the aggregation found out of the ordinary, by tensor, and log the first."""
        self.notes = dict(notes)
        for name, what in islice(notes.items(), 1):
            log(INFO, "Aggregation, '%s' (%d notes in all): %s", name, len(notes), what)

    def losses(self) -> dict[str, int]:
        counts = {"fedrot-replies-set-aside": len(self.set_aside), "fedrot-replies-failed": self.failed}
        counts["fedrot-statistics-bytes"] = self.statistics_bytes
        return {name: count for name, count in counts.items() if count}

    def metrics(self) -> dict[str, float | int]:
        reports = [report for _, report in self.reports]
        before = sum(r.before for r in reports)

        def share(*parts: str) -> float:
            removed = sum(r.share(*parts) * r.before for r in reports)
            return removed / before if before > 0 else 0.0

        return {
            "fedrot-distance-before": before / max(len(reports), 1),
            "fedrot-distance-after": sum(r.after for r in reports) / max(len(reports), 1),
            "fedrot-share-rotation": share("attention"),
            "fedrot-share-permutation": share("residual", "output", "heads", "ffn"),
            "fedrot-share-rescale": share("rescale"),
            "fedrot-heads-rotated": sum(r.moved("attention") for r in reports),
            "fedrot-heads-moved": sum(r.moved("heads") for r in reports),
            "fedrot-neurons-moved": sum(r.moved("ffn") for r in reports),
            "fedrot-stream-moved": sum(r.moved("residual") for r in reports),
            "fedrot-replies-foreign": self.foreign,
            "fedrot-groups-skipped": sum(g.skipped for r in reports for g in r.groups),
            "fedrot-replies-set-aside": len(self.set_aside),
            "fedrot-replies-failed": self.failed,
            "fedrot-statistics-bytes": self.statistics_bytes,
            "fedrot-seconds": time.perf_counter() - self.start,
        }

    def rows(self) -> list[dict[str, Any]]:
        aligned = [
            {"round": self.number, "client": client, **row}
            for client, report in self.reports
            for row in report.rows()
        ]
        aside = [
            {"round": self.number, "client": client, "set_aside": reason}
            for client, reason in self.set_aside
        ]
        notes = [{"round": self.number, "tensor": t, "note": note} for t, note in self.notes.items()]
        return aligned + aside + notes
