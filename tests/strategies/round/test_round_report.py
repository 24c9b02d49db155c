"""The figures of a round: their documentation and their values."""

from dataclasses import replace
from pathlib import Path

import pytest

import fedrot
from fedrot.report import AlignmentReport, GroupReport
from fedrot.strategies import FedRot
from fedrot.strategies.reporting.verdict import CHANCE, FOUND, REMOVED, figures
from tests.models import LAYERS, config_of, near
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import aggregated

CONFIG = config_of(NAME)
PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"


def _documented():
    """Return the names in the page's table."""
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return [
        row[1].strip(" `")
        for row in rows
        if len(row) > 1 and row[1].startswith(" `fedrot-")
    ]


def _play(strategy, updates):
    return dict(aggregated(strategy, state(), updates)[1])


def test_a_round_s_metrics_are_those_of_the_page():
    metrics = _play(FedRot(CONFIG), [near(state(), 0.05, i) for i in range(2)])
    assert [name for name in metrics if name.startswith("fedrot-")] == _documented()


def test_shares_are_found_whether_or_not_the_groups_are_moved():
    """Noise leaves all groups in place, where found may be a bound; asked to, all of
    them move.
    """
    updates = [near(state(), 0.05, i + 1) for i in range(3)]
    found = []
    for chance in (1.5, 0.0):
        options = fedrot.AlignmentOptions(chance=chance)
        metrics = _play(
            FedRot(CONFIG, alignment=replace(options, anchor="global")), updates
        )
        found.append(
            [metrics[f"fedrot-share-{name}"] for name in ("found", "chance", "removed")]
        )
        assert metrics["fedrot-groups-moved"] == (0 if chance else 3 * 2 * LAYERS)
        reports = [
            fedrot.align(client, state(), SYMMETRY, options).report
            for client in updates
        ]
        groups = [group for report in reports for group in report.groups]
        heads = [g for g in groups if g.part == "attention"]
        before = sum(g.before for g in groups)
        expected = [sum(g.found for g in heads), sum(g.chance or 0 for g in heads)]
        own = sum(g.before for g in heads)
        removed = sum(g.before - g.after for g in groups) / before
        assert found[-1] == pytest.approx(
            [*(share / own for share in expected), removed]
        )
    (bound, left, nothing), (best, chance, moved) = found
    assert nothing == 0 < moved < best
    assert best <= bound < 1.5 * chance
    assert left == pytest.approx(chance)


def _reported(before, removed, chance):
    """Return the report of one group that was moved."""
    left = before - removed
    group = GroupReport(
        "g", 0, "attention", before, left, 1, 4, found=removed, chance=chance
    )
    return AlignmentReport((group,), before, left, 0.1)


def test_what_is_found_is_of_the_replies_whose_chance_is_known():
    metrics = figures([_reported(100.0, 20.0, 6.0), _reported(1000.0, 900.0, None)])
    assert (metrics[FOUND], metrics[CHANCE]) == pytest.approx((0.2, 0.06))
    # Of no distance, chance is not known.
    metrics = figures([_reported(0.0, 0.0, 0.0)])
    assert metrics[REMOVED] == 0
    assert not {FOUND, CHANCE} & metrics.keys()
