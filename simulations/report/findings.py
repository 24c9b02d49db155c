"""Findings of a run in sentences: where alignment hurt, did nothing or was not possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fedrot.simulations.report.summaries import Paired, Row, removed_shares, setting_of
from fedrot.simulations.report.tables import BASELINE, Line, format_difference, number_style

#: An alignment that removes a smaller share of the squared distance counts as without effect.
NEGLIGIBLE = 0.01


def findings(
    rows: Sequence[Row], lines: Sequence[Line], metrics: Sequence[str], alignment: Sequence[Row]
) -> list[str]:
    """Sentences on arms without a gain, idle layers, dropped replies and failed clients.

    Args:
        rows: of the run's results.
        lines: of the result table over ``metrics``.
        alignment: rows of the alignment report.
    """
    doubts = [
        sentence
        for line in lines
        for metric, difference in zip(metrics, line.differences, strict=True)
        if difference is not None
        for sentence in _doubts(line, metric, difference)
    ]
    return [*doubts, *_idle_layers(alignment), *_dropped(alignment), *_failed(rows)]


def scrambling(lines: Sequence[Line], metrics: Sequence[str]) -> list[str]:
    """Sentences on the cost of scrambling: every arm against its own run of start same."""
    same = {(line.setting, line.arm): line for line in lines if line.start == "same"}
    said = []
    for line in lines:
        twin = same.get((line.setting, line.arm))
        if line.start != "scrambled" or twin is None:
            continue
        changes = [
            f"{metric} {theirs.mean:{style}} -> {ours.mean:{style}} ({ours.mean - theirs.mean:+{style}})"
            for metric, ours, theirs in zip(metrics, line.scores, twin.scores, strict=True)
            if ours is not None and theirs is not None
            for style in [number_style(ours.mean, theirs.mean, decimals=4)]
        ]
        said.append(f"{line.setting}, {line.arm}: {', '.join(changes)}.")
    return said


def _doubts(line: Line, metric: str, difference: Paired) -> Iterator[str]:
    where = f"{line.setting or 'this run'}, start {line.start}: {line.arm}"
    change = format_difference(difference).removesuffix(f" {difference.verdict}")
    if difference.verdict == "worse":
        yield f"{where} hurt {metric} against {BASELINE}: {change}."
    elif difference.verdict == "identical":
        yield f"{where} gave exactly the {metric} of {BASELINE}."
    elif difference.verdict == "within noise":
        yield f"{where} made no measurable difference to {metric}: {change}."
    elif difference.verdict == "not finite":
        yield f"{where} or {BASELINE} diverged: {metric} is not finite."


def _idle_layers(alignment: Sequence[Row]) -> list[str]:
    idle: dict[tuple[str, str, str, str], list[str]] = {}
    for (setting, start, arm, part, layer), share in removed_shares(alignment).items():
        if share < NEGLIGIBLE:
            shown = f"{layer} ({100 * share:.2g} %)"
            idle.setdefault((setting, start, arm, part), []).append(shown)
    return [
        f"{setting or 'this run'}, start {start}: {arm} removed less than {100 * NEGLIGIBLE:.0f} % "
        f"of the squared distance by {part} in layer {', '.join(layers)}."
        for (setting, start, arm, part), layers in idle.items()
    ]


def _dropped(alignment: Sequence[Row]) -> list[str]:
    reasons = Counter(
        (setting_of(row), str(row.get("arm")), str(row["dropped"]))
        for row in alignment
        if "dropped" in row
    )
    return [
        f"{setting or 'this run'}: {arm} dropped a reply {count} time(s): {reason}"
        for (setting, arm, reason), count in reasons.items()
    ]


def _failed(rows: Sequence[Row]) -> list[str]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row["metric"] == "fedrot-replies-failed" and row["value"] > 0:
            counts[(setting_of(row), str(row["start"]), str(row["arm"]))] += int(row["value"])
    return [
        f"{setting or 'this run'}, start {start}: {arm} went on without {count} client(s) that failed."
        for (setting, start, arm), count in counts.items()
    ]
