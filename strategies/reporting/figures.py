"""``FIGURES``: the numbers that every round reports, each with its name, unit and meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedrot.report import moved_units

if TYPE_CHECKING:
    from fedrot.strategies.round.round_report import Round


@dataclass(frozen=True)
class Figure:
    """One number of a round; ``always``: reported with ``align=False`` too, unless it is 0."""

    name: str
    unit: str
    meaning: str
    of: Callable[[Round], float | int]
    always: bool = False


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


#: All figures, in the order in which they are reported.
FIGURES = (
    Figure(
        "fedrot-distance-before",
        "squared distance",
        "from the anchor to an update before alignment, over the tensors that may move; mean over the "
        "aligned replies",
        _mean("before"),
    ),
    Figure("fedrot-distance-after", "squared distance", "the same after alignment", _mean("after")),
    Figure(
        "fedrot-share-rotation",
        "share, 0 to 1",
        "of the squared distance before alignment that rotations of heads removed",
        _share("attention"),
    ),
    Figure(
        "fedrot-share-permutation",
        "share, 0 to 1",
        "of it that permutations (and signs) of heads, neurons and hidden units removed",
        _share("residual", "output", "heads", "ffn"),
    ),
    Figure(
        "fedrot-share-rescale", "share, 0 to 1", "of it that scales of heads removed", _share("rescale")
    ),
    Figure(
        "fedrot-heads-rotated",
        "heads",
        "whose queries and keys, or values and outputs, were rotated in at least one reply",
        _moved("attention"),
    ),
    Figure(
        "fedrot-heads-moved",
        "heads",
        "that changed their place in at least one reply (query heads, where they share key heads)",
        _moved("heads"),
    ),
    Figure(
        "fedrot-neurons-moved",
        "neurons",
        "of feed-forward layers that changed their place or sign in at least one reply",
        _moved("ffn"),
    ),
    Figure(
        "fedrot-stream-moved",
        "hidden units",
        "of residual streams that changed their place or sign in at least one reply",
        _moved("residual"),
    ),
    Figure(
        "fedrot-groups-skipped",
        "groups",
        "that were not moved because the gain was below the threshold, summed over the replies",
        lambda r: sum(group.skipped for _, report in r.reports for group in report.groups),
    ),
    Figure(
        "fedrot-replies-other-basis",
        "replies",
        "from another basis than the broadcast model's",
        lambda r: r.other_basis,
    ),
    Figure("fedrot-replies-accepted", "replies", "in the average", lambda r: r.accepted),
    Figure(
        "fedrot-replies-dropped",
        "replies",
        "that arrived and are not in the average",
        lambda r: len(r.dropped),
        True,
    ),
    Figure(
        "fedrot-replies-failed",
        "clients",
        "that answered with an error, or not in time",
        lambda r: len(r.failed),
        True,
    ),
    Figure(
        "fedrot-round-failed",
        "0 or 1",
        "1 if the round gave no new model",
        lambda r: int(bool(r.lost)),
        True,
    ),
    Figure(
        "fedrot-statistics-bytes",
        "bytes",
        "of statistics in the replies",
        lambda r: r.statistics_bytes,
        True,
    ),
    Figure(
        "fedrot-seconds-waiting",
        "seconds",
        "spent on waiting for replies and fetching them",
        lambda r: r.waiting,
    ),
    Figure(
        "fedrot-seconds-aligning",
        "seconds",
        "spent on finding alignments, summed over the replies",
        lambda r: sum(report.seconds for _, report in r.reports),
    ),
    Figure(
        "fedrot-seconds-round",
        "seconds",
        "from sending the requests to the new model: waiting, checking, aligning, averaging",
        lambda r: r.seconds,
    ),
)


def metrics_table() -> str:
    """Return the figures as a Markdown table."""
    rows = [(f"`{f.name}`", f.unit, f.meaning, "if not 0" if f.always else "no") for f in FIGURES]
    head = [("metric", "unit", "meaning", "with `align=False`"), ("---",) * 4]
    return "".join(f"| {' | '.join(row)} |\n" for row in head + rows)
