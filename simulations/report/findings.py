"""Findings in sentences: the verdict of an experiment."""

from __future__ import annotations

import math

from fedrot.simulations.report.tables import format_difference, number, number_style, seeds, spoken
from fedrot.simulations.summary import MOST_SEEDS, Standing, Verdict

#: What is said of the strategies of each judgement; the reference is named in it.
JUDGED = {
    "better": "Also better than {}",
    "undecided": "Undecided against {}",
    "same": "As {}, but for rounding",
    "mixed": "Better than {} in one metric and worse in another",
    "worse": "Worse than {}",
    "diverged": "With values that are not finite, as {} or it diverged",
}


def lead(found: Verdict) -> str:
    """Return the verdict in one sentence: what to use, and what it gains."""
    ours, others = found.recommended, [own for own in found.standings if own is not found.reference]
    if not found.learned:
        best = number(max(own.mean("accuracy") for own in found.standings))
        naming = f"always naming the most frequent class gives {number(found.most_frequent)}"
        return f"Nothing was learned: the best accuracy is {best}, and {naming}."
    if ours is not found.reference:
        return f"Use {ours.name}: {_gains(found)[0]}."
    if not others:
        return f"Only {ours.name} has results: there is nothing to compare it with."
    if not any(paired.n > 1 for own in others for paired in own.against.values()):
        return "Undecided: one seed in common gives no interval. Run at least three seeds."
    return f"Keep {ours.name}: nothing is better beyond noise with {seeds(found.standings)}."


def sentences(found: Verdict) -> list[str]:
    """Return the sentences below ``lead``: gains, noise, worst client, messages, other strategies."""
    ours, theirs, alone = found.recommended, found.reference, found.recommended is found.reference
    also = _gains(found)[1:]
    gains = f"Also {'; '.join(also)}" if also else ""
    said = [f"Means: {_means(ours, found)}" if alone else gains, _noise(found)]
    if not math.isnan(ours.worst):
        worst = number(ours.worst) + ("" if alone else f", {theirs.name} {number(theirs.worst)}")
        said.append(f"Worst client, on its own held-out rows: {spoken(found.judged[0])} {worst}")
    if not math.isnan(ours.traffic):
        sent = f"All messages of the run: {number(ours.traffic / 1e6)} MB, {ours.requests:.0f} requests"
        times = f" ({ours.traffic / theirs.traffic:.3g} times)" if theirs.traffic else ""
        other = f"; {theirs.name} {number(theirs.traffic / 1e6)} MB{times}, {theirs.requests:.0f}"
        said.append(sent + ("" if alone else other))
    if ours is not found.best:
        tie = format_difference(ours.compared(found.best, found.judged).against[found.judged[-1]])
        within = f"{ours.name} is within noise of {found.best.name} ({spoken(found.judged[-1])} {tie})"
        said.append(f"Cheaper: {within}, and sends less")
    others = [own for own in found.standings if own not in (ours, theirs)]
    for judged, words in JUDGED.items():
        names = [_other(o, found) for o in others if not o.bound and o.judgement == judged]
        said.append(f"{words.format(theirs.name)}: {'; '.join(names)}" if names else "")
    for own in others:
        if own.bound:
            said.append(f"For comparison {own.name} ({own.bound}): {_means(own, found)}")
    return [f"{one}." for one in said if one]


def _gains(found: Verdict) -> list[str]:
    """Return ``accuracy 0.6, fedavg 0.5 (+0.1 [+0.0, +0.2])`` by metric, better ones first."""
    against, said = found.recommended.against, []
    for metric in sorted(found.judged, key=lambda m: against[m].verdict != "better"):
        paired = against[metric]
        style = number_style(paired.ours, paired.theirs)
        values = f"{paired.ours:{style}}, {found.reference.name} {paired.theirs:{style}}"
        said.append(f"{spoken(metric)} {values} ({format_difference(paired)})")
    return said


def _other(own: Standing, found: Verdict) -> str:
    """Return a strategy with its clear differences, or the number of seeds that would decide it."""
    if own.judgement in ("same", "diverged"):
        return own.name
    clear = [m for m in found.judged if own.against[m].verdict in ("better", "worse")]
    shown = [f"{spoken(m)} {format_difference(own.against[m])}" for m in clear or found.judged[:1]]
    pairs = [own.against[m] for m in found.judged if not math.isnan(own.against[m].smallest)]
    if own.judgement == "undecided" and pairs:
        needed = min(paired.seeds_needed or math.inf for paired in pairs)
        count = f"about {needed}" if needed <= MOST_SEEDS else f"more than {MOST_SEEDS}"
        shown.append(f"{count} seeds would decide it")
    return ", ".join([own.name, *shown])


def _means(own: Standing, found: Verdict) -> str:
    return ", ".join(f"{spoken(metric)} {number(own.mean(metric))}" for metric in found.judged)


def _noise(found: Verdict) -> str:
    """Return the smallest difference that these seeds can show."""
    ours, metric = found.recommended, found.judged[0]
    models = [own for own in found.standings if not own.bound]
    compared = models if ours is found.reference else [ours]
    halves = sorted(half for own in compared if (half := own.against[metric].smallest) > 0)
    between = " to ".join(dict.fromkeys(map(number, [*halves[:1], *halves[-1:]])))
    of = f"With {seeds(found.standings)}, a difference of {spoken(metric)}"
    return f"{of} shows from {between} on; brackets are 95 % intervals" if between else ""
