"""Intervals against scipy and printed tables, and the verdict of an experiment."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedrot.simulations.comparison.paired import paired_difference
from fedrot.simulations.comparison.summary import BOUNDS, verdicts_of
from fedrot.simulations.report.findings import lead, sentences
from tests.simulations.report.runs import levels, row, run_of, strategy

BASE = (0.50, 0.52, 0.54)
#: Spreads over seeds: clear, and not.
CLEAR, WIDE = (0.0, 0.001, 0.002), (0.03, -0.03, 0.01)


def raised(gain, spread=CLEAR):
    """Return the base's values with a gain, which differs by seed."""
    return [base + gain + own for base, own in zip(BASE, spread, strict=True)]


def judged(rows, *strategies, **more):
    (found,) = verdicts_of(run_of(rows, strategies, **more))
    return found


def told(rows):
    """Return all that is said of some rows, a sentence a line."""
    return "\n".join([lead(judged(rows)), *sentences(judged(rows))])


def of(name, accuracy, loss, size=1e6):
    """Return rows of accuracy, loss, and bytes of messages."""
    messages = dict.fromkeys(("bytes-sent", "bytes-received"), [size] * 3)
    messages["requests"] = [4.0] * 3
    scores = levels(name, {"accuracy": accuracy, "loss": loss})
    return scores + levels(name, messages, scope="messages")


FEDAVG = of("fedavg", BASE, [1.0, 1.1, 1.2])


def other(name, gain, fall, size=1e6):
    """Return rows of a strategy with a higher accuracy and a lower loss than
    FedAvg's.
    """
    return of(name, raised(gain), [1.0 - fall, 1.101 - fall, 1.199 - fall], size)


@given(
    st.lists(
        st.floats(-1, 1, allow_subnormal=False).map(lambda x: round(x, 3)),
        min_size=2,
        max_size=9,
    )
)
def test_intervals_are_those_of_scipy(values):
    found = paired_difference(values)
    if math.isnan(found.smallest):
        assert found.verdict in ("same", "no interval")
        assert np.ptp(values) < 1e-5
        return
    low, high = stats.t.interval(
        0.95, len(values) - 1, np.mean(values), stats.sem(values)
    )
    assert (found.mean - found.smallest, found.mean + found.smallest) == pytest.approx(
        (low, high)
    )
    decided = "better" if found.mean > 0 else "worse"
    assert found.verdict == ("within noise" if low <= 0 <= high else decided)
    turned = paired_difference([-value for value in values], lower_is_better=True)
    assert turned.verdict == found.verdict


@pytest.mark.parametrize(
    ("differences", "verdict", "mean"),
    [
        ([], "no interval", math.nan),
        ([0.1], "no interval", 0.1),
        ([0.1, 0.1, 0.1 + 1e-9], "no interval", 0.1),
        ([1e-6, -1e-6], "same", 0.0),
        ([-2e-6, 1e-6], "within noise", -5e-7),
        ([0.1, math.nan], "not finite", math.nan),
    ],
)
def test_differences_without_an_interval(differences, verdict, mean):
    found = paired_difference(differences)
    assert (found.verdict, found.n) == (verdict, len(differences))
    assert found.mean == pytest.approx(mean, nan_ok=True)
    assert math.isnan(found.smallest) == (verdict != "within noise")


def test_seeds_and_metrics_that_one_strategy_lacks_do_not_count():
    rows = [
        *levels("fedavg", {"accuracy": [0.1, 0.5, 0.6]}),
        row("b", 1, 0.7),
        row("b", 2, 0.9),
    ]
    pair = judged([*rows, row("b", 7, 0.0)]).standings[1].against["accuracy"]
    assert (pair.n, pair.mean) == pytest.approx((2, 0.25))
    rows = [
        *FEDAVG,
        *other("b", 0, 0),
        row("b", 0, 0.1, metric="macro_f1"),
        row("c", 9, 0.1),
    ]
    _, b, c = judged(rows).standings
    lacking = [b.against["macro_f1"], c.against["loss"], c.against["accuracy"]]
    assert [(pair.verdict, pair.n) for pair in lacking] == [("no interval", 0)] * 3


