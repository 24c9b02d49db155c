"""Models evaluated on the rows that clients hold out, for guards and as
``evaluate_fn``.
"""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import ArrayRecord

import fedrot
from fedrot.strategies import FedRot, Guard, evaluate_at_clients
from fedrot.strategies.wire.fitting_messages import MESSAGE_TYPE
from fedrot.task_head.losses import TEMPERATURES
from tests.models import EAGER, config_of, near
from tests.strategies.aggregating import loaded
from tests.strategies.classifier import NAME, SYMMETRY, build, state
from tests.strategies.fakes import failure, grid_of, reply, tensors_of
from tests.strategies.fitting.classifiers import SINGLE, as_predicted

STATE = state()
ARRAYS = ArrayRecord(state())
WORSE = near(STATE, 0.3, 1)


def predicted(seed, count):
    return as_predicted(SINGLE.rows(seed, count), loaded(STATE))


def judge(held_out):
    return SINGLE.client(None, held_out, build)


def judged(tensors, *held_out):
    labels = torch.cat([given["labels"] for given in held_out])
    logits = torch.cat([SINGLE.logits(loaded(tensors), given) for given in held_out])
    losses = {t: float(SINGLE.loss(logits / t, labels).mean()) for t in TEMPERATURES}
    best = min(losses, key=losses.__getitem__)
    accuracy = float((logits.argmax(1) == labels).double().mean())
    found = {"loss": losses[1.0], "accuracy": accuracy, "calibrated_loss": losses[best]}
    return pytest.approx({**found, "temperature": best, "rows": len(labels)}, rel=1e-5)


def forging(message):
    """Answer in the name of node 101."""
    found = judge(SINGLE.rows(7, 60))(message)
    assert found is not None
    vars(found.metadata)["_src_node_id"] = 101
    return found


@pytest.mark.parametrize(
    ("others", "word"),
    [
        ([], ""),
        ([failure], "Client 100: it failed"),
        ([forging], "It matches no request of this round"),
    ],
)
def test_metrics_are_those_of_all_rows_together(others, word, warnings):
    held_out = [SINGLE.rows(11, 30), predicted(12, 45), SINGLE.rows(13, 7)]
    grid = grid_of([*others, *map(judge, held_out[: 3 - len(others)])])
    found = evaluate_at_clients(grid)(0, ARRAYS)
    assert dict(found) == judged(STATE, *held_out[: 3 - len(others)])
    assert word in warnings()


def test_without_an_answer_the_metrics_are_nan(warnings):
    found = evaluate_at_clients(grid_of([failure, failure]))(3, ARRAYS)
    assert all(
        math.isnan(found[name]) for name in ("loss", "accuracy", "calibrated_loss")
    )
    assert "Round 3: clients did not evaluate" in warnings()


def answering(node, times):
    """Return a node that answers so many requests, and then fails."""
    left = [times]

    def answer(message):
        left[0] -= 1
        return node(message) if left[0] >= 0 else failure(message)

    return answer


def test_models_of_one_round_are_judged_by_the_same_clients():
    good = [SINGLE.rows(11, 30), SINGLE.rows(12, 40)]
    grid = grid_of([answering(judge(good[0]), 3), judge(good[1]), failure])
    evaluate = evaluate_at_clients(grid)
    assert dict(evaluate(1, ARRAYS)) == judged(STATE, *good)
    assert dict(evaluate(1, ArrayRecord(WORSE))) == judged(WORSE, *good)
    # In the next round all are asked again; then client 0 is gone.
    evaluate(2, ARRAYS)
    found = evaluate(2, ArrayRecord(WORSE))
    assert [set(nodes) - {100, 101} for nodes in grid.asked] == [
        {102},
        set(),
        {102},
        set(),
    ]
    # The difference is then that of client 1.
    before, own, after = (
        judged(*given).expected["loss"]
        for given in ((STATE, *good), (STATE, good[1]), (WORSE, good[1]))
    )
    assert found["loss"] == pytest.approx(before + after - own, rel=1e-5)


def trains(node, update, weight):
    def answer(message):
        asked = message.metadata.message_type == MESSAGE_TYPE
        return node(message) if asked else reply(message, update, weight, weight)

    return answer


def test_a_guard_keeps_what_the_clients_rows_prefer():
    """Rows labelled by the start: the aligned mean is near to it, the plain one is
    not.
    """
    held_out = [predicted(11, 200), predicted(12, 100)]
    turned = [
        fedrot.random_equivalent(near(STATE, 0.02, one), SYMMETRY, one)
        for one in (1, 2)
    ]

    def played(*answers):
        """Play a round whose clients answer so many requests to judge."""
        nodes = [
            answering(judge(own), most)
            for own, most in zip(held_out, answers, strict=True)
        ]
        grid = grid_of(
            trains(*pair, 1 + i)
            for i, pair in enumerate(zip(nodes, turned, strict=True))
        )
        guard = Guard("loss", evaluate=evaluate_at_clients(grid))
        strategy = FedRot(
            config_of(NAME), alignment=EAGER, guard=guard, fraction_evaluate=0.0
        )
        result = strategy.start(grid, ARRAYS, 1)
        return result.arrays, result.train_metrics_clientapp[1]

    arrays, metrics = played(2, 2)
    kept = judged(tensors_of(arrays), *held_out).expected["loss"]
    assert metrics["fedrot-guard-kept-aligned"] == 1
    assert metrics["fedrot-guard-aligned"] == pytest.approx(kept, rel=1e-5)
    assert metrics["fedrot-guard-plain"] > kept
    # A client that judges only one mean has no part in the choice.
    assert played(2, 1)[1]["fedrot-guard-kept-aligned"] == 1
    _, metrics = played(1, 1)
    assert metrics["fedrot-guard-kept-aligned"] == 0
    assert math.isnan(metrics["fedrot-guard-aligned"])
    assert metrics["fedrot-guard-plain"] > 0
