"""Findings in sentences: the effect of alignment, layers without effect, and lost replies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from fedrot.simulations.arm import EACH_ROUND, TASK_HEAD
from fedrot.simulations.federation.run_folder import OF_OWN_MODEL
from fedrot.simulations.report.findings.shares import shares
from fedrot.simulations.report.summaries import (
    BASELINE,
    Paired,
    Result,
    Row,
    by_setting,
    headline,
    results,
    setting_of,
)
from fedrot.simulations.report.tables import format_difference, number_style
from fedrot.symmetry import NO_LAYER

#: Below this share of the squared distance, a removed distance counts as no effect.
NEGLIGIBLE = 0.01
#: Words about layers without effect, by whether chance is known.
IDLE = {
    True: "found no more than chance",
    False: f"removed less than {100 * NEGLIGIBLE:.0f} % of the squared distance",
}
#: Findings, by verdict on an arm's differences from the baseline. The metrics follow.
DOUBTS = {
    "worse": f"{{arm}} hurt against {BASELINE}",
    "identical": f"{{arm}} gave exactly the values of {BASELINE}",
    "equal but for rounding": f"{{arm}} gave the values of {BASELINE}, but for rounding",
    "within noise": f"{{arm}} cannot be told from {BASELINE} with these seeds",
    "not finite": f"{{arm}} or {BASELINE} diverged",
}
#: The arm of ``FedRot`` with its defaults.
DEFAULT = "aligned"
#: Explanations of arms and starts.
WORDS = {
    BASELINE: "the clients' models are averaged as they are (FedAvg)",
    DEFAULT: "each model is moved to the others' coordinates before it is averaged (FedRot's defaults)",
    f"{BASELINE}{TASK_HEAD}": "the plain average, its task head fitted to sums over all clients' rows",
    f"{DEFAULT}{TASK_HEAD}": "the aligned average, its task head fitted to sums over all clients' rows",
    f"{BASELINE}{EACH_ROUND}": "the plain average, its task head fitted in every round, for the clients",
    f"{BASELINE}/regmean": "linear layers by regression on the clients' inputs (RegMean)",
    f"{DEFAULT}/regmean": "aligned, then linear layers by regression on the clients' inputs (RegMean)",
    "same": "all clients start from one model",
    "pretrained": "all clients start from one model that was pretrained as a language model",
    "different": "each client trains from its own random model in the first round",
    "scrambled": "each client returns its update in random coordinates, with the same function",
    "joined": "one model trained on all clients' data, an upper bound",
}
#: The effect of alignment that moved nothing.
IDENTICAL = f"changed nothing: the model is that of {BASELINE}"
#: Effects of alignment, by verdict. Of several verdicts, the first in this order is used.
EFFECTS = {
    "not finite": "cannot be judged: values are not finite",
    "better": "helped",
    "worse": "hurt",
    "within noise": "made no difference within noise",
    "one seed: no interval": "cannot be judged with one seed",
    "no spread: no interval": "cannot be judged: all seeds have the same difference",
    "no seed in common": "cannot be judged: no seed is in both arms",
    "equal but for rounding": "changed nothing but rounding",
    "identical": IDENTICAL,
}
#: Starts of the names of arms that are no average of one round.
NO_AVERAGE = ("ensemble", "joined")
MIXED = "helped in one metric and hurt in another"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return sentences about the effect of FedRot's defaults, one per setting and start.

    They are about the headline metric and the loss. A second sentence is about the arm that gained most
    of those that helped. Of several settings and starts, a first sentence counts the effects. Settings
    without the arm or without the baseline are left out.
    """
    said, effects = [], Counter[str]()
    for setting, own in by_setting(rows).items():
        metrics = headline(own)
        starts: dict[str, dict[str, dict[str, Paired]]] = {}
        for result in results(own):
            start, arm, metric = result.place.start, result.place.arm, result.place.metric
            if result.difference is not None and metric in metrics:
                starts.setdefault(start, {}).setdefault(arm, {})[metric] = result.difference
        for start, arms in starts.items():
            differences = arms.pop(DEFAULT, None)
            if differences is None:
                continue
            effect = _effect({difference.verdict for difference in differences.values()})
            effects[effect] += 1
            said.append(f"{_named(setting, start)}: alignment {effect}{_changes(differences)}.")
            best = _best(arms)
            if best is not None:
                said.append(f"{_named(setting, start)}: {best} helped{_changes(arms[best])}.")
            said += alone(own, setting, start, metrics)
    if effects.total() > 1:
        counted = "; ".join(f"in {count} it {effect}" for effect, count in effects.items())
        said.insert(0, f"Alignment in {effects.total()} settings and starts: {counted}.")
    return said