#: Differences over three seeds: clearly above 0, around 0, none, not finite.
UP, AROUND, NONE = (0.1, 0.11, 0.12), WIDE, (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("accuracy", "f1", "loss", "expected"),
    [
        (UP, NONE, AROUND, "better"),
        (AROUND, AROUND, UP, "worse"),
        (UP, NONE, UP, "mixed"),
        (NONE, NONE, NONE, "same"),
        (AROUND, AROUND, AROUND, "undecided"),
        ((0.1, 0.1, 0.1), NONE, NONE, "undecided"),
        (UP, UP, (math.nan, 0.0, 0.0), "diverged"),
    ],
)
def test_metrics_are_judged_together(accuracy, f1, loss, expected):
    names = ("accuracy", "macro_f1", "loss")
    rows = levels("fedavg", dict.fromkeys(names, BASE))
    values = zip(names, (accuracy, f1, loss), strict=True)
    rows += levels("b", {name: raised(0, own) for name, own in values})
    assert judged(rows).standings[1].judgement == expected
    assert judged(rows).recommended.name == ("b" if expected == "better" else "fedavg")


def test_the_lowest_loss_is_recommended_but_no_bound(
    monkeypatch,
):
    monkeypatch.setitem(BOUNDS, "ensemble", "no model for clients")
    rows = [*FEDAVG, *other("aligned", 0.1, 0.2, 2e5), *other("fit_head", 0.05, 0.4)]
    rows += [
        *other("joined", 0.3, 0.8),
        *other("ensemble", 0.2, 0.7),
        *other("worse", -0.1, -0.3),
    ]
    about = [
        strategy("fit_head"),
        strategy("fedavg"),
        strategy("ensemble", kind="ensemble"),
    ]
    found = judged(rows, *about)
    names = [standing.name for standing in found.standings]
    assert names[:3] == ["fit_head", "fedavg", "ensemble"]
    assert found.code == "FedRot(fit_head)"
    assert lead(found) == (
        "Use fit_head: accuracy 0.571, fedavg 0.520 (+0.051 [+0.049, +0.053]). "
        "Best in accuracy: aligned, +0.101 [+0.099, +0.103]."
    )
    said = " ".join(sentences(found))
    for words in (
        "Also better than fedavg: aligned, accuracy +0.101 [+0.099, +0.103], loss -0.2",
        "For comparison joined (all rows in one place, an upper bound): accuracy 0.821",
        "For comparison ensemble (no model for clients)",
        "0.400 MB. Worse than fedavg: worse, accuracy -0.099",
        "All messages of the run: 2.000 MB, 4 requests; fedavg 2.000 MB, 4 requests.",
    ):
        assert words in said


def test_without_a_decided_difference_the_reference_stays():
    rows = [*FEDAVG, *of("aligned", raised(0, WIDE), [0.9, 1.2, 1.15])]
    said = told(rows)
    assert said.startswith("Keep fedavg: nothing is better beyond noise with 3 seeds.")
    # Differences of accuracy 0.03, -0.03, 0.01: mean 0.00333, half of the interval
    # 0.0759.
    assert "accuracy has to differ by 0.076 to be" in said
    assert "accuracy +0.003 [-0.073, +0.079], 2.000 MB." in said
    assert "with 1 to 3 seeds" in told([*rows, row("b", 0, 1.0)])
    first = [row for row in [*FEDAVG, *other("aligned", 0.1, 0.2)] if row["seed"] == 0]
    said = told(first)
    assert said.startswith(
        "Undecided: fewer than three seeds do not show what is noise"
    )
    assert "Best in accuracy: aligned, +0.100." in said
    named = (strategy("fedavg"), strategy("aligned"))
    assert (judged(first, *named).code, bool(judged(FEDAVG, *named).code)) == ("", True)
    assert "there is nothing to compare it with" in told(FEDAVG)


