"""The verdict on a round, sentence by sentence, and the last lines of a run."""

import ast
import logging
import re
from pathlib import Path

import pytest
import torch

from fedrot.report import AlignmentReport, GroupReport
from fedrot.strategies import FedRot
from fedrot.strategies.reporting.verdict import (
    CHANCE,
    DROPPED,
    FOUND,
    HEAD_FAILED,
    MOVED,
    NOBODY,
    OFF,
    REMOVED,
    TRY_HEAD,
    UNMOVED,
    empty_rounds,
    percent,
    run_lines,
    told,
    verdict,
)
from fedrot.strategies.reporting.verdict import figures as metrics_of
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.settings import Checkpointing, Reporting
from fedrot.symmetry.groups import Move, apply_moves
from tests.models import HEADS, near
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import (
    ArrayRecord,
    failure,
    grid_of,
    reply,
)

TURNED = "heads are rotated relative to each other"


def rows(
    part,
    *found,
    chance=0.061,
    moved=0,
    of=100.0,
):
    """Return groups that are ``of`` away: the shares found, of which the first
    ``moved`` are removed.
    """
    return [
        GroupReport(
            f"{part} {index}",
            index,
            part,
            of,
            of * (1 - share * (index < moved)),
            int(index < moved),
            4,
            found=of * share,
            chance=None if chance is None else of * chance,
        )
        for index, share in enumerate(found)
    ]


def report(*groups):
    before = sum(group.before for group in groups)
    removed = sum(group.before - group.after for group in groups)
    return AlignmentReport(groups, before, before - removed, 0.1)


def found(*reports, **about):
    return verdict(reports, **{"accepted": len(reports), **about})


