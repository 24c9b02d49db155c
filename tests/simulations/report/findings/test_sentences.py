"""Whether alignment helped, in sentences."""

from __future__ import annotations

from typing import Any

import pytest

from fedrot.simulations.report.findings.sentences import (
    WORDS,
    doubts,
    dropped,
    failed,
    idle_layers,
    verdicts,
)
from fedrot.simulations.report.summaries import results

#: Accuracy and loss of the arm plain, by seed.
PLAIN = [(0.50, 1.00), (0.52, 1.10), (0.54, 1.20)]


def rows(aligned: list[tuple[float, float]], setting: str = "one", arm: str = "aligned") -> list[Any]:
    """Rows of both arms: ``aligned`` are the values of the other arm, by seed."""
    return [
        {
            "setting": setting,
            "start": "same",
            "arm": name,
            "seed": seed,
            "round": 1,
            "scope": "central",
            "metric": metric,
            "value": value,
        }
        for name, values in (("plain", PLAIN[: len(aligned)]), (arm, aligned))
        for seed, pair in enumerate(values)
        for metric, value in zip(("accuracy", "loss"), pair, strict=True)
    ]


def moved(accuracy: float, loss: float, wobble: float = 0.001) -> list[tuple[float, float]]:
    """Return plain's values, moved; the difference wobbles by seed."""
    return [(a + accuracy + wobble * n, b + loss + wobble * n) for n, (a, b) in enumerate(PLAIN)]


@pytest.mark.parametrize(
    ("aligned", "effect"),
    [
        (moved(0.1, -0.3), "helped ("),
        (moved(0.1, 0.0, 0.03), "helped ("),
        (moved(-0.1, 0.3), "hurt ("),
        (moved(0.1, 0.3), "helped in one metric and hurt in another"),
        ([(0.53, 0.9), (0.49, 1.2), (0.55, 1.15)], "made no difference within noise ("),
        (PLAIN, "changed nothing: the model is that of plain"),
        ([(a, b + 1e-9) for a, b in PLAIN], "changed nothing but rounding"),
        ([(0.6, float("nan"))] * 3, "cannot be judged: values are not finite"),
        ([(float("nan"), float("nan"))] * 3, "cannot be judged: values are not finite"),
        ([(0.6, 0.7)], "cannot be judged with one seed"),
        ([(a + 0.125, b) for a, b in PLAIN], "cannot be judged: all seeds have the same difference"),
    ],
)
def test_the_effect_follows_from_both_intervals(aligned: list[tuple[float, float]], effect: str) -> None:
    (said,) = verdicts(rows(aligned))
    assert said.startswith(f"one, start same: alignment {effect}"), said


@pytest.mark.parametrize(
    ("aligned", "expected"),
    [
        (moved(0.1, -0.3), []),
        (moved(-0.1, -0.3), ["aligned hurt against plain: accuracy -0.099 [-0.101, -0.097] worse"]),
        (
            [(a, b + 1e-9) for a, b in PLAIN],
            [
                "aligned gave exactly the values of plain: accuracy",
                "aligned gave the values of plain, but for rounding: loss",
            ],
        ),
        (
            [(a + d, b - 0.1 - d) for (a, b), d in zip(PLAIN, (0.03, -0.03, 0.01), strict=True)],
            [
                "aligned cannot be told from plain with these seeds: accuracy "
                "+0.003 [-0.073, +0.079] within noise of 0.076",
            ],
        ),
        (
            [(float("inf"), b - 0.1 - a / 10) for a, b in PLAIN],
            ["aligned or plain diverged: accuracy"],
        ),
    ],
)
def test_arms_without_a_gain_are_named(aligned: list[tuple[float, float]], expected: list[str]) -> None:
    said = doubts(results(rows(aligned)))
    assert said == [f"one, start same: {sentence}." for sentence in expected]