def alone(rows: Sequence[Row], setting: str, start: str, metrics: Sequence[str]) -> list[str]:
    """Return a sentence about the clients' own models, if they trained in one round; else none.

    After several rounds a client's model is one that was averaged before.
    """
    own = [row for row in rows if row["scope"].startswith(OF_OWN_MODEL) and row["start"] == start]
    if not own or any(row["round"] != 1 for row in own):
        return []
    values = {m: [row["value"] for row in own if row["metric"] == m] for m in metrics}
    if any(value is None for found in values.values() for value in found):
        return []
    means = {metric: sum(found) / len(found) for metric, found in values.items() if found}
    shown = (f"{metric} {mean:{number_style(mean)}}" for metric, mean in means.items())
    named = _named(setting, start)
    return [f"{named}: a client's own model alone has {', '.join(shown)} (mean of clients and seeds)."]


def _best(arms: Mapping[str, Mapping[str, Paired]]) -> str | None:
    """Return the arm that lowers the loss most, of the arms that helped; None if none did.

    Arms that give no single model for all clients, ensembles and joint training, are left out.
    """
    helped = {
        arm: found["loss"].mean
        for arm, found in arms.items()
        if "loss" in found
        and not arm.startswith(NO_AVERAGE)
        and _effect({difference.verdict for difference in found.values()}) == EFFECTS["better"]
    }
    return min(helped, key=helped.__getitem__, default=None)


def _effect(verdicts: set[str]) -> str:
    effect = next(effect for verdict, effect in EFFECTS.items() if verdict in verdicts)
    return MIXED if effect == EFFECTS["better"] and "worse" in verdicts else effect


def _changes(differences: Mapping[str, Paired]) -> str:
    changes = [
        f"{metric} {_change(difference)}, {format_difference(difference)}"
        for metric, difference in differences.items()
        if difference.n
    ]
    return f" ({'; '.join(changes)})" if changes else ""


def _change(difference: Paired) -> str:
    style = number_style(difference.theirs, difference.ours)
    return f"{difference.theirs:{style}} → {difference.ours:{style}}"


def doubts(found: Sequence[Result]) -> list[str]:
    """Return sentences about arms without a gain, one per arm and verdict."""
    metrics: dict[tuple[str, str, str], list[str]] = {}
    for result in found:
        (setting, start, arm, metric), difference = result.place, result.difference
        if difference is not None and difference.verdict in DOUBTS:
            known = difference.verdict in ("worse", "within noise")
            change = f" {format_difference(difference)}" if known else ""
            metrics.setdefault((_named(setting, start), arm, difference.verdict), []).append(
                metric + change
            )
    return [
        f"{named}: {DOUBTS[verdict].format(arm=arm)}: {', '.join(said)}."
        for (named, arm, verdict), said in metrics.items()
    ]


def _named(setting: str, start: str) -> str:
    return f"{setting or 'this run'}, start {start}"


def idle_layers(alignment: Sequence[Row]) -> list[str]:
    """Return sentences about layers without effect: no more than chance, or almost no distance."""
    names = ["setting", "start", "arm", "part", "layer"]
    idle: dict[str, list[str]] = {}
    for share in shares(alignment, names).sort_values("layer", kind="stable").itertuples():
        known = not math.isnan(share.chance)
        if share.ratio <= 1 if known else share.found < NEGLIGIBLE:
            place, layer = (
                ("the whole model", "") if share.layer == NO_LAYER else ("layer", f"{share.layer} ")
            )
            whose = f"{_named(share.setting, share.start)}: {share.arm}"
            of = f"{whose} {IDLE[known]} by {share.part} in {place}"
            chance = f", chance {100 * share.chance:.2g} %" if known else ""
            idle.setdefault(of, []).append(f"{layer}({100 * share.found:.2g} %{chance})")
    return [f"{of} {', '.join(layers)}." for of, layers in idle.items()]


def dropped(alignment: Sequence[Row]) -> list[str]:
    """Return sentences about dropped replies."""
    lost = [row for row in alignment if "dropped" in row]
    reasons = Counter((setting_of(row), row.get("arm"), str(row["dropped"])) for row in lost)
    return [
        f"{setting or 'this run'}: {arm} dropped a reply {count} time(s): {reason}"
        for (setting, arm, reason), count in reasons.items()
    ]


def failed(rows: Sequence[Row]) -> list[str]:
    """Return sentences about failed clients."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row["metric"] == "fedrot-replies-failed" and row["value"] > 0:
            counts[setting_of(row), str(row["start"]), str(row["arm"])] += int(row["value"])
    return [
        f"{_named(setting, start)}: {arm} was run without {count} replies of failed clients, over all "
        "rounds and seeds."
        for (setting, start, arm), count in counts.items()
    ]
