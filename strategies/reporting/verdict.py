"""``verdict``, a sentence about a round, and ``run_lines``, the summary of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrot.distances import Shares, total
from fedrot.report import AlignmentReport

#: Metrics of a round, by name.
Metrics = dict[str, float]

#: The reports of a round.
Reports = Sequence[AlignmentReport]

#: Sentences about rounds, by their numbers.
Verdicts = Mapping[int, str]

#: A row of a report.
Row = dict[str, Any]


@dataclass(frozen=True)
class Movement:
    """One way in which models of the same function differ.

    Attributes:
        parts: the parts of ``AlignmentOptions`` that undo it.
        cause: the difference between clients, if the parts remove more than chance.
    """

    parts: tuple[str, ...]
    cause: str


#: The movements by name. Plug-ins add their own.
MOVEMENTS = {
    "rotation": Movement(("attention",), "heads are rotated relative to each other"),
    "permutation": Movement(
        ("residual", "output", "heads", "ffn"), "units are in another order"
    ),
}

#: Names of metrics.
FOUND = "fedrot-share-found"
CHANCE = "fedrot-share-chance"
REMOVED = "fedrot-share-removed"
MOVED = "fedrot-groups-moved"
ACCEPTED = "fedrot-replies-accepted"
DROPPED = "fedrot-replies-dropped"
FAILED = "fedrot-replies-failed"
KEPT_ALIGNED = "fedrot-guard-kept-aligned"
HEAD_FAILED = "fedrot-head-failed"

#: What the log adds after a first round in which no group moved, the latter without
#: ``fit_head``.
UNMOVED = "No group was moved, so this average is the one without alignment."
TRY_HEAD = (
    " For classifiers whose clients have different labels, fit_head=True may help."
)

#: The verdict on a round without alignment.
OFF = "alignment is off"

#: The verdict on a round without an accepted reply, and the start of the verdict on a
#: failed round.
NOBODY = "no reply accepted: the model stays as it was"
_LOST = "no new model: "
_NO_MODEL = (NOBODY, _LOST)

#: A smaller removed share is left out: it would be written as 0.0 %.
_VISIBLE = 0.0005


def verdict(
    reports: Reports,
    *,
    accepted: int,
    aligned: bool = True,
    other_basis: int = 0,
    lost: str = "",
) -> str:
    """Return a sentence about a round's alignment, for the log.

    A movement's shares refer to the squared distance of its groups before alignment,
    over all replies with known chance. For other replies (another basis, ``residual``
    or ``output``, activations) the sentence gives the share of the whole distance that
    was removed.

    Args:
        other_basis: number of replies from another basis.
        lost: why the round has no new model; empty if it has one.

    Returns:
        For example ``rotation 12.7 % of the distance, chance 6.1 %: heads are rotated
        relative to each other; 12 of 16 groups moved``.
    """
    if not accepted:
        return NOBODY
    if lost:
        return f"{_LOST}{lost.removesuffix('.')}"
    if not aligned:
        return OFF
    others = [report for report in reports if report.chance() is None]
    sentences = (_against_chance(known_chance(reports)), _removed(others, other_basis))
    text = "; ".join(filter(None, sentences)) or "nothing to align"
    shares = shares_of(reports)
    if not shares.moved:
        return f"{text}: no group moved"
    return f"{text}; {shares.moved} of {shares.groups} groups moved"


def figures(reports: Reports) -> Metrics:
    """Return the metrics of a round's reports.

    The shares found and of chance are those that ``verdict`` names first, of the
    distance of this movement's groups, and left out if no reply has a known chance. The
    share removed is of the distance of all groups.
    """
    first = next(iter(shares_shown(known_chance(reports)).values()), None)
    shares = {}
    if first:
        shares = {FOUND: first.share, CHANCE: first.chance_share or 0.0}
    moved = shares_of(reports).moved
    return {**shares, REMOVED: share_removed(reports), MOVED: moved}


def known_chance(reports: Reports) -> list[AlignmentReport]:
    """Return the reports with a known chance for every group and a distance above 0."""
    return [
        report
        for report in reports
        if report.chance() is not None and report.before > 0
    ]


def shares_of(reports: Reports, *parts: str) -> Shares:
    """Return the sums over the groups in all reports, of these parts or of all."""
    return total(
        Shares.of(row)
        for report in reports
        for row in report.rows()
        if row["part"] in parts or not parts
    )


def share_removed(reports: Reports, *parts: str) -> float:
    """Return the share of all squared distances that these parts, or all, removed."""
    before = sum(report.before for report in reports)
    removed = sum(report.share(*parts) * report.before for report in reports)
    return removed / before if before > 0 else 0.0


def percent(share: float) -> str:
    """Return a share as ``12.7 %``."""
    return f"{100 * share:z.1f} %"


def shares_shown(reports: Reports) -> dict[str, Shares]:
    """Return by movement the shares of its own groups; chance is known in reports."""
    shares = {
        name: shares_of(reports, *movement.parts)
        for name, movement in MOVEMENTS.items()
    }
    present = {name: of for name, of in shares.items() if of.groups}
    shown = {name: of for name, of in present.items() if of.found or of.chance}
    # If all shares are 0, only the first movement is shown.
    return shown or dict([*present.items()][:1])


def _against_chance(reports: Reports) -> str:
    """Return the shares found and of chance, and the cause; empty without groups."""
    shown = shares_shown(reports)
    if not shown:
        return ""
    beyond = {name: shares for name, shares in shown.items() if shares.exceeds(1)}
    moved = shares_of(reports).moved
    of = " of the distance" if moved else ""

    def line(name: str) -> str:
        share = percent(shown[name].share)
        chance = percent(shown[name].chance_share or 0.0)
        return f"{name} {share}{of}, chance {chance}"

    text = "; ".join(map(line, shown))
    if not moved:
        return f"{'too little' if beyond else 'nothing'} beyond chance ({text})"
    causes = [MOVEMENTS[name].cause for name, shares in beyond.items() if shares.moved]
    return f"{text}: {' and '.join(causes) or 'no more than chance in all'}"


def _removed(reports: Reports, other_basis: int) -> str:
    """Return the shares that were removed, for reports with unknown chance."""
    if not reports:
        return ""
    shares = {
        name: share_removed(reports, *movement.parts)
        for name, movement in MOVEMENTS.items()
    }
    shown = [
        f"{name} {percent(share)}"
        for name, share in shares.items()
        if abs(share) >= _VISIBLE
    ]
    removed = f"{', '.join(shown)} of the distance" if shown else "nothing"
    whose = ""
    if other_basis:
        whose = f"{counted(other_basis, 'reply', 'replies')} from another basis: "
    return f"{whose}{removed} removed, chance not known"


def run_lines(
    rounds: Mapping[int, Mapping[str, Any]],
    verdicts: Verdicts,
    rows: Path | None,
) -> list[str]:
    """Return a run's last log lines, given training metrics and verdicts by round."""
    moved = [metrics[MOVED] > 0 for metrics in rounds.values() if MOVED in metrics]
    lines = []
    if moved:
        of = counted(len(moved), "round", "rounds")
        did = f"groups in {sum(moved)} of {of}" if any(moved) else f"nothing in {of}"
        lines.append(f"Alignment moved {did}.")
    lines += [f"Round {number}: {verdicts[number]}." for number in ends(verdicts)]
    dropped = [ours[DROPPED] for ours in rounds.values() if ours.get(DROPPED)]
    if dropped:
        replies = counted(sum(dropped), "reply was", "replies were")
        lines.append(
            f"{replies} dropped, in {counted(len(dropped), 'round', 'rounds')}."
        )
    failed = [number for number, ours in rounds.items() if ours.get(HEAD_FAILED)]
    if failed:
        lines.append(
            f"No task head could be fitted in {counted(len(failed), 'round', 'rounds')}"
            f", the first is round {min(failed)}: warnings say why."
        )
    if rows is not None:
        lines.append(
            f"Rows of the rounds: '{rows}'. A page of them: fedrot report '{rows}'"
        )
    return lines


def empty_rounds(verdicts: Verdicts) -> str:
    """Return a line about the rounds without a new model, empty if there are none.

    ``verdicts`` are those of all rounds, or those of ``told``.
    """
    without = [
        number for number, text in verdicts.items() if text.startswith(_NO_MODEL)
    ]
    if not without:
        return ""
    return (
        f"No new model in {len(without)} of "
        f"{counted(max(verdicts), 'round', 'rounds')}, the first is round "
        f"{min(without)}: no client is in the mean, and the model did not change."
    )


def told(verdicts: Verdicts) -> dict[int, str]:
    """Return the verdicts that a run's last lines need: checkpoints do not grow."""
    of_ends = ends(verdicts)
    return {
        number: text
        for number, text in verdicts.items()
        if number in of_ends or text.startswith(_NO_MODEL)
    }


def ends(rounds: Collection[int]) -> list[int]:
    """Return the first and the last round; one round if they are the same."""
    return sorted({min(rounds), max(rounds)}) if rounds else []


def counted(number: int, singular: str, plural: str) -> str:
    """Return a number with its noun, ``1 reply`` or ``2 replies``."""
    return f"{number} {singular if number == 1 else plural}"
