"""Intervals against scipy and printed tables, and the verdict of an experiment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedrot.simulations.report.findings import lead, sentences
from fedrot.simulations.summary import (
    BOUNDS,
    MOST_SEEDS,
    Verdict,
    compare_seeds,
    described,
    judgement,
    paired_difference,
    verdict,
    verdicts_of,
)
from tests.simulations.report.runs import levels, row, run_of, strategy

BASE = (0.50, 0.52, 0.54)
WIDE = (0.03, -0.03, 0.01)


def raised(gain: float, spread: Sequence[float] = (0.0, 0.001, 0.002)) -> list[float]:
    """Return the base's values with a gain, which differs by seed."""
    return [base + gain + own for base, own in zip(BASE, spread, strict=True)]


def judged(rows: list[dict[str, Any]], *strategies: dict[str, Any], **more: Any) -> Verdict:
    found = verdict(run_of(rows, strategies, **more), "main")
    assert found is not None
    return found


def of(name: str, accuracy: Sequence[float], loss: Sequence[float], **more: Any) -> list[dict[str, Any]]:
    """Return rows of accuracy, loss, and bytes of messages."""
    size = more.pop("size", 1e6)
    messages = {"bytes-sent": [size] * 3, "bytes-received": [size] * 3, "requests": [4.0] * 3}
    return [
        *levels(name, {"accuracy": accuracy, "loss": loss}, **more),
        *levels(name, messages, scope="messages"),
    ]


FEDAVG = of("fedavg", BASE, [1.0, 1.1, 1.2])


def other(name: str, gain: float, fall: float, **more: Any) -> list[dict[str, Any]]:
    """Return rows of a strategy with a higher accuracy and a lower loss than FedAvg's."""
    return of(name, raised(gain), [1.0 - fall, 1.101 - fall, 1.199 - fall], **more)


@given(
    st.lists(st.floats(-1, 1, allow_subnormal=False).map(lambda x: round(x, 3)), min_size=2, max_size=9)
)
def test_the_interval_is_that_of_scipy(values: list[float]) -> None:
    found = paired_difference(values)
    if math.isnan(found.smallest):
        assert np.ptp(values) < 1e-5
        return
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert (found.ci_low, found.ci_high) == pytest.approx((low, high))
    assert (found.verdict == "within noise") == (low <= 0 <= high)
    needed = found.seeds_needed
    # Of n seeds with this mean and spread, the interval excludes 0; of one less, it does not.
    spread = np.std(values, ddof=1)
    halves = {n: stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) for n in range(2, MOST_SEEDS + 1)}
    assert needed == next((n for n, half in halves.items() if half < abs(found.mean)), None)


def test_the_interval_by_hand() -> None:
    found = compare_seeds({0: 0.53, 1: 0.54, 2: 0.58, 7: 9.0}, dict(enumerate(BASE)), "accuracy")
    # Differences 0.03, 0.02, 0.04: mean 0.03, sd 0.01; t(0.975, 2) = 4.302653 from a printed table.
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (found.mean, found.smallest) == pytest.approx((0.03, half), abs=1e-7)
    assert (found.n, found.verdict, found.ours) == (3, "better", pytest.approx(0.55))
    assert found.theirs == pytest.approx(0.52)


@pytest.mark.parametrize(
    ("differences", "lower_is_better", "verdict"),
    [
        ([0.1, 0.11, 0.12], False, "better"),
        ([0.1, 0.11, 0.12], True, "worse"),
        ([-0.1, -0.11, -0.12], True, "better"),
        ([-0.1, -0.11, -0.12], False, "worse"),
        ([0.1, -0.11, 0.12], False, "within noise"),
        ([0.0, 0.0, 0.0], False, "same"),
        ([2e-8, 2.1e-8, 2.2e-8], True, "same"),
        ([2e-6, 2.1e-6, 2.2e-6], True, "worse"),
        ([0.0], False, "same"),
        ([-2e-8], False, "same"),
        ([0.1], False, "no interval"),
        ([0.1, 0.1, 0.1], False, "no interval"),
        ([0.0, math.nan], False, "not finite"),
        ([math.inf, 1.0], True, "not finite"),
        ([], True, "no seed in common"),
    ],
)
def test_differences_have_a_direction(
    differences: list[float], lower_is_better: bool, verdict: str
) -> None:
    found = paired_difference(differences, lower_is_better=lower_is_better)
    assert (found.verdict, found.n) == (verdict, len(differences))
    known = verdict in ("better", "worse", "within noise")
    assert math.isnan(found.smallest) is not known
    if verdict == "no interval":
        assert (found.mean, found.seeds_needed) == (pytest.approx(0.1), None)