def test_metrics_of_one_verdict_share_a_sentence() -> None:
    same = [*rows(PLAIN), *rows(PLAIN, arm="ffn")]
    assert doubts(results(same)) == [
        f"one, start same: {arm} gave exactly the values of plain: accuracy, loss."
        for arm in ("aligned", "ffn")
    ]


def test_a_sentence_has_the_numbers() -> None:
    (said,) = verdicts(rows(moved(0.1, -0.3)))
    assert "accuracy 0.520 → 0.621, +0.101 [+0.099, +0.103] better" in said
    assert said.endswith("loss 1.100 → 0.801, -0.299 [-0.301, -0.297] better).")


def test_no_difference_is_said_beside_the_smallest_that_would_have_shown() -> None:
    (said,) = verdicts(rows([(0.53, 0.9), (0.49, 1.2), (0.55, 1.15)]))
    # Differences 0.03, -0.03, 0.01: sd 0.030551; t(0.975, 2) = 4.302653.
    assert "+0.003 [-0.073, +0.079] within noise of 0.076; loss" in said


def test_every_setting_has_a_sentence_and_other_arms_have_none() -> None:
    found = verdicts([*rows(PLAIN), *rows(moved(0.1, 0), "two"), *rows(PLAIN, "three", arm="ffn")])
    assert [sentence.partition(",")[0] for sentence in found[1:]] == ["one", "two"]
    assert found[0].startswith("Alignment in 2 settings and starts: in 1 it changed nothing")
    assert found[0].endswith("in 1 it helped.")
    assert verdicts([row for row in rows(PLAIN) if row["arm"] == "aligned"]) == []


def test_the_words_are_those_of_arms_and_starts() -> None:
    from typing import get_args

    from fedrot.simulations.arm import Arm
    from fedrot.simulations.config import Start

    assert set(get_args(Start)) <= WORDS.keys()
    for word in WORDS.keys() - set(get_args(Start)):
        assert Arm.parse(word).name == word


def lost(count: float, round: int, **more: Any) -> dict[str, Any]:
    about = {"setting": "one", "start": "same", "arm": "aligned", "seed": 0, "scope": "alignment"}
    return {**about, "round": round, "metric": "fedrot-replies-failed", "value": count, **more}


def test_lost_replies_are_added_up_over_rounds_and_seeds() -> None:
    rows = [
        lost(2, 1),
        lost(3, 2, seed=1),
        lost(0, 3),
        lost(4, 1, metric="fedrot-replies-dropped"),
        lost(1, 1, arm="plain"),
        lost(1, 1, start="scrambled"),
        lost(0, 1, arm="whole"),
    ]
    assert failed(rows) == [
        f"one, start {start}: {arm} was run without {count} replies of failed clients, over all "
        "rounds and seeds."
        for start, arm, count in (
            ("same", "aligned", 5),
            ("same", "plain", 1),
            ("scrambled", "aligned", 1),
        )
    ]


def measured(layer: int, found: float, chance: float | None, **more: Any) -> dict[str, Any]:
    about = {"setting": "one", "start": "same", "arm": "aligned", "part": "ffn", "round": 1}
    given = {"found": found, "chance": chance, "moved": 0}
    return {**about, "layer": layer, "before": 1.0, "after": 1 - found, **given, **more}


def test_layers_are_idle_up_to_chance_or_one_percent() -> None:
    known = [measured(0, 0.05, 0.05), measured(2, 0.051, 0.05), measured(1, 0.04, 0.05)]
    removed = [measured(n, found, None, part="attention") for n, found in enumerate((0.009, 0.011, 0))]
    assert idle_layers([*known, *removed]) == [
        "one, start same: aligned found no more than chance by ffn in layer 0 (5 %, chance 5 %), "
        "1 (4 %, chance 5 %).",
        "one, start same: aligned removed less than 1 % of the squared distance by attention in layer "
        "0 (0.9 %), 2 (0 %).",
    ]


