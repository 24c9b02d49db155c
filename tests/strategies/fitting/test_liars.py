"""Clients that lie about rows, sums and losses: the head stays as good as without
them.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import Tensor

from fedrot.strategies import FedRot
from fedrot.strategies.wire.fitting_messages import LOSSES, ROWS, SUMS
from fedrot.task_head.fit import fitted_task_head
from fedrot.task_head.sums import ClassSums
from fedrot.task_head.votes import Votes
from tests.strategies.fakes import grid_of, tensors_of
from tests.strategies.fitting.feature_clients import (
    CENTRES,
    CLASSES,
    OLD,
    WIDTH,
    accuracy,
    client,
    drawn,
    fitted,
    packed,
    sums_of,
    unpacked,
)

Sums = dict[str, Tensor]
TURNED = [1, 2, 0]
EYE = torch.eye(WIDTH, dtype=torch.float64)


def of_points(points, counts, spread=1e-9):
    """Return the sums of rows that all lie at one point of their class."""
    gram = points.mT @ (points * counts[:, None]) + spread * counts.sum() * EYE
    return {"counts": counts, "sums": points * counts[:, None], "gram": gram}


#: What a liar makes of its own sums. Each can be the sums of some rows.
SPOILT = {
    "labels turned": lambda s: {
        **s,
        "counts": s["counts"][TURNED],
        "sums": s["sums"][TURNED],
    },
    "labels swapped": lambda s: {
        **s,
        "counts": s["counts"][[1, 0, 2]],
        "sums": s["sums"][[1, 0, 2]],
    },
    "features negated": lambda s: {**s, "sums": -s["sums"]},
    "means of others": lambda s: of_points(CENTRES[TURNED] * 3, s["counts"]),
    "tiny covariance": lambda s: of_points(CENTRES[TURNED] * 1e-3, s["counts"], 1e-18),
    "huge features": lambda s: {
        n: v * 1e6 ** ["counts", "sums", "gram"].index(n) for n, v in s.items()
    },
    "huge covariance": lambda s: {
        **s,
        "gram": s["gram"] + 1e9 * s["counts"].sum() * EYE,
    },
    "no signal": lambda s: of_points(
        torch.zeros(CLASSES, WIDTH).double(), s["counts"], 1.0
    ),
    "one class": lambda s: of_points(
        CENTRES, torch.tensor([0.0, 0.0, float(s["counts"].sum())]).double(), 1.0
    ),
    "one mean": lambda s: {
        **s,
        "sums": s["counts"][:, None] * s["sums"].sum(0) / s["counts"].sum(),
    },
}


def prefers(head):
    """Return a lie by which one head, or the last, is perfect, and the others are
    absurd.
    """

    def spoil(losses):
        losses["losses"][:] = 1e6 * losses["counts"][0]
        losses["losses"][min(head, len(losses["losses"]) - 1)] = 0.0
        losses["squares"].zero_()

    return spoil


def inverted(losses):
    losses["losses"][:] = (
        losses["losses"].amax(0) - losses["losses"] + losses["losses"].amin(0)
    )


#: What a liar makes of its losses.
VOTES = {
    "honest": lambda losses: None,
    "for the old head": prefers(0),
    "for the fitted head": prefers(1),
    "for another head": prefers(2),
    "for the own sums": prefers(5),
    "inverted": inverted,
    "many rows": lambda losses: (
        [value.mul_(1e9) for value in (inverted(losses) or losses).values()] and None
    ),
}


def lie(spoilt, votes, factor):
    def edit(answer):
        if ROWS in answer:
            answer[ROWS]["training"] = int(answer[ROWS]["training"] * factor)
        if SUMS in answer:
            sums = SPOILT[spoilt](unpacked(answer[SUMS]))
            answer[SUMS] = packed(
                {name: value * factor for name, value in sums.items()}
            )
        if LOSSES in answer:
            VOTES[votes](answer[LOSSES])

    return edit


def with_a_liar(spoilt, place, count):
    """Return clients; the one at a place lies about its sums."""
    clients = [client(seed) for seed in range(count)]
    clients[place] = client(place, lie=lie(spoilt, "honest", 1))
    return clients


CASES = [*product(SPOILT, VOTES, (1, 10, 10**6))]


@pytest.mark.parametrize(
    "sizes", [(4, 1, 5), (9, 2, 13)], ids=["one of four", "two of nine"]
)
def test_a_quarter_of_liars_costs_little_accuracy(sizes):
    """At changing places; accuracy falls by .03 at most."""
    count, liars, step = sizes

    def played(at, told):
        lies = [told if seed in at else None for seed in range(count)]
        return accuracy(
            fitted(
                [client(seed, held_out=80, lie=own) for seed, own in enumerate(lies)]
            )
        )

    honest = played(set(), None)
    found = {}
    for number, case in enumerate(CASES[::step]):
        at = {(number + 4 * index) % count for index in range(liars)}
        found[case] = played(at, lie(*case))
    assert honest > 0.8
    assert not {case: value for case, value in found.items() if value < honest - 0.03}


@pytest.mark.parametrize("trusted", [False, True])
def test_sums_that_are_left_out_are_named_and_those_of_trusted_sites_stay(
    trusted, warnings
):
    """The oracle of trusted sites is the head that is fitted to all sums, as sent."""
    clients = with_a_liar("labels turned", 4, 9)
    found = fitted(clients, trusted=trusted)
    assert found.fitted
    # Eight groups: the first and the last of nine clients share one.
    assert ("sums of clients 104 (1 of 8 groups)" in warnings()) is not trusted
    assert ("trusted=True" in warnings()) is not trusted
    answers = [sums_of(*drawn(seed, 60)) for seed in range(9)]
    answers[4] = SPOILT["labels turned"](answers[4])
    every = [ClassSums(**answer) for answer in answers]
    weight, bias = fitted_task_head(sum(every[1:], every[0]), found.shrinkage)
    head = tensors_of(found.arrays)
    of_all = torch.cat([weight, bias[:, None]], 1) / found.temperature
    own = torch.cat([head["classifier.weight"], head["classifier.bias"][:, None]], 1)
    assert torch.allclose(own.double(), of_all, atol=1e-3) is trusted


def test_rounds_pass_on_that_sites_trust_each_other(warnings):
    clients = with_a_liar("labels turned", 4, 9)
    for trusted in (True, False):
        assert "left out" not in warnings()
        strategy = FedRot(
            {"model_type": "bert"}, fit_head="classifier", trusted=trusted
        )
        strategy.prepared(grid_of(clients), ArrayRecord(OLD), ConfigRecord())
    assert "left out are the sums of clients 104" in warnings()


def test_groups_with_large_features_are_named(warnings):
    fitted(with_a_liar("huge features", 2, 5))
    assert "left out are the sums of clients 102: their features" in warnings()


@pytest.mark.parametrize("seed", [3, 6, 13])
def test_honest_clients_with_labels_of_their_own_are_not_left_out(seed, monkeypatch):
    """Without a group most clients gain a little, by more than a standard error, and
    few lose much.
    """
    drawn = np.random.default_rng(seed).dirichlet([0.1] * CLASSES, size=8)
    clients = [
        client(100 * seed + k, shares=own) for k, own in enumerate(torch.tensor(drawn))
    ]
    found = fitted(clients)
    harmful = Votes.harmful
    suspected = list[int]()
    monkeypatch.setattr(
        Votes, "harmful", lambda *told: suspected.extend(harmful(*told))
    )
    assert found.arrays == fitted(clients).arrays
    assert suspected