def test_a_difference_that_needs_too_many_seeds_has_no_number() -> None:
    assert paired_difference([0.1, -0.1, 0.001]).seeds_needed is None
    assert paired_difference([0.1, -0.1, 0.3]).seeds_needed == 18


@pytest.mark.parametrize(
    ("metric", "unit"),
    [("loss", "nats"), ("perplexity", "from 1 up"), ("matthews", "-1 to 1"), ("accuracy", "0 to 1")],
)
def test_a_metric_is_described_by_unit_and_direction(metric: str, unit: str) -> None:
    better = "lower" if metric in ("loss", "perplexity") else "higher"
    assert described(metric) == f"{metric} ({unit}, {better} is better)"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["better", "within noise"], "better"),
        (["within noise", "worse"], "worse"),
        (["better", "worse"], "mixed"),
        (["same", "same"], "same"),
        (["same", "within noise"], "undecided"),
        (["no interval"], "undecided"),
        (["better", "not finite"], "diverged"),
    ],
)
def test_metrics_are_judged_together(verdicts: list[str], expected: str) -> None:
    pairs = [replace(paired_difference([1.0]), verdict=one) for one in verdicts]
    assert judgement(pairs) == expected


def test_of_better_strategies_the_lowest_loss_is_recommended_and_never_an_upper_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BOUNDS, "ensemble", "no model for clients")
    rows = [*FEDAVG, *other("aligned", 0.1, 0.2), *other("fit_head", 0.05, 0.4)]
    rows += [*other("joined", 0.3, 0.8), *other("ensemble", 0.2, 0.7), *other("worse", -0.1, -0.3)]
    about = [strategy("fit_head"), strategy("fedavg"), strategy("ensemble", kind="ensemble")]
    found = judged(rows, *about)
    assert [own.name for own in found.standings][:3] == ["fit_head", "fedavg", "ensemble"]
    assert (found.recommended.name, found.reference.name) == ("fit_head", "fedavg")
    assert found.best is found.recommended
    assert found.recommended.about["code"] == "FedRot(fit_head)"
    assert lead(found).startswith("Use fit_head: accuracy 0.571, fedavg 0.520 (+0.051 [+0.049, +0.053])")
    said = " ".join(sentences(found))
    assert all(own.name in f"{lead(found)} {said}" for own in found.standings)
    assert "Also better than fedavg: aligned, accuracy +0.101" in said
    assert "Worse than fedavg: worse, accuracy -0.099" in said
    assert "For comparison joined (all rows in one place, an upper bound): accuracy 0.821" in said
    assert "For comparison ensemble (no model for clients)" in said


def test_without_a_decided_difference_the_reference_stays_and_seeds_are_counted() -> None:
    found = judged([*FEDAVG, *of("aligned", raised(0, WIDE), [0.9, 1.2, 1.15])])
    assert (found.recommended.name, found.standings[1].judgement) == ("fedavg", "undecided")
    assert lead(found) == "Keep fedavg: nothing is better beyond noise with 3 seeds."
    said = " ".join(sentences(found))
    # Differences of accuracy 0.03, -0.03, 0.01: mean 0.00333, half of the interval 0.0759.
    assert "shows from 0.076 on" in said
    assert "aligned, accuracy +0.003 [-0.073, +0.079], more than 100 seeds would decide it" in said
    few = judged([*FEDAVG, *of("aligned", raised(0.02, WIDE), [0.9, 1.2, 1.15])])
    assert f"about {few.standings[1].against['accuracy'].seeds_needed} seeds" in " ".join(sentences(few))


def test_one_seed_decides_nothing() -> None:
    rows = [own for own in [*FEDAVG, *other("aligned", 0.1, 0.2)] if own["seed"] == 0]
    found = judged(rows)
    assert found.recommended.name == "fedavg"
    assert lead(found).startswith("Undecided: one seed")
    assert "there is nothing to compare it with" in lead(judged(FEDAVG))


def test_of_strategies_within_noise_the_cheapest_is_recommended() -> None:
    rows = [*FEDAVG, *of("exact", raised(0.05), [0.70, 0.82, 0.90], size=5e6)]
    rows += of("fit_head", raised(0.05, WIDE), [0.72, 0.81, 0.91], size=2e6)
    found = judged(rows)
    assert (found.best.name, found.recommended.name) == ("exact", "fit_head")
    said = " ".join(sentences(found))
    assert "fit_head is within noise of exact" in said
    assert "4.000 MB, 4 requests; fedavg 2.000 MB (2 times), 4" in said
    # The reference is not within noise, and a strategy that costs as much is no reason to change.
    same = [{**own, "value": 5e6} if own["metric"].startswith("bytes") else own for own in rows]
    assert judged(same).recommended.name == "exact"


