"""The figures of a round: their documentation and their values."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

import fedrot
from fedrot.report import AlignmentReport, GroupReport
from fedrot.strategies import FedRot
from fedrot.strategies.reporting.verdict import CHANCE, FOUND, empty_rounds
from fedrot.strategies.round.record import FIGURES, RoundRecord
from fedrot.strategies.settings import Server
from fedrot.symmetry.moves import Move, apply_moves
from tests.models import HEADS, LAYERS, NEURONS, State, config_of, near
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import ALL_METRICS, Client, broadcast, failure, reply

CONFIG = config_of(NAME)
PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"


def _documented(column: int | None = None, cell: str = "") -> list[str]:
    """Return the names in the page's table; only those with ``cell`` in a column, if one is given."""
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row) > 1 and row[1].startswith(" `fedrot-")]
    return [row[1].strip(" `") for row in rows if column is None or row[column].strip() == cell]


def _default() -> list[str]:
    return _documented(-3, "yes")


def _losses() -> list[str]:
    return _documented(-2, "if not 0")


def _play(strategy: FedRot, updates: list[State], *others: Client) -> dict[str, Any]:
    messages = broadcast(strategy, state(), len(updates) + len(others))
    replies = [reply(m, u, 10, i) for i, (m, u) in enumerate(zip(messages, updates, strict=False))]
    answers = (other(m) for other, m in zip(others, messages[len(updates) :], strict=True))
    replies += [answer for answer in answers if answer is not None]
    _, metrics = strategy.aggregate_train(1, replies)
    return dict(metrics or {})


def test_the_page_s_table_has_every_figure() -> None:
    assert _documented() == list(FIGURES)
    assert _default() == [name for name, figure in FIGURES.items() if figure.default]
    assert _losses() == [name for name, figure in FIGURES.items() if figure.loss]


def test_a_round_s_metrics_are_those_of_the_page() -> None:
    names, updates = _documented(), [near(state(), 0.05, i) for i in range(2)]
    assert len(names) == len(set(names)) > 15
    for reporting, expected in ((ALL_METRICS, names), (None, _default())):
        metrics = _play(FedRot(CONFIG, reporting=reporting), updates)
        assert [name for name in metrics if name.startswith("fedrot-")] == expected
    assert len(_default()) <= 6


def test_shares_are_found_whether_or_not_the_groups_are_moved() -> None:
    """Noise leaves all groups in place, where found may be a bound; asked to, all of them move."""
    updates, found = [near(state(), 0.05, i + 1) for i in range(3)], []
    for chance in (1.5, 0.0):
        options = fedrot.AlignmentOptions(chance=chance)
        metrics = _play(
            FedRot(CONFIG, alignment=replace(options, anchor="global"), reporting=ALL_METRICS), updates
        )
        found.append([metrics[f"fedrot-share-{name}"] for name in ("found", "chance", "rotation")])
        assert metrics["fedrot-groups-moved"] == (0 if chance else 3 * 2 * LAYERS)
        reports = [fedrot.align(client, state(), SYMMETRY, options).report for client in updates]
        groups = [group for report in reports for group in report.groups]
        before = sum(group.before for group in groups)
        expected = sum(g.found for g in groups) / before, sum(g.chance or 0 for g in groups) / before
        assert tuple(found[-1][:2]) == pytest.approx(expected)
    (bound, left, nothing), (best, chance, moved) = found
    assert nothing == 0 < moved == pytest.approx(best)
    assert best <= bound < 1.5 * chance
    assert left == pytest.approx(chance)


def test_without_alignment_only_what_went_wrong_is_reported_under_the_page_s_names() -> None:
    whole = near(state(), 0.05, 0)

    def bare(message: Message) -> Message:
        return reply(message, {}, 10, 2)

    metrics = _play(FedRot(alignment=None, server=Server(min_replies=2)), [whole], bare, failure)
    expected = {"replies-dropped": 1, "replies-failed": 1, "round-failed": 1}
    ours = {name: value for name, value in metrics.items() if name.startswith("fedrot-")}
    assert ours == {f"fedrot-{name}": value for name, value in expected.items()}
    assert ours.keys() <= set(_losses())


