"""The verdict on a round, sentence by sentence, and the last lines of a run."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrot.report import AlignmentReport, GroupReport
from fedrot.strategies import FedRot
from fedrot.strategies.reporting.verdict import (
    ACCEPTED,
    CHANCE,
    DROPPED,
    FAILED,
    FOUND,
    MOVED,
    NOBODY,
    OFF,
    REMOVED,
    empty_rounds,
    run_lines,
    verdict,
)
from fedrot.strategies.settings import Checkpointing, OtherBasis, Reporting
from fedrot.symmetry.moves import Move, apply_moves
from tests.models import HEADS, State, near
from tests.strategies.classifier import SYMMETRY, build, permuted, state
from tests.strategies.fakes import ArrayRecord, FakeGrid, failure, reply

TURNED = "heads are rotated relative to each other"


def rows(
    part: str, *found: float, chance: float | None = 0.061, moved: int = 0, of: float = 100.0
) -> list[GroupReport]:
    """Return groups that are ``of`` away: the shares found, of which the first ``moved`` are removed."""
    return [
        GroupReport(
            *(f"{part} {index}", index, part, of, of * (1 - share * (index < moved))),
            *(int(index < moved), 4),
            found=of * share,
            chance=None if chance is None else of * chance,
        )
        for index, share in enumerate(found)
    ]


def report(*groups: GroupReport) -> AlignmentReport:
    before = sum(group.before for group in groups)
    removed = sum(group.before - group.after for group in groups)
    return AlignmentReport(groups, before, before - removed, 0.1)


def found(*reports: AlignmentReport, **about: Any) -> str:
    return verdict(reports, **{"accepted": len(reports), **about})


def test_clients_that_had_turned() -> None:
    client = report(*rows("attention", 0.2, 0.16, 0.08, 0.068, moved=3))
    assert found(*[client] * 4) == (
        "rotation 12.7 % of the distance, chance 6.1 %: heads are rotated relative to each other; "
        "12 of 16 groups moved"
    )


def test_shares_are_of_the_distance_of_all_clients() -> None:
    """A client ten times as far away counts ten times, and the feed-forward layers do not count."""
    near_by = report(*rows("attention", 0.3, moved=1), *rows("ffn", 0.0, chance=0.0))
    far = report(*rows("attention", 0.1, moved=1, of=1000.0), *rows("ffn", 0.0, chance=0.0, of=1000.0))
    assert found(near_by, far).startswith("rotation 11.8 % of the distance, chance 6.1 %: heads")


def test_nothing_beyond_chance() -> None:
    client = report(*rows("attention", 0.035, 0.035), *rows("ffn", 0.0, chance=0.0, of=0.0))
    assert found(client, client) == (
        "nothing beyond chance (rotation 3.5 %, chance 6.1 %): averaged as they are"
    )


def test_more_than_chance_and_less_than_is_required() -> None:
    assert found(report(*rows("attention", 0.07))) == (
        "too little beyond chance (rotation 7.0 %, chance 6.1 %): averaged as they are"
    )


def test_permutations_near_an_anchor_find_nothing_and_chance_neither() -> None:
    client = report(*rows("ffn", 0.0, chance=0.0), *rows("rescale", 0.0, chance=0.0))
    expected = "nothing beyond chance (permutation 0.0 %, chance 0.0 %): averaged as they are"
    assert found(client) == expected


def test_units_that_had_changed_places() -> None:
    client = report(*rows("ffn", 0.2, 0.0, chance=0.004, moved=1))
    assert found(client) == (
        "permutation 10.0 % of the distance, chance 0.4 %: units are in another order; "
        "1 of 2 groups moved"
    )


def test_every_movement_is_named_and_only_those_beyond_chance_are_a_cause() -> None:
    turned = rows("attention", 0.24, moved=1)
    scaled = rows("rescale", 0.001, chance=0.004, moved=1)
    client = report(*turned, *rows("heads", 0.2, chance=0.0, moved=1), *scaled)
    assert found(client) == (
        "rotation 24.0 % of the distance, chance 6.1 %; permutation 20.0 % of the distance, chance "
        "0.0 %; rescaling 0.1 % of the distance, chance 0.4 %: heads are rotated relative to each other "
        "and units are in another order; 3 of 3 groups moved"
    )


def test_a_group_moved_and_all_of_them_together_are_no_more_than_chance() -> None:
    assert found(report(*rows("attention", 0.12, 0.0, 0.0, moved=1))) == (
        "rotation 4.0 % of the distance, chance 6.1 %: no more than chance in all; 1 of 3 groups moved"
    )


def test_a_movement_whose_groups_stayed_is_no_cause() -> None:
    client = report(*rows("attention", 0.24), *rows("heads", 0.2, chance=0.0, moved=1))
    assert found(client) == (
        "rotation 24.0 % of the distance, chance 6.1 %; permutation 20.0 % of the distance, chance "
        "0.0 %: units are in another order; 1 of 2 groups moved"
    )


def test_as_much_as_chance_is_not_beyond_it() -> None:
    assert found(report(*rows("attention", 0.061))).startswith("nothing beyond chance (rotation 6.1 %")


def test_a_movement_that_finds_less_than_chance_is_named_even_if_it_finds_nothing() -> None:
    client = report(*rows("attention", 0.0), *rows("ffn", 0.2, chance=0.004, moved=1))
    assert found(client).startswith("rotation 0.0 % of the distance, chance 6.1 %; permutation 20.0 %")


def test_a_distance_that_has_grown_is_said() -> None:
    groups = rows("attention", -0.1, chance=None, moved=1)
    assert found(report(*groups), other_basis=1) == (
        "1 reply from another basis: rotation -10.0 % of the distance removed, chance not known; "
        "1 of 1 groups moved"
    )


def test_another_basis_has_no_chance() -> None:
    groups = [
        *rows("attention", 0.5, chance=None, moved=1),
        *rows("residual", 0.9, chance=None, moved=1),
    ]
    assert found(*[report(*groups)] * 3, other_basis=3) == (
        "3 replies from another basis: rotation 25.0 %, permutation 45.0 % of the distance removed, "
        "chance not known; 6 of 6 groups moved"
    )


def test_the_whole_model_has_no_chance() -> None:
    still = report(*rows("attention", 0.3, chance=None), *rows("residual", 0.0, chance=None))
    assert found(still) == "nothing removed, chance not known: averaged as they are"


@pytest.mark.parametrize(
    ("share", "moved", "beginning", "end"),
    [
        (0.127, 1, f"rotation 12.7 % of the distance, chance 6.1 %: {TURNED}", 3),
        (0.035, 0, "nothing beyond chance (rotation 3.5 %, chance 6.1 %)", 1),
    ],
)
def test_some_replies_from_another_basis(share: float, moved: int, beginning: str, end: int) -> None:
    ordinary = report(*rows("attention", share, moved=moved))
    other = report(*rows("attention", 0.5, chance=None, moved=1))
    assert found(ordinary, ordinary, other, other_basis=1) == (
        f"{beginning}; 1 reply from another basis: rotation 50.0 % of the distance removed, "
        f"chance not known; {end} of 3 groups moved"
    )


@pytest.mark.parametrize("groups", [[], rows("attention", 0.0, 0.0, of=0.0)])
def test_no_groups_or_no_distance(groups: list[GroupReport]) -> None:
    assert found(report(*groups)) == "nothing to align: averaged as they are"


def test_alignment_off() -> None:
    assert found(accepted=3, aligned=False) == "alignment is off: averaged as they are"


@pytest.mark.parametrize("aligned", [True, False])
def test_rounds_without_a_model(aligned: bool) -> None:
    assert found(accepted=0, aligned=aligned, lost="0 good replies, 1 needed.") == (
        "no reply accepted: the model stays as it was"
    )
    assert found(accepted=1, aligned=aligned, lost="1 good reply, 2 needed.") == (
        "no new model: 1 good reply, 2 needed"
    )


# --- the run -----------------------------------------------------------------------------------------


def figures(moved: int, dropped: int = 0) -> dict[str, float]:
    return {FOUND: 0.1, CHANCE: 0.05, MOVED: moved, DROPPED: dropped}


def test_the_last_lines_of_a_run() -> None:
    rounds = {1: figures(12, 1), 2: figures(3, 2), 10: figures(0)}
    verdicts = {1: f"rotation 12.7 %: {TURNED}", 2: "said only once", 10: "nothing beyond chance"}
    assert run_lines(rounds, verdicts, Path("runs/a.jsonl")) == [
        "Alignment moved groups in 2 of 3 rounds.",
        "Round 1: rotation 12.7 %: heads are rotated relative to each other.",
        "Round 10: nothing beyond chance.",
        "3 replies were dropped, in 2 rounds.",
        "Rows of the rounds: 'runs/a.jsonl'. A page of them: fedrot report 'runs/a.jsonl'",
    ]


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ({}, []),
        (
            {1: figures(5)},
            ["Alignment moved groups in 1 of 1 round.", "Round 1: verdict."],
        ),
        (
            {1: figures(0), 2: figures(0)},
            ["Alignment moved nothing in 2 rounds.", "Round 1: verdict.", "Round 2: verdict."],
        ),
        (
            {1: {"loss": 0.5}, 2: {DROPPED: 1}},
            ["Round 1: verdict.", "Round 2: verdict.", "1 reply was dropped, in 1 round."],
        ),
    ],
)
def test_short_runs(rounds: dict[int, dict[str, float]], expected: list[str]) -> None:
    assert run_lines(rounds, dict.fromkeys(rounds, "verdict")) == expected


def test_rounds_without_a_model_are_counted() -> None:
    verdicts = {9: NOBODY, 7: "no new model: 1 good reply, 2 needed", 4: OFF, 5: "verdict"}
    assert empty_rounds(verdicts).startswith("No new model in 2 of 4 rounds, the first is round 7: ")
    assert empty_rounds({1: OFF, 2: "verdict"}) == ""


def turned(client: int) -> State:
    """Return a trained state whose first heads were turned, by another angle at every client."""
    group = next(g for g in SYMMETRY.groups if g.part == "attention")
    turn = torch.eye(8).repeat(HEADS, 1, 1)
    for _ in range(client):
        turn = turn.roll(1, 1)
    return apply_moves(near(state(), 0.01, client), [Move(group, turn)])


def lines_of(
    caplog: pytest.LogCaptureFixture, strategy: FedRot, updates: list[State], rounds: int
) -> list[str]:
    caplog.clear()
    clients = {
        100 + i: (lambda message, i=i: reply(message, updates[i], 10, i)) for i in range(len(updates))
    }
    strategy.start(FakeGrid(clients), ArrayRecord(state()), rounds)
    return [record.getMessage() for record in caplog.records]


def test_a_round_ends_with_its_verdict_and_a_run_with_its_sum(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "rows.jsonl"
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0, reporting=Reporting(path))
    lines = lines_of(caplog, strategy, [turned(client) for client in range(3)], 1)
    counts, sentence, _ = [line for line in lines if line.startswith("Round 1: ")]
    assert counts.startswith("Round 1: replies: 3 accepted, 0 dropped, 0 failed; ")
    assert "heads are rotated relative to each other; 2 of 18 groups moved" in sentence
    first, *_, last = lines[lines.index(sentence) + 1 :]
    assert "Aggregated MetricRecord" in first
    assert lines[-3:-1] == ["Alignment moved groups in 1 of 1 round.", f"{sentence}."]
    assert str(path) in last


def test_noise_is_averaged_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    updates = [near(state(), 0.02, client) for client in range(3)]
    lines = lines_of(caplog, FedRot(SYMMETRY, fraction_evaluate=0.0), updates, 1)
    sentence = next(line for line in lines if "chance" in line)
    assert sentence.startswith("Round 1: nothing beyond chance (rotation ")
    assert sentence.endswith("): averaged as they are")
    assert lines[-2:] == ["Alignment moved nothing in 1 round.", f"{sentence}."]


def test_a_resumed_run_sums_up_the_rounds_before(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    updates = [turned(client) for client in range(3)]
    checkpoints = Checkpointing(tmp_path)
    for rounds in (1, 2):
        strategy = FedRot(SYMMETRY, fraction_evaluate=0.0, checkpoints=checkpoints)
        lines = lines_of(caplog, strategy, updates, rounds)
    moved, first, second = lines[-3:]
    assert moved.startswith("Alignment moved groups in ")
    assert moved.endswith(" of 2 rounds.")
    assert first.startswith("Round 1: ")
    assert lines.count(first[:-1]) == 0
    assert lines.count(second[:-1]) == 1


def test_a_round_of_another_basis_leaves_chance_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0, other_basis=OtherBasis(build))
    updates = [near(state(), 0.02, 1), permuted(near(state(), 0.02, 2), 2), near(state(), 0.02, 3)]
    lines = lines_of(caplog, strategy, updates, 1)
    sentence, _ = [line for line in lines if "chance not known" in line]
    assert re.match(r"Round 1: .*rotation \d+\.\d %.*, chance \d+\.\d %", sentence)
    assert "; 1 reply from another basis: rotation " in sentence

    # The first of these is the round's anchor.
    lines = lines_of(caplog, strategy, [permuted(near(state(), 0.02, i), i) for i in (2, 3)], 1)
    assert "of the distance removed, chance not known; " in lines[-1]
    record = next(line for line in lines if "Aggregated MetricRecord" in line)
    assert FOUND not in record
    assert CHANCE not in record
    assert all(name in record for name in (REMOVED, MOVED, ACCEPTED, DROPPED, FAILED))


def test_a_second_run_of_a_strategy_tells_of_its_own_rounds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0)
    nobody = FakeGrid({100: failure, 101: failure})
    strategy.start(nobody, ArrayRecord(state()), 3)
    assert "No new model in 3 of 3 rounds" in caplog.text
    lines = lines_of(caplog, strategy, [turned(client) for client in range(3)], 1)
    assert not [line for line in lines if "No new model" in line]
    assert "Alignment moved groups in 1 of 1 round." in lines
