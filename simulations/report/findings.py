"""The verdict of an experiment in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isnan

from fedrot.simulations.comparison.paired import LOWER_IS_BETTER, ROUNDING
from fedrot.simulations.comparison.site_gains import FEW_ROWS
from fedrot.simulations.comparison.summary import Standing, Verdict, span
from fedrot.simulations.data.read import listed
from fedrot.simulations.report.tables import (
    format_difference,
    format_interval,
    number,
    of_rows,
    spoken,
)

#: What sites shall do for their own rows, by how the federation is against alone.
JOINING = {
    "better": "join",
    "worse": "stay alone",
    "same": "joining changes nothing",
    "within noise": "joining and staying alone differ by noise",
}
#: What the strategies of each judgement are called; the reference is named in it.
JUDGED = {
    "better": "Also better than {}",
    "undecided": "Undecided against {}",
    "same": "Same as {}, up to rounding",
    "mixed": "Better than {} in one metric and worse in another",
    "worse": "Worse than {}",
    "diverged": "Not compared, because values (or those of {}) are not finite",
}


def lead(verdict: Verdict) -> str:
    """Return what to use, what it gains most, and what other strategies are best in.

    The first sentence is about the sites, if what they gain is known.
    """
    ours = verdict.recommended
    rest = ""
    if not verdict.learned:
        advice = (
            "Nothing was learned: no strategy is better than always naming the most "
            f"frequent class, accuracy {number(verdict.most_frequent)}"
        )
    elif len(verdict.standings) == 1:
        advice = f"Only {ours.name} has results: there is nothing to compare it with"
    elif ours is not verdict.reference:
        clear, _ = _gains(verdict)
        advice = f"Use {ours.name}: {clear}"
        if ours is not verdict.best:
            top = verdict.best
            rest = (
                f" Within noise of {top.name}, which costs "
                f"{top.megabytes / ours.megabytes:.1f} times the bytes."
            )
    elif verdict.undecided:
        advice = "Undecided: fewer than three seeds do not show what is noise"
        rest = " Run five seeds."
    elif any(other.judgement == "mixed" for other in verdict.models):
        advice = f"Keep {ours.name}: what is better in one metric is worse in another"
    else:
        advice = (
            f"Keep {ours.name}: nothing is better beyond noise with {verdict.seeds}"
        )
    scores = [metric for metric in verdict.judged if metric != "loss"]
    best = [_best(verdict, metric) for metric in scores if verdict.learned]
    first = "".join(f"{sentence}. " for sentence in _for_sites(verdict)[:1])
    return f"{first}{advice}.{rest}{''.join(best)}"


def _for_sites(verdict: Verdict) -> list[str]:
    """Return whether sites shall join, which ones gain, and what is best for them.

    It is empty if that is unknown.
    """
    ours, sites = verdict.for_sites, verdict.sites
    if ours is None or sites is None:
        return []
    metric = spoken(sites.metric)
    against = sites.against[ours.name]
    advice = JOINING.get(against.verdict, "no interval tells whether to join")
    gains = sites.gains[ours.name].sort_values(ascending=False)
    named = []
    for site, gain in gains.items():
        signed = number(sites.sign * gain, "+")
        named.append(f"{site} {signed} ({of_rows(sites.rows[site])})")
    headline = verdict.judged[0]
    best = str(sites.gains.mean().fillna(-inf).idxmax())
    over = "" if isnan(against.smallest) else f", 95 % interval over {sites.over}"
    better = (
        f"{sites.better(ours.name)} sites are better with {ours.name} than alone, in "
        f"{metric}: {format_interval(against, '+')}"
    )
    on_all = f"{spoken(headline)} {number(ours.mean(headline))}"
    joining = (
        f"For own rows, {advice}: {better} (mean over sites against "
        f"{sites.alone}{over}); on all labels {ours.name} has {on_all}"
    )
    who = (
        f"Who gains by {ours.name}, in {metric} beside alone (test rows; few are below "
        f"{FEW_ROWS}): {listed(named)}"
    )
    top = f"Best on own rows: {best}, {metric} {number(sites.values[best].mean())}"
    return [joining, who, top]


def _best(verdict: Verdict, metric: str) -> str:
    """Return who gains most in a metric, clearly if anyone does.

    The sentence is empty for the recommended strategy.
    """
    sign = -1 if metric in LOWER_IS_BETTER else 1

    def gain(standing: Standing) -> float:
        return sign * standing.against[metric].mean

    gaining = [model for model in verdict.models if gain(model) > ROUNDING]
    clear = [model for model in gaining if model.against[metric].verdict == "better"]
    top = max(clear or gaining, key=gain, default=verdict.recommended)
    if top is verdict.recommended:
        return ""
    return (
        f" Best in {spoken(metric)}: {top.name}, "
        f"{format_difference(top.against[metric])}."
    )


def sentences(verdict: Verdict) -> list[str]:
    """Return the sentences below ``lead``.

    They tell gains, noise, messages, other strategies, and notes.
    """
    ours = verdict.recommended
    if ours is verdict.reference:
        lines = [f"Means of {ours.name}: {_means(ours, verdict)}"]
    else:
        _, gains = _gains(verdict)
        lines = [f"Also {gain}" for gain in gains]
    lines += [*_noise(verdict), *_costs(verdict), *_others(verdict), *verdict.notes]
    lines = [*_for_sites(verdict)[1:], *lines]
    return [f"{line}." for line in [*_unfitted(verdict), *lines]]


def _unfitted(verdict: Verdict) -> Iterator[str]:
    """Yield the strategies whose task heads could not be fitted."""
    failed = [
        f"{standing.name} ({standing.unfitted} of {len(standing.values)} seeds)"
        for standing in verdict.standings
        if standing.unfitted
    ]
    if failed:
        yield (
            "No task head could be fitted in the last round, and the logs in the "
            f"folder cells say why: {', '.join(failed)}"
        )


def _noise(verdict: Verdict) -> Iterator[str]:
    """Yield how far the headline metric has to differ to be beyond noise."""
    metric = verdict.judged[0]
    models: Sequence[Standing] = [verdict.recommended]
    # The reference has no interval of its own: the others show the noise.
    if verdict.recommended is verdict.reference:
        models = verdict.models
    halves = (model.against[metric].smallest for model in models)
    known = [half for half in halves if half > 0]
    if known:
        yield (
            f"With {verdict.seeds}, {spoken(metric)} has to differ by "
            f"{span(known, number)} to be beyond noise; brackets are 95 % intervals"
        )


def _costs(verdict: Verdict) -> Iterator[str]:
    """Yield the size and number of messages, beside the reference's."""
    ours = verdict.recommended
    reference = verdict.reference
    messages = _messages(ours)
    if ours is not reference:
        messages += f"; {reference.name} {_messages(reference)}"
    if not isnan(ours.megabytes):
        yield f"All messages of the run: {messages}"


