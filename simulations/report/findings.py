"""The verdict of an experiment in sentences."""

from __future__ import annotations

import math

from fedrot.simulations.report.tables import format_difference, number, spoken
from fedrot.simulations.summary import LOWER_IS_BETTER, ROUNDING, Standing, Verdict

#: What is said of the strategies of each judgement; the reference is named in it.
JUDGED = {
    "better": "Also better than {}",
    "undecided": "Undecided against {}",
    "same": "Same as {}, up to rounding",
    "mixed": "Better than {} in one metric and worse in another",
    "worse": "Worse than {}",
    "diverged": "Not compared, because values (or those of {}) are not finite",
}


def lead(found: Verdict) -> str:
    """Return the verdict: what to use and what it gains most, and what others are best
    in.
    """
    ours, others = (
        found.recommended,
        [own for own in found.standings if own is not found.reference],
    )
    if not found.learned:
        naming = (
            "always naming the most frequent class, accuracy "
            f"{number(found.most_frequent)}"
        )
        return f"Nothing was learned: no strategy is better than {naming}."
    if not others:
        return f"Only {ours.name} has results: there is nothing to compare it with."
    said = f"Keep {ours.name}: nothing is better beyond noise with {found.seeds}"
    if ours is not found.reference:
        said = f"Use {ours.name}: {_gains(found)[0]}"
    elif found.undecided:
        said = (
            "Undecided: fewer than three seeds do not show what is noise. Run five "
            "seeds"
        )
    elif any(own.judgement == "mixed" and not own.bound for own in others):
        said = f"Keep {ours.name}: what is better in one metric is worse in another"
    best = (_best(found, metric) for metric in found.judged if metric != "loss")
    return f"{said}.{''.join(best)}"


def _best(found: Verdict, metric: str) -> str:
    """Return who gains most in a metric, clearly if anyone does; empty for the
    recommended strategy.
    """
    sign = -1 if metric in LOWER_IS_BETTER else 1
    pairs = {own: own.against[metric] for own in found.standings if not own.bound}
    gains = {own: pair for own, pair in pairs.items() if sign * pair.mean > ROUNDING}
    clear = {
        own: pair for own, pair in gains.items() if pair.verdict == "better"
    } or gains
    top = max(clear, key=lambda own: abs(clear[own].mean), default=found.recommended)
    if top is found.recommended:
        return ""
    return f" Best in {spoken(metric)}: {top.name}, {format_difference(clear[top])}."


def sentences(found: Verdict) -> list[str]:
    """Return the sentences below ``lead``: gains, noise, worst client, messages, other
    strategies.
    """
    ours, theirs, metric = found.recommended, found.reference, found.judged[0]
    alone = ours is theirs
    means = f"Means of {ours.name}: {_means(ours, found)}"
    said = [means] if alone else [f"Also {gain}" for gain in _gains(found)[1]]
    models = [own for own in found.standings if not own.bound] if alone else [ours]
    halves = sorted(
        half for own in models if (half := own.against[metric].smallest) > 0
    )
    if halves:
        between = " to ".join(dict.fromkeys(map(number, (halves[0], halves[-1]))))
        shows = (
            f"With {found.seeds}, {spoken(metric)} has to differ by {between} to be "
            "beyond noise"
        )
        said.append(f"{shows}; brackets are 95 % intervals")
    if not math.isnan(ours.worst):
        worst = number(ours.worst) + (
            "" if alone else f", {theirs.name} {number(theirs.worst)}"
        )
        said.append(f"Worst client, on its own held-out rows: {spoken(metric)} {worst}")
    if not math.isnan(ours.traffic):
        costs = [
            f"{number(o.traffic / 1e6)} MB, {o.requests:.0f} requests"
            for o in (ours, theirs)
        ]
        beside = "" if alone else f"; {theirs.name} {costs[1]}"
        said.append(f"All messages of the run: {costs[0]}{beside}")
    others = [own for own in found.standings if own not in (ours, theirs)]
    for judged, words in JUDGED.items():
        names = [
            _other(o, found) for o in others if not o.bound and o.judgement == judged
        ]
        said += [f"{words.format(theirs.name)}: {'; '.join(names)}"] if names else []
    for own in (own for own in others if own.bound):
        said.append(f"For comparison {own.name} ({own.bound}): {_means(own, found)}")
    return [f"{one}." for one in said]


def _gains(found: Verdict) -> tuple[str, list[str]]:
    """Return ``accuracy 0.6, fedavg 0.5 (+0.1)`` of all clear gains in scores (or one),
    and the rest.
    """
    pairs, name = found.recommended.against, found.reference.name
    clear = [metric for metric in found.judged if pairs[metric].verdict == "better"]
    count = max(1, sum(metric != "loss" for metric in clear))
    said = [
        f"{spoken(metric)} {number(pairs[metric].ours)}, {name} "
        f"{number(pairs[metric].theirs)} ({format_difference(pairs[metric])})"
        for metric in dict.fromkeys([*clear, *found.judged])
    ]
    return "; ".join(said[:count]), said[count:]


def _other(own: Standing, found: Verdict) -> str:
    """Return a strategy with its clear differences, or the one of the headline metric,
    and its bytes.
    """
    if own.judgement in ("same", "diverged"):
        return own.name
    clear = [m for m in found.judged if own.against[m].verdict in ("better", "worse")]
    said = [
        f"{spoken(m)} {format_difference(own.against[m])}"
        for m in clear or found.judged[:1]
    ]
    said += [f"{number(own.traffic / 1e6)} MB"] * (own.traffic > 0)
    return ", ".join([own.name, *said])


def _means(own: Standing, found: Verdict) -> str:
    return ", ".join(
        f"{spoken(metric)} {number(own.mean(metric))}" for metric in found.judged
    )
