"""Models evaluated on the rows that clients hold out, for guards and as ``evaluate_fn``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message
from torch.nn.functional import cross_entropy

import fedrot
from fedrot.strategies import FedRot, Guard, evaluate_at_clients
from fedrot.strategies.sums.requests import LOSSES, MESSAGE_TYPE
from fedrot.temperature import TEMPERATURES
from tests.models import EAGER, State, config_of, near
from tests.strategies.classifier import NAME, SYMMETRY, build, state
from tests.strategies.fakes import Client, FakeGrid, failure, reply, tensors_of
from tests.strategies.test_task_head import Answer, Rows, as_predicted, client, edited, rows


def grid_of(*clients: Client) -> FakeGrid:
    return FakeGrid(dict(enumerate(clients, start=100)))


def judged(tensors: State, *held_out: Rows) -> dict[str, float]:
    """Return the metrics by one model that sees all rows."""
    model = build().eval()
    model.load_state_dict(tensors)
    labels = torch.cat([given["labels"] for given in held_out])
    with torch.no_grad():
        logits = torch.cat(
            [
                model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
                for given in held_out
            ]
        ).double()
    losses = {t: float(cross_entropy(logits / t, labels)) for t in TEMPERATURES}
    best = min(losses, key=losses.__getitem__)
    return {
        "loss": losses[1.0],
        "accuracy": float((logits.argmax(1) == labels).double().mean()),
        "calibrated_loss": losses[best],
        "temperature": best,
        "rows": len(labels),
    }


def test_metrics_are_those_of_all_rows_together() -> None:
    held_out = [rows(11, 30), as_predicted(rows(12, 45)), rows(13, 7)]
    grid = grid_of(*(client(rows(index), own) for index, own in enumerate(held_out)))
    found = evaluate_at_clients(grid)(0, ArrayRecord(state()))
    assert dict(found) == pytest.approx(judged(state(), *held_out), rel=1e-5)


def test_a_client_that_fails_is_left_out_and_named(warnings: Callable[[], str]) -> None:
    held_out = rows(11, 30)
    grid = grid_of(failure, client(rows(0), held_out))
    found = evaluate_at_clients(grid)(0, ArrayRecord(state()))
    assert dict(found) == pytest.approx(judged(state(), held_out), rel=1e-5)
    assert "Client 100: it failed" in warnings()


def test_without_an_answer_the_metrics_are_nan(warnings: Callable[[], str]) -> None:
    found = evaluate_at_clients(grid_of(failure, failure))(3, ArrayRecord(state()))
    assert all(math.isnan(found[name]) for name in ("loss", "accuracy", "calibrated_loss"))
    assert "Round 3: clients did not evaluate" in warnings()


def answering(node: Client, times: int) -> Client:
    """Return a node that answers so many requests, and then fails."""
    left = [times]

    def answer(message: Message) -> Message | None:
        left[0] -= 1
        return node(message) if left[0] >= 0 else failure(message)

    return answer


def test_models_of_one_round_are_judged_by_the_same_clients(warnings: Callable[[], str]) -> None:
    asked: list[int] = []

    def noting(node: Client, number: int) -> Client:
        return lambda message: asked.append(number) or node(message)

    good = [rows(11, 30), rows(12, 40)]
    nodes = [answering(client(rows(0), good[0]), 3), client(rows(1), good[1]), failure]
    evaluate = evaluate_at_clients(grid_of(*(noting(node, i) for i, node in enumerate(nodes))))
    other = near(state(), 0.3, 1)
    first, second = (evaluate(1, ArrayRecord(tensors)) for tensors in (state(), other))
    assert dict(first) == pytest.approx(judged(state(), *good), rel=1e-5)
    assert dict(second) == pytest.approx(judged(other, *good), rel=1e-5)
    assert sorted(asked) == [0, 0, 1, 1, 2]
    # In the next round all are asked again; then client 0 is gone.
    evaluate(2, ArrayRecord(state()))
    assert sorted(asked) == [0, 0, 0, 1, 1, 1, 2, 2]
    # The difference is then that of client 1.
    both, left = (judged(state(), *own)["loss"] for own in (good, good[1:]))
    expected = both + judged(other, good[1])["loss"] - left
    assert evaluate(2, ArrayRecord(other))["loss"] == pytest.approx(expected, rel=1e-5)
    assert "Client 100: it failed" in warnings()


def trains(node: Client, update: State, weight: int) -> Client:
    """Return a node that sends an update when it is asked to train."""

    def answer(message: Message) -> Message | None:
        asked = message.metadata.message_type == MESSAGE_TYPE
        return node(message) if asked else reply(message, update, weight, weight)

    return answer


def played(judges: list[Client], **settings: Any) -> Any:
    """Play a round in which two clients answer in random coordinates, judged by the clients' rows."""
    updates = [near(state(), 0.02, seed) for seed in (1, 2)]
    turned = [fedrot.random_equivalent(update, SYMMETRY, seed) for seed, update in enumerate(updates)]
    grid = grid_of(*(trains(*pair, 1 + i) for i, pair in enumerate(zip(judges, turned, strict=True))))
    guard = Guard("loss", evaluate=evaluate_at_clients(grid))
    strategy = FedRot(config_of(NAME), alignment=EAGER, guard=guard, fraction_evaluate=0.0, **settings)
    return strategy.start(grid, ArrayRecord(state()), 1)