def _messages(standing: Standing) -> str:
    return f"{number(standing.megabytes)} MB, {standing.requests:.0f} requests"


def _others(verdict: Verdict) -> Iterator[str]:
    """Yield the strategies beside those two, by judgement."""
    reference = verdict.reference
    others = [
        standing
        for standing in verdict.standings
        if standing not in (verdict.recommended, reference)
    ]
    for judgement, words in JUDGED.items():
        judged = [
            _other(other, verdict)
            for other in others
            if other.judgement == judgement and not other.bound
        ]
        if judged:
            yield f"{words.format(reference.name)}: {'; '.join(judged)}"
    for other in others:
        if other.bound:
            yield (
                f"For comparison {other.name} ({other.bound}): {_means(other, verdict)}"
            )


def _gains(verdict: Verdict) -> tuple[str, list[str]]:
    """Return ``accuracy 0.6, fedavg 0.5 (+0.1)`` of clear gains, and the other texts.

    Only gains in scores come first; without one, that of the headline metric does.
    """
    standing = verdict.recommended
    gains = []
    for metric in dict.fromkeys([*standing.clear, *verdict.judged]):
        ours = f"{spoken(metric)} {number(standing.mean(metric))}"
        other = f"{verdict.reference.name} {number(verdict.reference.mean(metric))}"
        difference = format_difference(standing.against[metric])
        gains.append(f"{ours}, {other} ({difference})")
    scores = [metric for metric in standing.clear if metric != "loss"]
    count = max(1, len(scores))
    return "; ".join(gains[:count]), gains[count:]


def _other(standing: Standing, verdict: Verdict) -> str:
    """Return a strategy with its differences and its bytes.

    They are the clear differences, or that of the headline metric.
    """
    if standing.judgement in ("same", "diverged"):
        return standing.name
    texts = [standing.name]
    for metric in standing.clear or verdict.judged[:1]:
        difference = format_difference(standing.against[metric])
        texts.append(f"{spoken(metric)} {difference}")
    if standing.megabytes > 0:
        texts.append(f"{number(standing.megabytes)} MB")
    return ", ".join(texts)


def _means(standing: Standing, verdict: Verdict) -> str:
    return ", ".join(
        f"{spoken(metric)} {number(standing.mean(metric))}" for metric in verdict.judged
    )