def test_macro_f1_beside_accuracy_can_decide():
    rows = [*FEDAVG, *of("fit_head", raised(0, WIDE), [0.95, 1.2, 1.15])]
    rows += levels("fedavg", {"macro_f1": BASE}) + levels(
        "fit_head", {"macro_f1": raised(0.178)}
    )
    found = judged(rows)
    assert found.judged == ["accuracy", "macro_f1", "loss"]
    assert found.recommended.name == "fit_head"
    assert told(rows).startswith("Use fit_head: macro F1 0.699, fedavg 0.520 (+0.179")
    # All clear gains in scores are named, whatever the loss gains.
    both = levels("fit_head", {"accuracy": raised(0.01), "loss": [0.1, 0.2, 0.3]})
    said = lead(judged([*rows, *both]))
    assert said.startswith("Use fit_head: accuracy 0.531, fedavg 0.520 (+0.011")
    assert said.endswith("; macro F1 0.699, fedavg 0.520 (+0.179 [+0.177, +0.181]).")


@pytest.mark.parametrize(
    ("metric", "gain", "spread", "best"),
    [
        ("macro_f1", 0.178, CLEAR, "fit_head, +0.179 [+0.177, +0.181]"),
        # Less, and clear.
        ("macro_f1", 0.1, CLEAR, "fit_head, +0.101 [+0.099, +0.103]"),
        ("macro_f1", 0.03, WIDE, "aligned, +0.200 [-"),
        ("macro_f1", -0.2, WIDE, "aligned, +0.200 [-"),
        ("perplexity", -0.1, CLEAR, "fit_head, -0.099 [-0.101, -0.097]"),
        ("perplexity", -0.5, WIDE, "fit_head, -0.497 [-0.573, -0.421]"),
    ],
)
def test_the_best_in_a_score_is_in_the_verdict(metric, gain, spread, best):
    """Whichever strategy it is, also if its loss is worse; undecided ones only without
    clear ones.
    """
    same = {"accuracy": BASE} if metric == "macro_f1" else {}
    rows = []
    for name, values, losses in (
        ("fedavg", BASE, BASE),
        ("fit_head", raised(gain, spread), raised(1.0)),
        ("aligned", raised(0.1, (0.4, -0.3, 0.2)), BASE),
    ):
        rows += levels(name, {**same, metric: values, "loss": losses})
    found = lead(judged(rows))
    kept = (
        "nothing is better beyond noise"
        if "aligned" in best
        else "what is better in one metric"
    )
    assert found.startswith(f"Keep fedavg: {kept}")
    assert f". Best in {metric.replace('macro_f1', 'macro F1')}: {best}" in found
    assert "Best in accuracy" not in found


@pytest.mark.parametrize(
    ("names", "kind", "expected"),
    [
        (["a", "fedavg"], "fedrot", "fedavg"),
        (["a", "b"], "fedrot", "a"),
        (["joined", "a"], "", "a"),
        (["x", "a"], "joined", "a"),
        (["nan", "a"], "fedrot", "a"),
    ],
)
def test_without_fedavg_the_first_is_the_reference(names, kind, expected):
    rows = []
    for name in names:
        rows += of(name, BASE, [math.nan if name == "nan" else 1.0] * 3)
    about = [strategy(names[0], kind=kind)] if kind else []
    assert judged(rows, *about).reference.name == expected


def test_the_last_round_counts_by_strategy_and_the_last_of_repeated_rows():
    rows = [
        row("fedavg", 0, 0.3),
        row("fedavg", 0, 0.5, round=2),
        row("fedavg", 0, 0.6, round=2),
    ]
    rows += [row("head_only", 0, 0.4, round=0), row("head_only", 1, None, round=0)]
    fedavg, head = judged(rows).standings
    assert fedavg.values.to_dict() == {"accuracy": {0: 0.6}}
    assert head.values["accuracy"][0] == 0.4
    assert math.isnan(head.mean("accuracy"))


def test_a_task_head_that_is_not_fitted_is_named():
    rows = [*FEDAVG, *other("head", 0.0, 0.0)]
    failed = {"scope": "round", "metric": "fedrot-head-failed"}
    assert "task head" not in told([*rows, row("head", 0, 0.0, **failed)])
    rows += [row("head", seed, float(seed > 0), **failed) for seed in range(3)]
    assert "why: head (2 of 3 seeds)." in told(rows)