NEAR = [rows("attention", 0.3, moved=1), rows("ffn", 0.0, chance=0.0)]
FAR = [
    rows("attention", 0.1, moved=1, of=1000.0),
    rows("ffn", 0.0, chance=0.0, of=1000.0),
]
BOTH = (
    "rotation 24.0 % of the distance, chance 6.1 %; permutation 20.0 % of the "
    "distance, chance 0.0 %"
)
#: The groups of each reply, and the verdict's beginning.
VERDICTS = {
    "clients had turned": (
        [[rows("attention", 0.2, 0.16, 0.08, 0.068, moved=3)]] * 4,
        "rotation 12.7 % of the distance, chance 6.1 %: heads are rotated relative to "
        "each other; 12 of 16 groups moved",
    ),
    # A client ten times as far away counts ten times, and the feed-forward layers do
    # not count.
    "shares are of the distance of all clients": (
        [NEAR, FAR],
        "rotation 11.8 % of the distance, chance 6.1 %: heads",
    ),
    "nothing beyond chance": (
        [[rows("attention", 0.035, 0.035), rows("ffn", 0.0, chance=0.0, of=0.0)]] * 2,
        "nothing beyond chance (rotation 3.5 %, chance 6.1 %): no group moved",
    ),
    "more than chance and less than is required": (
        [[rows("attention", 0.07)]],
        "too little beyond chance (rotation 7.0 %, chance 6.1 %): no group moved",
    ),
    "permutations near an anchor find nothing, and chance neither": (
        [[rows("ffn", 0.0, chance=0.0)]],
        "nothing beyond chance (permutation 0.0 %, chance 0.0 %): no group moved",
    ),
    "units had changed places": (
        [[rows("ffn", 0.2, 0.0, chance=0.004, moved=1)]],
        "permutation 10.0 % of the distance, chance 0.4 %: units are in another order; "
        "1 of 2 groups moved",
    ),
    "every movement is named, and only those beyond chance are a cause": (
        [[rows("attention", 0.24, moved=1), rows("heads", 0.2, chance=0.0, moved=1)]],
        f"{BOTH}: heads are rotated relative to each other and units are in another "
        "order; 2 of 2 groups moved",
    ),
    "a group moved, and all of them together are no more than chance": (
        [[rows("attention", 0.12, 0.0, 0.0, moved=1)]],
        "rotation 4.0 % of the distance, chance 6.1 %: no more than chance in all; 1 "
        "of 3 groups moved",
    ),
    "a movement whose groups stayed is no cause": (
        [[rows("attention", 0.24), rows("heads", 0.2, chance=0.0, moved=1)]],
        f"{BOTH}: units are in another order; 1 of 2 groups moved",
    ),
    "as much as chance is not beyond it": (
        [[rows("attention", 0.061)]],
        "nothing beyond chance (rotation 6.1 %",
    ),
    "a movement that finds less than chance is named even if it finds nothing": (
        [[rows("attention", 0.0), rows("ffn", 0.2, chance=0.004, moved=1)]],
        "rotation 0.0 % of the distance, chance 6.1 %; permutation 20.0 %",
    ),
    "a distance has grown": (
        [[rows("attention", -0.1, chance=None, moved=1)]],
        "rotation -10.0 % of the distance removed, chance not known; 1 of 1 groups "
        "moved",
    ),
    "the whole model has no chance": (
        [[rows("attention", 0.3, chance=None), rows("residual", 0.0, chance=None)]],
        "nothing removed, chance not known: no group moved",
    ),
    "no groups": ([[]], "nothing to align: no group moved"),
    "no distance": (
        [[rows("attention", 0.0, 0.0, of=0.0)]],
        "nothing to align: no group moved",
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_on_replies(name):
    replies, expected = VERDICTS[name]
    reports = [
        report(*(group for part in parts for group in part)) for parts in replies
    ]
    said = found(*reports)
    assert said.startswith(expected)
    # The first shares of the sentence are the metrics of the round.
    shares = re.findall(r"([\d.]+ %)(?: of the distance)?, chance ([\d.]+ %)", said)
    metrics = metrics_of(reports)
    named = [percent(metrics[name]) for name in (FOUND, CHANCE) if name in metrics]
    assert [*sum(shares[:1], ())] == named


HEADS_OF_OTHERS = rows("attention", 0.5, chance=None, moved=1)
OTHER = report(*HEADS_OF_OTHERS, *rows("residual", 0.9, chance=None, moved=1))
MIXED = (
    "; 1 reply from another basis: rotation 50.0 % of the distance removed, chance not "
    "known; "
)
LOST = {"accepted": 0, "lost": "0 good replies, 1 needed."}
FEW = {"accepted": 1, "lost": "1 good reply, 2 needed."}
#: Reports and what else is known of a round, and all that the verdict says.
SENTENCES = [
    (
        [OTHER] * 3,
        {"other_basis": 3},
        "3 replies from another basis: rotation 25.0 %, permutation 45.0 % of the "
        "distance removed, chance not known; 6 of 6 groups moved",
    ),
    (
        [*[report(*rows("attention", 0.127, moved=1))] * 2, report(*HEADS_OF_OTHERS)],
        {"other_basis": 1},
        f"rotation 12.7 % of the distance, chance 6.1 %: {TURNED}{MIXED}3 of 3 groups "
        "moved",
    ),
    (
        [*[report(*rows("attention", 0.035))] * 2, report(*HEADS_OF_OTHERS)],
        {"other_basis": 1},
        f"nothing beyond chance (rotation 3.5 %, chance 6.1 %){MIXED}1 of 3 groups "
        "moved",
    ),
    ([], {"accepted": 3, "aligned": False}, "alignment is off"),
    ([], LOST, "no reply accepted: the model stays as it was"),
    ([], {**LOST, "aligned": False}, "no reply accepted: the model stays as it was"),
    ([], FEW, "no new model: 1 good reply, 2 needed"),
    ([], {**FEW, "aligned": False}, "no new model: 1 good reply, 2 needed"),
]


@pytest.mark.parametrize(("reports", "about", "sentence"), SENTENCES)
def test_the_verdict_on_other_bases_and_rounds_without_a_model(
    reports, about, sentence
):
    assert found(*reports, **about) == sentence


# --- the run
# ------------------------------------------------------------


def figures(moved, dropped=0):
    return {FOUND: 0.1, CHANCE: 0.05, MOVED: moved, DROPPED: dropped}


@pytest.mark.parametrize("share", [-1e-9, -0.0, 4e-4])
def test_a_share_of_nothing_has_no_sign(share):
    assert percent(share) == "0.0 %"


def test_the_last_lines_of_a_run():
    rounds = {1: figures(12, 1), 2: figures(3, 2), 10: figures(0)}
    rounds[1][HEAD_FAILED] = 0
    rounds[2][HEAD_FAILED] = rounds[10][HEAD_FAILED] = 1
    verdicts = {
        1: f"rotation 12.7 %: {TURNED}",
        2: "said only once",
        10: "nothing beyond chance",
    }
    assert run_lines(rounds, verdicts, Path("runs/a.jsonl")) == [
        "Alignment moved groups in 2 of 3 rounds.",
        "Round 1: rotation 12.7 %: heads are rotated relative to each other.",
        "Round 10: nothing beyond chance.",
        "3 replies were dropped, in 2 rounds.",
        "No task head could be fitted in 2 rounds, the first is round 2: warnings say "
        "why.",
        "Rows of the rounds: 'runs/a.jsonl'. A page of them: fedrot report "
        "'runs/a.jsonl'",
    ]


def test_rounds_without_a_model_are_counted_if_few_verdicts_are_left():
    said = {
        1: "a",
        2: "b",
        4: "no new model: 1 good reply, 2 needed",
        5: OFF,
        7: NOBODY,
        9: "c",
    }
    assert told(said).keys() == {1, 4, 7, 9}
    for verdicts in (said, told(said)):
        assert empty_rounds(verdicts).startswith(
            "No new model in 2 of 9 rounds, the first is round 4: "
        )
    assert empty_rounds({1: OFF, 2: "verdict"}) == ""


def turned(client):
    """Return a trained state whose first heads were turned, by another angle at every
    client.
    """
    group = next(g for g in SYMMETRY.groups if g.part == "attention")
    turn = torch.eye(8).repeat(HEADS, 1, 1)
    for _ in range(client):
        turn = turn.roll(1, 1)
    return apply_moves(near(state(), 0.01, client), [Move(group, turn)])


def lines_of(
    caplog,
    strategy,
    updates,
    rounds,
):
    caplog.clear()

    def client(index):
        return lambda message: reply(message, updates[index], 10, index)

    clients = grid_of(map(client, range(len(updates))))
    strategy.start(clients, ArrayRecord(state()), rounds)
    return [record.getMessage() for record in caplog.records]


def test_a_round_ends_with_its_verdict_and_a_run_with_its_sum_also_a_resumed_one(
    caplog, tmp_path
):
    caplog.set_level(logging.INFO)
    path = tmp_path / "rows.jsonl"
    settings = {"fraction_evaluate": 0.0, "reporting": Reporting(path)}
    settings["checkpoints"] = Checkpointing(tmp_path / "kept")
    updates = [turned(client) for client in range(3)]
    lines = lines_of(caplog, FedRot(SYMMETRY, **settings), updates, 1)
    counts, sentence, _ = [line for line in lines if line.startswith("Round 1: ")]
    assert counts.startswith("Round 1: replies: 3 accepted, 0 dropped, 0 failed; ")
    assert f"{TURNED}; 2 of 18 groups moved" in sentence
    first = lines[lines.index(sentence) + 1]
    assert "Aggregated MetricRecord" in first
    metrics = ast.literal_eval(first.split(": ", 1)[1])
    shares = [percent(metrics[name]) for name in (FOUND, CHANCE, REMOVED)]
    assert f"{shares[0]} of the distance, chance {shares[1]}" in sentence
    assert f" removed {shares[2]} of the distance of all groups in " in counts
    assert lines[-3:-1] == ["Alignment moved groups in 1 of 1 round.", f"{sentence}."]
    assert str(path) in lines[-1]
    lines = lines_of(caplog, FedRot(SYMMETRY, **settings), updates, 2)
    moved, before, after, _ = lines[-4:]
    assert re.fullmatch("Alignment moved groups in . of 2 rounds.", moved)
    assert before == f"{sentence}."
    assert lines.count(sentence) == 0
    assert lines.count(after[:-1]) == 1


@pytest.mark.parametrize(
    ("fits", "moved", "number", "lost", "added"),
    [
        (False, 0, 1, "", [UNMOVED + TRY_HEAD]),
        (True, 0, 1, "", [UNMOVED]),
        (False, 1, 1, "", []),
        (False, 0, 2, "", []),
        (False, 0, 1, "too few", []),
    ],
)
def test_a_first_round_without_moves_says_what_to_do(
    caplog,
    fits,
    moved,
    number,
    lost,
    added,
):
    caplog.set_level(logging.INFO)
    reports = [(0, report(*rows("attention", 0.1, moved=moved)))]
    RoundRecord(number, reports=reports, accepted=1, lost=lost).log_end(True, fits)
    assert [record.getMessage() for record in caplog.records][2:] == added


def test_a_second_run_of_a_strategy_tells_of_its_own_rounds(
    caplog,
):
    caplog.set_level(logging.INFO)
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0)
    strategy.start(grid_of([failure] * 2), ArrayRecord(state()), 3)
    assert "No new model in 3 of 3 rounds" in caplog.text
    updates = [near(state(), 0.02, client) for client in range(3)]
    lines = lines_of(caplog, strategy, updates, 1)
    assert not [line for line in lines if "No new model" in line]
    assert "Alignment moved nothing in 1 round." in lines
    assert lines.count(UNMOVED + TRY_HEAD) == 1
