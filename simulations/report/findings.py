"""Findings in sentences: the verdict of an experiment, layers without effect, and lost replies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from fedrot.report import shares_by
from fedrot.simulations.report.tables import format_difference, number, number_style, seeds, spoken
from fedrot.simulations.summary import JOINED, MODEL, MOST_SEEDS, Row, Standing, Verdict, compare_seeds
from fedrot.symmetry import NO_LAYER

#: Below this share of the squared distance, a removed distance counts as no effect.
NEGLIGIBLE = 0.01
#: What is said of the strategies of each judgement; the reference is named in it.
JUDGED = {
    "better": "Also better than {}",
    "undecided": "Undecided against {}",
    "same": "Exactly as {}, or but for rounding",
    "mixed": "Better than {} in one metric and worse in another",
    "worse": "Worse than {}",
    "diverged": "With values that are not finite, as {} or it diverged",
}


def lead(found: Verdict) -> str:
    """Return the verdict in one sentence: what to use, and what it gains."""
    ours = found.recommended
    if not found.learned:
        best = max(own.mean("accuracy") for own in found.standings)
        return (
            f"Nothing was learned: the best accuracy is {number(best)}, and always naming the most "
            f"frequent class gives {number(found.most_frequent)}."
        )
    if ours is not found.reference:
        return f"Use {ours.name}: {_gain(found, _gained(found)[0])}."
    if len(found.standings) == 1:
        return f"Only {ours.name} has results: there is nothing to compare it with."
    if ours.seeds == 1:
        return "Undecided: one seed gives no interval. Run at least three."
    return f"Keep {ours.name}: nothing is better beyond noise with {seeds(found.standings)}."


def sentences(found: Verdict) -> list[str]:
    """Return the sentences below ``lead``: gains, noise, worst client, messages, all other strategies."""
    ours, theirs = found.recommended, found.reference
    if ours is theirs:
        said = [_means(ours, found.judged)]
    else:
        first, *others = _gained(found)
        said = ["; ".join(_gain(found, metric) for metric in others)]
    said += [_noise(found), _worst(found), _messages(found), _tie(found)]
    others = [own for own in found.standings if own not in (ours, theirs)]
    for judged, words in JUDGED.items():
        names = [
            _other(own, found) for own in others if own.kind == MODEL and found.judgement(own) == judged
        ]
        said.append(f"{words.format(theirs.name)}: {'; '.join(names)}" if names else "")
    for own in others:
        if own.kind != MODEL:
            bound = (
                "all rows in one place, an upper bound" if own.kind == JOINED else "no model for clients"
            )
            said.append(f"{own.name} ({bound}): {_means(own, found.judged)}")
    return [f"{one[:1].upper()}{one[1:]}." for one in (*said, _calibrated(found)) if one]


def _gained(found: Verdict) -> list[str]:
    """Return the judged metrics, those in which the recommended strategy is better first."""
    against = found.recommended.against
    return sorted(found.judged, key=lambda metric: against[metric].verdict != "better")


def _gain(found: Verdict, metric: str) -> str:
    """Return ``accuracy 0.612, fedavg 0.534 (+0.078 [+0.061, +0.095])``."""
    paired = found.recommended.against[metric]
    style = number_style(paired.ours, paired.theirs)
    values = f"{paired.ours:{style}}, {found.reference.name} {paired.theirs:{style}}"
    return f"{spoken(metric)} {values} ({format_difference(paired)})"


def _other(own: Standing, found: Verdict) -> str:
    """Return a strategy with its clearest difference, and the seeds that would decide it."""
    judged = found.judgement(own)
    if judged in ("same", "diverged"):
        return own.name
    metrics = [m for m in found.judged if own.against[m].verdict in ("better", "worse")]
    shown = ", ".join(
        f"{spoken(m)} {format_difference(own.against[m])}" for m in metrics or found.judged[:1]
    )
    pairs = [pair for m in found.judged if not math.isnan((pair := own.against[m]).smallest)]
    if judged != "undecided" or not pairs:
        return f"{own.name}, {shown}"
    needed = min(pair.seeds_needed or math.inf for pair in pairs)
    count = f"about {needed}" if needed <= MOST_SEEDS else f"more than {MOST_SEEDS}"
    return f"{own.name}, {shown}, {count} seeds would decide it"


def _means(own: Standing, metrics: Sequence[str]) -> str:
    return ", ".join(f"{spoken(metric)} {number(own.mean(metric))}" for metric in metrics)


def _noise(found: Verdict) -> str:
    """Return the smallest difference that these seeds can show."""
    ours, metric = found.recommended, found.judged[0]
    compared = [own for own in found.standings if own.kind == MODEL and own is not found.reference]
    compared = [ours] if ours is not found.reference else compared
    halves = [s for own in compared if not math.isnan(s := own.against[metric].smallest)]
    if not halves:
        return ""
    between = " to ".join(dict.fromkeys(map(number, (min(halves), max(halves)))))
    of = seeds(found.standings)
    return f"{of}: a difference of {spoken(metric)} shows from {between} on (95 % intervals in brackets)"


def _beside(ours: str, found: Verdict, theirs: str) -> str:
    """Return a figure of the recommended strategy, and that of the reference."""
    return ours if found.recommended is found.reference else f"{ours}, {found.reference.name} {theirs}"


def _worst(found: Verdict) -> str:
    ours, theirs = found.recommended.worst, found.reference.worst
    if math.isnan(ours):
        return ""
    values = _beside(number(ours), found, number(theirs))
    return f"worst client, on its own held-out rows: {spoken(found.judged[0])} {values}"


def _messages(found: Verdict) -> str:
    ours, theirs = found.recommended, found.reference
    if math.isnan(ours.traffic):
        return ""
    size = _beside(f"{number(ours.traffic / 1e6)} MB", found, f"{number(theirs.traffic / 1e6)} MB")
    more = ours is not theirs and theirs.traffic > 0
    times = f" ({ours.traffic / theirs.traffic:.2g} times)" if more else ""
    asked = _beside(f"{ours.requests:.0f} requests", found, f"{theirs.requests:.0f}")
    return f"all messages of the run: {size}{times}; {asked}"


def _tie(found: Verdict) -> str:
    if found.tie is None:
        return ""
    paired, best = found.tie
    within = f"within noise of {best} ({spoken(found.judged[-1])} {format_difference(paired)})"
    return f"{found.recommended.name} is {within}, and sends less"


def _calibrated(found: Verdict) -> str:
    """Return a sentence if another strategy has the lowest loss after calibration."""
    metric = "calibrated_loss"
    known = [own for own in found.standings if own.kind == MODEL and {metric, "loss"} <= {*own.values}]
    ranked = [min(known, key=lambda own: own.mean(m), default=None) for m in (metric, "loss")]
    first, plain = ranked
    if first is plain or first is None or plain is None:
        return ""
    paired = compare_seeds(first.values[metric], plain.values[metric], metric)
    return (
        f"{plain.name} has the lowest loss; after calibration (logits divided by one number) "
        f"{first.name} has: {format_difference(paired)}"
    )


def idle_layers(alignment: Iterable[Row]) -> list[str]:
    """Return sentences about layers without effect: no more than chance, or almost no distance."""
    idle: dict[str, list[str]] = {}
    found = shares_by(alignment, lambda row: (row["strategy"], row["part"], row["layer"]))
    for (strategy, part, layer), share in sorted(found.items(), key=lambda item: item[0][2]):
        known = share.chance_share is not None
        if share.ratio <= 1 if known else share.share < NEGLIGIBLE:
            what = (
                "found no more than chance" if known else "removed less than 1 % of the squared distance"
            )
            place, name = ("the whole model", "") if layer == NO_LAYER else ("layer", f"{layer} ")
            chance = f", chance {100 * share.chance_share:.2g} %" if known else ""
            said = f"{name}({100 * share.share:.2g} %{chance})"
            idle.setdefault(f"{strategy} {what} by {part} in {place}", []).append(said)
    return [f"{of} {', '.join(layers)}." for of, layers in idle.items()]


def lost_replies(rows: Iterable[Row], alignment: Iterable[Row]) -> list[str]:
    """Return sentences about dropped replies and failed clients, over all rounds and seeds."""
    reasons = Counter(
        (str(row["strategy"]), str(row["dropped"])) for row in alignment if "dropped" in row
    )
    failed: Counter[str] = Counter()
    for row in rows:
        if row["metric"] == "fedrot-replies-failed":
            failed[str(row["strategy"])] += int(row["value"])
    return [
        *(f"{name} dropped {count} reply(s): {reason}" for (name, reason), count in reasons.items()),
        *(f"{name} got no answer {count} time(s): failed clients." for name, count in (+failed).items()),
    ]
