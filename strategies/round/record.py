"""The record of one round: reports, dropped and failed replies, figures, rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from logging import DEBUG, INFO, WARNING

import flwr
import torch
from flwr.app import ArrayRecord
from flwr.common import log
from flwr.serverapp import Grid

import fedrot
from fedrot.aggregation import Aggregator
from fedrot.errors import FedrotError, SymmetryError, UpdateError, legible, refusal
from fedrot.report import AlignmentReport
from fedrot.strategies.reporting import verdict
from fedrot.strategies.reporting.verdict import Metrics, Row
from fedrot.strategies.round.update import Moved
from fedrot.strategies.wire.arrays import from_arrays, model_hash
from fedrot.tensors import Tensors, check_finite, spare_threads

#: Versions of what computes a round, for rows with hashes.
VERSIONS = {
    package.__name__: str(package.__version__) for package in (fedrot, flwr, torch)
}


@dataclass
class RoundRecord:
    """The events of one round; reports and reasons are pairs with their client."""

    number: int
    failed: list[tuple[int, str]] = field(default_factory=list)
    reports: list[tuple[int, AlignmentReport]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    accepted: int = 0
    lost: str = ""
    other_basis: int = 0
    notes: dict[str, str] = field(default_factory=dict)
    guard: Metrics = field(default_factory=dict)
    #: The sentence of an aggregation of adapters, in place of alignment's.
    sentence: str = ""
    #: The metrics of an aggregation of adapters, and those of a fitted head.
    measured: Metrics = field(default_factory=dict)
    #: With ``Reporting(hashes=True)``: the rows with hashes of the averaged updates,
    #: and of the model.
    origins: list[Row] = field(default_factory=list)

    def drop(self, client: int, reason: str) -> None:
        """Record a reply that is not averaged, with the reason."""
        reason = legible(reason)
        self.dropped.append((client, reason))
        log(WARNING, "Reply of client %d dropped: %s", client, reason)

    @contextmanager
    def dropping(self, client: int) -> Iterator[None]:
        """Drop a client's reply if the ``with`` block raises an error; the run goes on.

        ``SymmetryError`` and a lack of memory are not caused by the client and are
        raised.
        """
        try:
            yield
        except (SymmetryError, MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            self.drop(client, refusal(error))

    def fail(
        self, client: int, reason: str, who: str = "Received error in reply from client"
    ) -> None:
        """Record a client that answered with an error."""
        reason = legible(reason)
        self.failed.append((client, reason))
        log(INFO, f"\t> {who} %d: %s", client, reason)

    def merged(self, moved: Moved) -> None:
        """Store the report of a merged update, and log it at level DEBUG."""
        if moved.report is None:
            return
        client = moved.update.client
        report = moved.report()
        self.reports.append((client, report))
        log(
            DEBUG,
            "Reply of client %d aligned: squared distance %.4g -> %.4g",
            client,
            report.before,
            report.after,
        )

    def lose(self, reason: str) -> None:
        """Record that the round has no new model."""
        self.lost = reason
        log(
            WARNING,
            "Round %d failed, the model does not change: %s",
            self.number,
            reason,
        )

    def note(self, aggregator: Aggregator) -> None:
        """Store an aggregation's sentence, metrics and notes; log the first note."""
        self.sentence = aggregator.sentence
        self.measured = dict(aggregator.measured)
        self.notes = dict(aggregator.notes)
        for name, what in islice(self.notes.items(), 1):
            log(
                INFO,
                "Aggregation, '%s' (first of %d notes): %s",
                name,
                len(self.notes),
                what,
            )

    def enough(self, min_replies: int) -> bool:
        """Return whether enough replies were accepted; if not, the round fails."""
        if self.accepted >= min_replies:
            return True
        self.lose(
            f"{verdict.counted(self.accepted, 'good reply', 'good replies')}, "
            f"{min_replies} needed."
        )
        return False

    def finite(self, arrays: ArrayRecord) -> bool:
        """Return whether a new model is finite; if not, the round fails."""
        try:
            with spare_threads():
                check_finite(from_arrays(arrays))
        except UpdateError as error:
            self.lose(f"the aggregation is not finite. {error}")
            return False
        return True

    def metrics(self, aligned: bool) -> Metrics:
        """Return the round's figures over all clients (docs/reference/metrics.md).

        Without alignment these are the numbers of lost replies that are not 0, and the
        figures of a guard and of an aggregation.
        """
        lost = {verdict.DROPPED: len(self.dropped), verdict.FAILED: len(self.failed)}
        if aligned:
            figures = {
                **verdict.figures([report for _, report in self.reports]),
                verdict.ACCEPTED: self.accepted,
                **lost,
            }
        else:
            figures = {name: number for name, number in lost.items() if number}
        return figures | self.guard | self.measured

    def add_hashes(self, before: Tensors, after: Tensors, about: Row) -> None:
        """Add the row of the model's hashes and what is known ``about`` it."""
        self.origins.append(
            {
                "sha256_before": model_hash(before),
                "sha256_after": model_hash(after),
                "versions": VERSIONS,
                **about,
            }
        )

    def check_start(self, grid: Grid | None) -> None:
        """End the run if every reply of round 1 was dropped for the same reason.

        Such a reason is an error of the program, and would occur in every round. The
        run continues if a client has failed or has not answered, if reasons differ, or
        if one of several connected clients was asked.
        """
        reasons = {reason for _, reason in self.dropped}
        clients = {client for client, _ in self.dropped}
        if self.number > 1 or len(reasons) != 1 or self.accepted or self.failed:
            return
        if len(clients) > 1 or grid is None or len([*grid.get_node_ids()]) <= 1:
            raise FedrotError(
                "Every reply of the first round was dropped for the same reason. Fix "
                f"the ClientApp and start again. The reason: {reasons.pop()}"
            )

    def log_end(self, aligned: bool, fits_head: bool) -> str:
        """Log replies, what alignment removed, a hint, and the returned verdict."""
        reports = [report for _, report in self.reports]
        seconds = sum(report.seconds for report in reports)
        removed = ""
        if reports:
            removed = (
                f"; alignment removed {verdict.percent(verdict.share_removed(reports))}"
                f" of the distance of all groups in {seconds:.2f} s"
            )
        log(
            INFO,
            "Round %d: replies: %d accepted, %d dropped, %d failed%s",
            self.number,
            self.accepted,
            len(self.dropped),
            len(self.failed),
            removed,
        )
        conclusion = verdict.verdict(
            reports,
            accepted=self.accepted,
            aligned=aligned,
            other_basis=self.other_basis,
            lost=self.lost,
        )
        if self.sentence and not self.lost:
            conclusion = self.sentence
        log(INFO, "Round %d: %s", self.number, conclusion)
        if (
            self.number == 1
            and reports
            and not self.lost
            and not verdict.shares_of(reports).moved
        ):
            log(INFO, "%s%s", verdict.UNMOVED, "" if fits_head else verdict.TRY_HEAD)
        return conclusion

    def rows(self) -> list[Row]:
        """Return the report's rows: per client and group, per lost reply, per note."""
        rows = list[Row]()
        for client, report in self.reports:
            rows += [{"client": client, **row} for row in report.rows()]
        rows += [{"client": client, "dropped": why} for client, why in self.dropped]
        rows += [{"client": client, "failed": why} for client, why in self.failed]
        rows += [{"tensor": name, "note": note} for name, note in self.notes.items()]
        if self.lost:
            rows.append({"lost": self.lost})
        if self.sentence:
            rows.append({"said": self.sentence, **self.measured})
        if self.guard:
            rows.append(self.guard)
        return [{"round": self.number, **row} for row in (*rows, *self.origins)]
