"""Summaries and paired intervals against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from fedrot.simulations.config import TaskName
from fedrot.simulations.report.summaries import (
    Paired,
    Place,
    compare_seeds,
    described,
    final_values,
    headline,
    metrics_in,
    paired_difference,
    results,
)
from fedrot.simulations.report.tables import format_difference, number_style
from fedrot.simulations.tasks.objectives import OBJECTIVES
from fedrot.simulations.tasks.scores import _CLASSIFICATION, _REGRESSION


def row(arm: str, seed: int, value: float, round: int = 3, **more: object) -> dict[str, object]:
    given = {"arm": arm, "start": "same", "seed": seed, "round": round, "metric": "accuracy"}
    return {**given, "value": value, "scope": "central", **more}


def paired(rows: list[dict[str, object]], arm: str, baseline: str, metric: str) -> Paired:
    """Compare two arms of the one setting and start."""
    values = final_values(rows)
    ours, theirs = (values.get(Place("", "same", name, metric), {}) for name in (arm, baseline))
    return compare_seeds(ours, theirs, metric)


ROWS = [
    *(row("plain", seed, value) for seed, value in enumerate((0.60, 0.62, 0.61))),
    *(row("aligned", seed, value) for seed, value in enumerate((0.63, 0.64, 0.65))),
    row("plain", 0, 0.10, round=1),
    row("plain", 0, 0.99, scope="client:0"),
]


def test_summary_takes_the_final_round_and_the_central_scope() -> None:
    plain, aligned = results(ROWS)
    assert (plain.place.arm, plain.n, plain.place.setting) == ("plain", 3, "")
    assert plain.mean == pytest.approx(0.61)
    assert plain.sd == pytest.approx(0.01)
    assert aligned.mean == pytest.approx(0.64)


def test_one_seed_has_no_spread() -> None:
    (only,) = results([row("plain", 0, 0.5)])
    assert (only.n, only.mean) == (1, 0.5)
    assert math.isnan(only.sd)


def test_an_unfinished_seed_is_left_out() -> None:
    rows = [row("plain", 0, 0.5), row("plain", 1, 0.1, round=2), row("aligned", 0, 0.2, round=2)]
    (only,) = results(rows)
    assert (only.place.arm, only.n, only.mean) == ("plain", 1, 0.5)


def test_settings_have_their_own_final_round() -> None:
    rows = [row("plain", 0, 0.5, round=1, setting="one-shot"), row("plain", 0, 0.6, setting="many")]
    assert [(found.place.setting, found.mean) for found in results(rows)] == [
        ("one-shot", 0.5),
        ("many", 0.6),
    ]
    assert {place.setting: values for place, values in final_values(rows).items()} == {
        "one-shot": {0: 0.5},
        "many": {0: 0.6},
    }


def test_metrics_keep_their_order_with_the_loss_last() -> None:
    rows = [row("plain", 0, 1.0, metric=metric) for metric in ("loss", "matthews", "accuracy")]
    assert metrics_in(rows) == ["matthews", "accuracy", "loss"]
    assert headline(rows) == ["matthews", "loss"]
    assert headline([row("plain", 0, 1.0, setting="s", metric="f1"), *rows]) == [
        "f1",
        "matthews",
        "loss",
    ]


def test_the_interval_by_hand() -> None:
    found = paired(ROWS, "aligned", "plain", "accuracy")
    # Differences 0.03, 0.02, 0.04: mean 0.03, sd 0.01; t(0.975, 2) = 4.302653 from a printed table.
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert found.mean == pytest.approx(0.03)
    assert (found.ci_low, found.ci_high) == pytest.approx((0.03 - half, 0.03 + half), abs=1e-7)
    assert (found.n, found.verdict) == (3, "better")
    # With two degrees of freedom, p = 1 - t / sqrt(t^2 + 2); t^2 is 0.03^2 / (0.01^2 / 3) = 27.
    assert found.p == pytest.approx(1 - math.sqrt(27 / 29))
    assert paired_difference([0.1, -0.1, 0.1, -0.1]).p == pytest.approx(1)
    assert [paired_difference([same] * 2).p for same in (0.0, 1e-8)] == [1, 1]


def test_only_common_seeds_are_paired() -> None:
    rows = [row("plain", 0, 0.5), row("plain", 1, 0.9), row("aligned", 0, 0.6), row("aligned", 2, 0.1)]
    found = paired(rows, "aligned", "plain", "accuracy")
    assert (found.n, found.verdict) == (1, "one seed: no interval")
    assert found.mean == pytest.approx(0.1)
    assert math.isnan(found.ci_low)
    none = paired(rows, "absent", "plain", "accuracy")
    assert (none.n, none.verdict) == (0, "no seed in common")


@pytest.mark.parametrize(
    ("differences", "lower_is_better", "verdict"),
    [
        ([0.1, 0.11, 0.12], False, "better"),
        ([0.1, 0.11, 0.12], True, "worse"),
        ([-0.1, -0.11, -0.12], True, "better"),
        ([-0.1, -0.11, -0.12], False, "worse"),
        ([0.1, -0.11, 0.12], False, "within noise"),
        ([0.0, 0.0, 0.0], False, "identical"),
        ([2e-8, 2.1e-8, 2.2e-8], True, "equal but for rounding"),
        ([2e-6, 2.1e-6, 2.2e-6], True, "worse"),
        ([0.0], False, "identical"),
        ([-2e-8], False, "equal but for rounding"),
        ([0.1, 0.1, 0.1], False, "no spread: no interval"),
        ([0.0, math.nan], False, "not finite"),
        ([math.inf, 1.0], True, "not finite"),
    ],
)
def test_verdicts_know_the_direction(
    differences: list[float], lower_is_better: bool, verdict: str
) -> None:
    assert paired_difference(differences, lower_is_better=lower_is_better).verdict == verdict


LOWER = ("loss", "calibrated_loss", "ece", "perplexity", "pseudo_perplexity")
HIGHER = (
    *("accuracy", "macro_f1", "micro_f1", "f1", "matthews", "pearson", "spearman"),
    *("precision", "recall"),
)


@pytest.mark.parametrize("metric", [*LOWER, *HIGHER])
def test_which_metrics_are_better_where_they_are_lower(metric: str) -> None:
    rows = [
        row(arm, seed, level * (1 + seed / 1000), metric=metric)
        for arm, level in (("plain", 1.0), ("aligned", 0.9))
        for seed in range(3)
    ]
    down, up = ("better", "worse") if metric in LOWER else ("worse", "better")
    assert paired(rows, "aligned", "plain", metric).verdict == down
    assert paired(rows, "plain", "aligned", metric).verdict == up


@pytest.mark.parametrize("task", OBJECTIVES)
def test_every_metric_of_every_task_has_a_direction(task: TaskName) -> None:
    metrics = getattr(OBJECTIVES[task], "metrics", None)
    known = metrics if metrics is not None else (*_CLASSIFICATION, *_REGRESSION)
    assert known
    assert {*known} <= {*LOWER, *HIGHER}


def test_a_round_ends_when_its_model_is_evaluated() -> None:
    """A run killed in its fourth round: its clients have reported, the server has not."""
    rows = [row("plain", seed, 0.5) for seed in range(2)]
    rows += [
        row("plain", 0, 0.9, round=4, scope=scope) for scope in ("client:0", "alone:1", "alignment")
    ]
    (only,) = results(rows)
    assert (only.n, only.mean) == (2, 0.5)
    assert metrics_in([*rows, row("plain", 0, 1.0, metric="train-loss", scope="client:0")]) == [
        "accuracy"
    ]


@pytest.mark.parametrize("difference", [0.25, -1 / 400])
def test_seeds_that_differ_alike_have_no_interval(difference: float) -> None:
    """Two seeds with one difference, as accuracies of few rows may have, would have p = 0."""
    found = paired_difference([difference, difference])
    assert (found.verdict, found.mean) == ("no spread: no interval", difference)
    assert math.isnan(found.p)
    assert math.isnan(found.ci_low)


def test_an_interval_that_excludes_0_does_not_look_like_0() -> None:
    found = paired_difference([2.0e-4, 2.1e-4, 2.2e-4])
    assert format_difference(found) == "+0.00021 [+0.00019, +0.00023] better"
    assert format_difference(paired_difference([0.1, 0.101, 0.102])) == "+0.101 [+0.099, +0.103] better"


def test_an_interval_around_0_may_look_like_it() -> None:
    found = paired_difference([2.0e-4, 3.0e-4, -1.0e-4])
    assert format_difference(found) == "+0.000 [-0.000, +0.001] within noise of 0.001"


def test_numbers_from_a_million_on_have_an_exponent() -> None:
    assert [format(x, number_style(x)) for x in (999_999.4, 1e6, 2.5e6)] == [
        "999999",
        "1e+06",
        "2.5e+06",
    ]


@pytest.mark.parametrize(
    ("unit", "metrics"),
    [
        ("nats", ("loss", "calibrated_loss")),
        ("from 1 up", ("perplexity", "pseudo_perplexity")),
        ("-1 to 1", ("matthews", "pearson", "spearman")),
        ("0 to 1", ("accuracy", "macro_f1", "micro_f1", "f1", "precision", "recall")),
        ("expected calibration error, 0 to 1", ("ece",)),
    ],
)
def test_a_metric_is_described_by_unit_and_direction(unit: str, metrics: tuple[str, ...]) -> None:
    for metric in metrics:
        better = "lower" if metric in LOWER else "higher"
        assert described(metric) == f"{metric} ({unit}, {better} is better)"


def test_of_repeated_rows_the_last_one_counts_and_values_may_be_nan() -> None:
    rows = [row("plain", 0, 0.5), row("plain", 1, math.nan), row("plain", 0, 0.7)]
    (values,) = final_values(rows).values()
    assert values[0] == 0.7
    assert math.isnan(values[1])
