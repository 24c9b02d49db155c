"""``fedrot report rows.jsonl --client ID``, of real runs."""

from __future__ import annotations

import json

import pytest
from flwr.app import ArrayRecord

from fedrot.strategies import FedRot, Reporting, Server
from tests.models import near
from tests.simulations.commands import run
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import failure, grid_of, reply, round_of

#: The rounds in which clients 0 to 3 answer; their nodes are 100 to 103.
ANSWERS = ({1, 2, 3, 4}, {2, 4}, {3}, set())


def client(index):
    def answer(message):
        if round_of(message) not in ANSWERS[index]:
            return failure(message)
        return reply(message, near(state(), 0.05, index), 10, index)

    return answer


def played(file, hashes=True, **given):
    reporting = Reporting(file, hashes=hashes)
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0, reporting=reporting, **given)
    strategy.start(grid_of(map(client, range(4))), ArrayRecord(state()), 4)


@pytest.mark.parametrize(
    ("who", "words"),
    [
        (
            0,
            "1, 2, 3, 4, and so in every later model. The last checkpoint without them",
        ),
        (1, "its updates are in rounds 2, 4, and so in every later model."),
        (101, "The last checkpoint without them, if it was kept: round-000001."),
        (2, "its updates are in rounds 3, and so"),
        (103, "no model has its updates, but those of 0, 1, 100, 101, 102, 2."),
    ],
)
@pytest.mark.parametrize("given", [{}, {"alignment": None}], ids=str)
def test_rounds_with_a_clients_updates(who, words, given, tmp_path):
    file = tmp_path / "rows.jsonl"
    played(file, **given)
    said = run("report", file, "--client", who, says=words)
    assert ("none: take the first model" in said) == (who == 0)
    assert "sums" not in said


def test_a_round_that_keeps_the_old_model_does_not_count(tmp_path):
    file = tmp_path / "rows.jsonl"
    played(file, server=Server(min_replies=2))
    run("report", file, "--client", 0, says="its updates are in rounds 2, 3, 4,")


def test_sums_of_a_fitted_head_are_told(tmp_path):
    file = tmp_path / "rows.jsonl"
    played(file)
    metrics = {"fedrot-head-fitted": 1}
    with file.open("a") as rows:
        rows.write(json.dumps({"round": 4, "stage": "train", "metrics": metrics}))
    run("report", file, "--client", 1, says="fitted to sums")


def test_rows_without_updates_are_an_error(tmp_path):
    file = tmp_path / "rows.jsonl"
    played(file, hashes=False)
    run("report", file, "--client", 0, code=2, says="hashes=True")