def test_a_guard_keeps_what_the_clients_rows_prefer() -> None:
    """Rows labelled by the start: the aligned mean is near to it, the plain one is not."""
    held_out = [as_predicted(rows(11, 200)), as_predicted(rows(12, 100))]
    result = played([client(rows(i), own) for i, own in enumerate(held_out)])
    metrics = result.train_metrics_clientapp[1]
    assert metrics["fedrot-guard-kept-aligned"] == 1
    kept = judged(tensors_of(result.arrays), *held_out)
    assert metrics["fedrot-guard-aligned"] == pytest.approx(kept["loss"], rel=1e-5)
    assert metrics["fedrot-guard-plain"] > kept["loss"]


def test_a_client_that_judges_only_one_mean_has_no_part_in_the_choice() -> None:
    held_out = as_predicted(rows(11, 200))
    nodes = [client(rows(0), held_out), answering(client(rows(1), held_out), 1)]
    metrics = played(nodes).train_metrics_clientapp[1]
    assert metrics["fedrot-guard-kept-aligned"] == 1
    metrics = played([answering(node, 1) for node in nodes]).train_metrics_clientapp[1]
    assert metrics["fedrot-guard-kept-aligned"] == 0
    assert math.isnan(metrics["fedrot-guard-aligned"])
    assert metrics["fedrot-guard-plain"] > 0


@pytest.mark.parametrize("counts", [(0.001, 0.0), (60.0, 0.0), (1e9, 0.0)])
def test_a_client_that_lies_about_its_losses_turns_no_comparison(counts: tuple[float, float]) -> None:
    """It is one of four, and says that the better model is worse by a million."""

    def lying(answer: Answer) -> None:
        lies.append(len(lies) % 2)
        answer[LOSSES]["losses"].fill_(lies[-1] * 1e6 * counts[0])
        answer[LOSSES]["counts"] = torch.tensor(counts, dtype=torch.float64)

    lies: list[int] = []
    held_out = [as_predicted(rows(seed, 60)) for seed in range(4)]
    honest = [client(None, own) for own in held_out]
    grid = grid_of(*honest[:3], edited(honest[3], lying))
    evaluate, worse = evaluate_at_clients(grid), near(state(), 0.5, 1)
    first, second = (evaluate(1, ArrayRecord(tensors))["loss"] for tensors in (worse, state()))
    assert second < first < 3


def test_an_answer_in_anothers_name_counts_for_nobody(warnings: Callable[[], str]) -> None:
    held_out = [as_predicted(rows(seed, 60)) for seed in range(2)]

    def forging(message: Message) -> Message | None:
        found = client(None, rows(7, 60))(message)
        assert found is not None
        vars(found.metadata)["_src_node_id"] = 101
        return found

    grid = grid_of(forging, *(client(None, own) for own in held_out))
    found = evaluate_at_clients(grid)(1, ArrayRecord(state()))
    assert dict(found) == pytest.approx(judged(state(), *held_out), rel=1e-5)
    assert "It matches no request of this round" in warnings()