def test_heads_and_neurons_count_once_however_many_clients_moved_them() -> None:
    """Each client's first layer was moved in one head and two neurons, some of them the same."""
    eye = torch.eye(8).repeat(HEADS, 1, 1)
    groups = {g.name.rpartition(".")[2]: g for g in SYMMETRY.groups if g.layer == 0}

    def moved(part: str, head: int, neuron: int) -> State:
        turn, order = eye.clone(), torch.arange(NEURONS)
        turn[head] = turn[head].flip(0)
        order[[neuron, neuron + 1]] = order[[neuron + 1, neuron]]
        return apply_moves(state(), [Move(groups[part], turn), Move(groups["ffn"], order)])

    sent = [moved("qk", 0, 5), moved("vo", 0, 6), moved("vo", 2, 5)]
    metrics = _play(
        FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor="global"), reporting=ALL_METRICS), sent
    )
    assert (metrics["fedrot-heads-rotated"], metrics["fedrot-neurons-moved"]) == (2, 3)


def test_what_is_moved_in_every_client_is_no_more_than_the_model_has() -> None:
    whole = fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)
    sent = []
    for _ in range(3):
        moves = [
            Move(group, torch.roll(torch.arange(group.kind.units), 1))
            for group in SYMMETRY.groups
            if group.part in ("heads", "ffn", "residual")
        ]
        sent.append(apply_moves(state(), moves))
    metrics = _play(
        FedRot(CONFIG, alignment=replace(whole, anchor="global"), reporting=ALL_METRICS), sent
    )
    width = state()["classifier.weight"].shape[1]
    found = [metrics[f"fedrot-{name}"] for name in ("heads-moved", "neurons-moved", "stream-moved")]
    assert found == [LAYERS * HEADS, LAYERS * NEURONS, width]


def _reported(before: float, removed: float, chance: float | None) -> AlignmentReport:
    """Return the report of one group that was moved."""
    left = before - removed
    group = GroupReport("g", 0, "attention", before, left, 1, 4, found=removed, chance=chance)
    return AlignmentReport((group,), before, left, 0.1)


def test_what_is_found_is_of_the_replies_whose_chance_is_known() -> None:
    this_round = RoundRecord(1)
    this_round.reports = [(0, _reported(100.0, 20.0, 6.0)), (1, _reported(1000.0, 900.0, None))]
    metrics = this_round.metrics()
    assert (metrics[FOUND], metrics[CHANCE]) == pytest.approx((0.2, 0.06))


def test_of_no_distance_chance_is_not_known() -> None:
    this_round = RoundRecord(1)
    this_round.reports = [(0, _reported(0.0, 0.0, 0.0))]
    metrics = this_round.metrics()
    assert metrics[FOUND] == 0
    assert CHANCE not in metrics


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.now = time.perf_counter()

    def perf_counter(self) -> float:
        return self.now


def test_waiting_and_aligning_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("fedrot.strategies.round.record.time", clock)

    def aligned(*given: Any) -> Any:
        clock.now += 5
        alignment = fedrot.align(*given)
        object.__setattr__(alignment.report, "seconds", 5.0)
        return alignment

    monkeypatch.setattr("fedrot.anchors.align", aligned)
    strategy = FedRot(CONFIG, reporting=ALL_METRICS)
    messages = broadcast(strategy, state(), 2)

    def slowly() -> Iterator[Message]:
        for index, message in enumerate(messages):
            clock.now += 100
            yield reply(message, near(state(), 0.05, index), 10, index)
        clock.now += 1000

    _, metrics = strategy.aggregate_train(1, slowly())
    assert metrics is not None
    found = {name: metrics[f"fedrot-seconds-{name}"] for name in ("waiting", "aligning", "round")}
    assert found == pytest.approx({"waiting": 1200, "aligning": 10, "round": 1210}, abs=5)


def test_a_lost_round_is_lost_whatever_its_aggregation_says() -> None:
    this_round = RoundRecord(1)
    this_round.accepted, this_round.said = 3, "3 adapters: this average is exact"
    this_round.lose("the aggregation is not finite")
    said = this_round.log_end(aligned=False)
    assert "not finite" in said
    assert "exact" not in said
    assert empty_rounds({1: said})