def test_groups_of_no_layer_are_those_of_the_whole_model() -> None:
    assert idle_layers([measured(-1, 0.03, 0.05, part="residual")]) == [
        "one, start same: aligned found no more than chance by residual in the whole model "
        "(3 %, chance 5 %).",
    ]


def own_models(values: dict[str, list[float | None]], round_: int = 1, start: str = "same") -> list[Any]:
    return [
        {**rows(PLAIN)[0], "scope": f"alone:{client}", "metric": metric, "value": value}
        | {"round": round_, "start": start}
        for metric, own in values.items()
        for client, value in enumerate(own)
    ]


def test_after_one_round_the_clients_own_models_are_a_yardstick() -> None:
    own = own_models({"accuracy": [0.3, 0.4], "loss": [2.0, 4.0], "ece": [0.1]})
    said = verdicts([*rows(moved(0.1, -0.3)), *own, *own_models({"loss": [9.0]}, start="other")])
    alone = "a client's own model alone has accuracy 0.350, loss 3.000 (mean of clients and seeds)."
    assert said[1] == f"one, start same: {alone}"
    assert "alignment helped" in said[0]
    several = verdicts([*rows(moved(0.1, -0.3)), *own_models({"loss": [2.0]}, round_=2)])
    diverged = verdicts([*rows(moved(0.1, -0.3)), *own_models({"loss": [None]})])
    assert len(said) == 2
    assert [len(several), len(diverged)] == [1, 1]


def test_dropped_replies_are_counted_by_arm_and_reason() -> None:
    lost = {"setting": "", "arm": "aligned", "dropped": "not finite"}
    lines = [lost, measured(0, 0.1, None), lost, {**lost, "dropped": "too late"}, {**lost, "arm": "ffn"}]
    assert dropped(lines) == [
        "this run: aligned dropped a reply 2 time(s): not finite",
        "this run: aligned dropped a reply 1 time(s): too late",
        "this run: ffn dropped a reply 1 time(s): not finite",
    ]


def test_arms_without_a_seed_in_common_cannot_be_judged() -> None:
    apart = [{**row, "seed": row["seed"] + 10 * (row["arm"] == "aligned")} for row in rows(PLAIN)]
    assert verdicts(apart) == ["one, start same: alignment cannot be judged: no seed is in both arms."]


def test_a_setting_is_judged_by_its_own_headline() -> None:
    def as_f1(found: list[Any]) -> list[Any]:
        return [{**row, "metric": "macro_f1"} for row in found if row["metric"] == "accuracy"]

    better, worse = rows(moved(0.1, -0.3)), rows(moved(-0.1, 0))
    other = [row for row in rows(moved(0.1, -0.3), "two") if row["metric"] == "loss"]
    other += as_f1(rows(moved(0.1, -0.3), "two"))
    _, one, two = verdicts([*better, *as_f1(worse), *other])
    assert "alignment helped" in one
    assert "macro_f1" not in one
    assert "macro_f1" in two


def test_beside_alignment_the_arm_that_lowers_the_loss_most_is_named() -> None:
    arms = {"plain+task-head": moved(0.2, -0.5), "plain/regmean": moved(0.1, -0.3)}
    arms |= {"ensemble-probabilities": moved(0.3, -0.6), "ffn": moved(0.1, 0.2)}
    others = [row for arm, values in arms.items() for row in rows(values, arm=arm) if row["arm"] == arm]
    said = verdicts([*rows(PLAIN), *others])
    assert [sentence.split(" (")[0] for sentence in said] == [
        "one, start same: alignment changed nothing: the model is that of plain",
        "one, start same: plain+task-head helped",
    ]
    assert "accuracy 0.520 → 0.721, +0.201" in said[1]
    # Without the arm of the defaults, and where nothing helped, there is no such sentence.
    assert verdicts([*rows(PLAIN, arm="ffn"), *others]) == []
    assert len(verdicts([*rows(PLAIN), *rows(moved(0, 0.2), arm="ffn")])) == 1