@pytest.mark.parametrize("best", ["best", "fedavg"])
@pytest.mark.parametrize(
    ("accuracy", "loss", "size", "times"),
    [
        # Its differences from the best strategy; bytes; what the best one costs.
        (WIDE, WIDE, 2.5e5, "4.0"),
        (NONE, NONE, 2.5e5, "4.0"),
        # It costs as much; worse in one metric; a constant difference has no interval.
        (WIDE, WIDE, 9.5e5, ""),
        (WIDE, UP, 2.5e5, ""),
        ((-0.1,) * 3, WIDE, 2.5e5, ""),
        (WIDE, WIDE, math.nan, ""),
    ],
)
def test_the_cheapest_within_noise_of_the_best_is_named(
    accuracy, loss, size, times, best
):
    gained, lost = raised(0.5), raised(-0.2)
    rows = [
        *of("fedavg", raised(-1, NONE), raised(1, NONE), 1e4),
        *of(best, gained, lost),  # repeated rows replace others
        *of("dearer", np.add(gained, WIDE), np.add(lost, WIDE), 5e5),
        *of("cheap", np.add(gained, accuracy), np.add(lost, loss), size),
    ]
    if best != "fedavg":  # Perhaps no better than the reference.
        rows += of("unsure", np.add(gained, (2, -2, 0)), np.add(lost, (2, 0, -2)), 9e4)
    found = judged(rows)
    wanted = "cheap" if times else "dearer"
    assert (found.best.name, found.recommended.name) == (best, wanted)
    costs = f"which costs {times or '2.0'} times the bytes."
    assert f". Within noise of {best}, {costs}" in lead(found)
    # Two seeds do not show what is noise.
    rows = [row for row in rows if row["strategy"] != "dearer"]
    assert judged(rows).recommended.name == ("cheap" if times else best)
    assert judged([row for row in rows if row["seed"] != 1]).recommended.name == best


@pytest.mark.parametrize(
    ("lr", "own", "model", "lora", "rate"),
    [
        (1e-3, None, "encoder", {}, "0.001"),
        (5e-5, 2e-4, "encoder", {}, "0.0002"),
        (1e-4, None, "encoder", {}, ""),
        (1e-3, 1e-5, "encoder", {}, ""),
        (1e-3, None, None, {}, ""),
        (1e-3, None, "encoder", {"r": 8}, ""),
    ],
)
def test_a_high_learning_rate_of_a_pretrained_model_is_noted(
    lr, own, model, lora, rate
):
    about = strategy("a", learning_rate=own)
    found = judged(of("a", BASE, BASE), about, lr=lr, model=model, lora=lora)
    notes = [note for note in sentences(found) if "Learning rate" in note]
    assert [note.split()[2] for note in notes] == ([rate] if rate else [])


@pytest.mark.parametrize(
    ("accuracy", "macro_f1", "learned"),
    [(0.605, 0.26, False), (0.63, 0.26, True), (0.605, 0.35, True), (0.3, 0.1, False)],
)
def test_naming_one_class_is_no_learning(accuracy, macro_f1, learned):
    """Of three classes, the first has a share of 0.6, and by itself a macro F1 of 0.75
    / 3.
    """
    seeds = {str(n): [[4, 3, 1], [2, 0, 0]] for n in (0, 1)}
    values = {"accuracy": [accuracy] * 2, "macro_f1": [macro_f1] * 2}
    found = judged(
        levels("fedavg", values),
        strategy("fedavg"),
        label_names=["a", "b", "c"],
        seeds=seeds,
    )
    assert (found.most_frequent, found.learned) == (pytest.approx(0.6), learned)
    assert lead(found).startswith("Nothing was learned") is not learned
    assert bool(found.code) is learned
    # Without names of classes there is none to name.
    assert judged(levels("fedavg", values)).learned
    assert judged(
        levels("fedavg", values), label_names=[], seeds={"0": [[4], [2]]}
    ).learned


def test_experiments_come_in_the_order_of_the_configuration():
    rows = [row("fedavg", 0, 0.5, experiment=name) for name in ("c", "a")]
    rows.append(row("fedavg", 0, 0.5, experiment="b", scope="client:0"))
    run = run_of(rows)
    run = replace(run, experiments=dict.fromkeys("abc", run.experiments["main"]))
    assert [found.experiment for found in verdicts_of(run)] == ["a", "c"]
