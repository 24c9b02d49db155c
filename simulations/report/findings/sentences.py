"""Findings in sentences: whether alignment helped, what it did not do, and what was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedrot.simulations.report.findings.shares import Layer, shares_by_layer
from fedrot.simulations.report.summaries import (
    Paired,
    Row,
    by_setting,
    compare_seeds,
    final_values,
    headline,
    setting_of,
)
from fedrot.simulations.report.tables import (
    BASELINE,
    Line,
    format_difference,
    number_style,
    result_lines,
)

#: An alignment that removes a smaller share of the squared distance counts as without effect.
NEGLIGIBLE = 0.01
#: What alignment did in layers without effect, by whether chance is known.
IDLE = {
    True: "found no more than chance",
    False: f"removed less than {100 * NEGLIGIBLE:.0f} % of the squared distance",
}
#: Findings by verdict of an arm's difference from the baseline.
DOUBTS = {
    "worse": f"{{where}} hurt {{metric}} against {BASELINE}: {{change}}.",
    "identical": f"{{where}} gave exactly the {{metric}} of {BASELINE}.",
    "equal but for rounding": f"{{where}} gave the {{metric}} of {BASELINE}, but for rounding.",
    "within noise": "{where} made no measurable difference to {metric}: {change}.",
    "not finite": f"{{where}} or {BASELINE} diverged: {{metric}} is not finite.",
}


#: The arm of ``FedRot`` with its defaults.
DEFAULT = "aligned"
#: Arms and starts in words.
WORDS = {
    BASELINE: "the clients' models are averaged as they are (FedAvg)",
    DEFAULT: "each model is moved to the others' coordinates before it is averaged (FedRot's defaults)",
    "same": "all clients start from one random model",
    "pretrained": "all clients start from one model that has learned its language",
    "different": "each client has trained from a start of its own before the clients meet",
    "scrambled": "each client answers in random coordinates; its model computes the same function",
    "joined": "one model trained on all clients' data, an upper bound",
}
#: What alignment did, by the verdicts on its metrics: the first that one of them has.
EFFECTS = {
    "not finite": "cannot be judged: values are not finite",
    "better": "helped",
    "worse": "hurt",
    "within noise": "made no measurable difference",
    "one seed: no interval": "cannot be judged by one seed",
    "no spread: no interval": "cannot be judged: all seeds differ alike",
    "no seed in common": "cannot be judged: no seed is in both arms",
    "equal but for rounding": "changed nothing but rounding",
    "identical": f"changed nothing: the model is that of {BASELINE}",
}


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return a sentence per setting and start: whether the defaults of FedRot helped.

    It is about the headline metric and the loss. Settings without their arm, or without the baseline,
    are left out.
    """
    said = []
    for own in by_setting(rows).values():
        metrics = headline(own)
        lines = result_lines(own, metrics)
        compared = {line.start for line in lines if line.arm == BASELINE}
        said += [
            _verdict(line, metrics) for line in lines if line.arm == DEFAULT and line.start in compared
        ]
    return said


def _verdict(line: Line, metrics: Sequence[str]) -> str:
    changes = [
        f"{metric} {_change(difference)}, {format_difference(difference)}"
        for metric, difference in zip(metrics, line.differences, strict=True)
        if difference is not None and difference.n
    ]
    found = {difference.verdict for difference in line.differences if difference is not None}
    effect = next(effect for verdict, effect in EFFECTS.items() if verdict in found)
    if effect == EFFECTS["better"] and "worse" in found:
        effect = "helped in one metric and hurt in another"
    shown = f" ({'; '.join(changes)})" if changes else ""
    return f"{_named(line.setting)}, start {line.start}: alignment {effect}{shown}."


def _change(difference: Paired, decimals: int = 3) -> str:
    style = number_style(difference.theirs, difference.ours, decimals=decimals)
    return f"{difference.theirs:{style}} → {difference.ours:{style}}"


def doubts(lines: Sequence[Line], metrics: Sequence[str]) -> list[str]:
    """Return sentences on arms without a gain."""
    return [
        DOUBTS[difference.verdict].format(
            where=f"{_named(line.setting)}, start {line.start}: {line.arm}",
            metric=metric,
            change=format_difference(difference).removesuffix(f" {difference.verdict}"),
        )
        for line in lines
        for metric, difference in zip(metrics, line.differences, strict=True)
        if difference is not None and difference.verdict in DOUBTS
    ]


def costs_of_scrambling(rows: Sequence[Row], metrics: Sequence[str]) -> list[str]:
    """Return sentences on the cost of scrambling: every arm against its own run of start same."""
    values = final_values(rows)
    changes: dict[tuple[str, str], list[str]] = {}
    for place, ours in values.items():
        theirs = values.get(place._replace(start="same"), {})
        cost = compare_seeds(ours, theirs, place.metric)
        if place.start != "scrambled" or place.metric not in metrics or not cost.n:
            continue
        style = number_style(cost.ours, cost.theirs, decimals=4)
        said = f"{place.metric} {_change(cost, decimals=4)} ({cost.mean:+{style}})"
        changes.setdefault((place.setting, place.arm), []).append(said)
    return [f"{setting}, {arm}: {', '.join(said)}." for (setting, arm), said in changes.items()]


def _named(setting: str) -> str:
    return setting or "this run"


def idle_layers(alignment: Sequence[Row]) -> list[str]:
    """Return sentences on layers in which nothing was found, or nothing beyond chance if it is known."""
    idle: dict[tuple[Layer, bool], list[str]] = {}
    for layer, share in shares_by_layer(alignment).items():
        known = share.chance_share is not None
        if share.ratio <= 1 if known else share.share < NEGLIGIBLE:
            both = [s for s in (share.share, share.chance_share) if s is not None]
            shown = f"{layer.layer} ({', chance '.join(f'{100 * s:.2g} %' for s in both)})"
            idle.setdefault((layer._replace(layer=-1), known), []).append(shown)
    return [
        f"{_named(of.setting)}, start {of.start}: {of.arm} {IDLE[known]} by {of.part} in layer "
        f"{', '.join(layers)}."
        for (of, known), layers in idle.items()
    ]


def dropped(alignment: Sequence[Row]) -> list[str]:
    """Return sentences on dropped replies."""
    lost = [row for row in alignment if "dropped" in row]
    reasons = Counter((setting_of(row), row.get("arm"), str(row["dropped"])) for row in lost)
    return [
        f"{_named(setting)}: {arm} dropped a reply {count} time(s): {reason}"
        for (setting, arm, reason), count in reasons.items()
    ]


def failed(rows: Sequence[Row]) -> list[str]:
    """Return sentences on failed clients."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row["metric"] == "fedrot-replies-failed" and row["value"] > 0:
            counts[setting_of(row), str(row["start"]), str(row["arm"])] += int(row["value"])
    return [
        f"{_named(setting)}, start {start}: {arm} went on without {count} replies of clients that "
        "failed, over all rounds and seeds."
        for (setting, start, arm), count in counts.items()
    ]