def test_macro_f1_beside_accuracy_can_decide() -> None:
    rows = [*FEDAVG, *of("fit_head", raised(0, WIDE), [0.95, 1.2, 1.15])]
    assert judged(rows).recommended.name == "fedavg"
    rows += levels("fedavg", {"macro_f1": BASE}) + levels("fit_head", {"macro_f1": raised(0.178)})
    found = judged(rows)
    assert (found.judged, found.recommended.name) == (["accuracy", "macro_f1", "loss"], "fit_head")
    assert lead(found).startswith("Use fit_head: macro F1 0.699, fedavg 0.520 (+0.179")


def test_a_gain_in_one_metric_and_a_loss_in_another_is_no_recommendation() -> None:
    found = judged([*FEDAVG, *other("aligned", -0.1, 0.2)])
    assert found.recommended.name == "fedavg"
    assert "Better than fedavg in one metric and worse in another: aligned, accuracy -0.099" in " ".join(
        sentences(found)
    )


@pytest.mark.parametrize(
    ("names", "kinds", "expected"),
    [
        (["a", "fedavg"], {}, "fedavg"),
        (["a", "b"], {}, "a"),
        (["joined", "a"], {}, "a"),
        (["x", "a"], {"x": "joined"}, "a"),
        (["x", "a"], {"x": "head_only"}, "x"),
        (["nan", "a"], {}, "a"),
    ],
)
def test_without_fedavg_the_first_strategy_is_the_reference(
    names: list[str], kinds: dict[str, str], expected: str
) -> None:
    rows = [own for name in names for own in of(name, BASE, [math.nan if name == "nan" else 1.0] * 3)]
    about = [strategy(name, kind=kind) for name, kind in kinds.items()]
    assert judged(rows, *about).reference.name == expected


def test_the_last_round_counts_by_strategy_and_the_last_of_repeated_rows() -> None:
    rows = [row("fedavg", 0, 0.3), row("fedavg", 0, 0.5, round=2), row("fedavg", 0, 0.6, round=2)]
    rows += [row("head_only", 0, 0.4, round=0), row("head_only", 1, None, round=0)]
    fedavg, head = judged(rows).standings
    assert (fedavg.values, fedavg.seeds) == ({"accuracy": {0: 0.6}}, 1)
    assert head.values["accuracy"][0] == 0.4
    assert math.isnan(head.values["accuracy"][1])


def test_the_worst_client_is_the_mean_over_seeds_of_the_lowest() -> None:
    clients = [[0.2, 0.4, 0.9], [0.5, 0.1, 0.9]]
    rows = [
        row("fedavg", seed, value, scope=f"client:{client}", **more)
        for seed, own in enumerate(clients)
        for client, value in enumerate(own)
        for more in ({}, {"round": 0}, {"metric": "train-loss"})
    ]
    found = judged([*FEDAVG, *rows])
    assert found.recommended.worst == pytest.approx(0.15)
    assert any("accuracy 0.150" in said for said in sentences(found) if said.startswith("Worst client"))
    perplexity = [{**own, "metric": own["metric"].replace("accuracy", "perplexity")} for own in rows]
    levelled = levels("fedavg", {"perplexity": BASE})
    assert judged([*levelled, *perplexity]).recommended.worst == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("accuracy", "macro_f1", "learned"),
    [(0.605, 0.26, False), (0.63, 0.26, True), (0.605, 0.35, True), (0.3, 0.1, False)],
)
def test_naming_the_most_frequent_class_is_no_learning(
    accuracy: float, macro_f1: float, learned: bool
) -> None:
    """Of three classes, the first has a share of 0.6, and by itself a macro F1 of 0.75 / 3."""
    seeds = {str(n): {"counts": [[4, 3, 1], [2, 0, 0]]} for n in (0, 1)}
    partitions = {"main": {"label_names": ["a", "b", "c"], "seeds": seeds}}
    values = {"accuracy": [accuracy] * 2, "macro_f1": [macro_f1] * 2}
    found = judged(levels("fedavg", values), partitions=partitions)
    assert (found.most_frequent, found.learned) == (pytest.approx(0.6), learned)
    assert lead(found).startswith("Nothing was learned") is not learned
    assert judged(levels("fedavg", values)).learned
    one = {"main": {"label_names": [], "seeds": {"0": {"counts": [[4], [2]]}}}}
    assert judged(levels("fedavg", values), partitions=one).learned


def test_experiments_come_in_the_order_of_the_configuration() -> None:
    rows = [row("fedavg", 0, 0.5, experiment=name) for name in ("c", "a")]
    run = replace(run_of(rows), experiments=[{"name": name} for name in "ab"])
    assert [found.experiment for found in verdicts_of(run)] == ["a", "c"]
    assert verdict(run, "b") is None
