"""Clients that learn a common basis together: what they are asked, and what becomes of the mean."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

import fedrot
from fedrot.learning import LearningOptions
from fedrot.strategies import FedRot, Matching, OtherBasis, match_at_client
from fedrot.strategies.client_matching import ANCHOR, ELEMENTS, UPDATE
from fedrot.strategies.wire.arrays import to_arrays
from fedrot.symmetry.groups import Move, apply_moves
from tests.models import largest_difference as difference
from tests.models import near
from tests.strategies.fakes import Client, FakeGrid, broadcast, failure, play, reply, tensors_of
from tests.trained import CONFIG, build, loss, rows, trained

PASSES = OtherBasis(options=fedrot.AlignmentOptions(fedrot.WHOLE_MODEL), learning_passes=2)

DEFAULT = LearningOptions()


def node(seed: int, asked: list[Message] | None = None, learning: Any = DEFAULT) -> Client:
    """Return a client that learns on its own rows, and notes what it is asked."""
    app = ClientApp()
    match_at_client(app, lambda *_: Matching(build, lambda: rows(seed, 20), learning=learning))
    context = Context(1, 1, {}, RecordDict(), {})

    def answer(message: Message) -> Message:
        if asked is not None:
            asked.append(message)
        return app(message, context)

    return answer


def test_learning_together_lowers_the_loss_of_the_mean() -> None:
    sent = [trained(seed) for seed in (1, 2, 3)]
    learning = LearningOptions(steps=60)
    nodes = [node(seed, learning=learning) for seed in (1, 2, 3)]
    losses = {}
    for passes in (0, 3):
        others = OtherBasis(options=PASSES.options, learning_passes=passes)
        strategy = FedRot(CONFIG, other_basis=others)
        losses[passes] = loss(tensors_of(play(strategy, trained(0), sent, nodes)[0]))
    assert losses[3] < losses[0] - 0.05


def test_every_client_receives_its_own_model_and_the_mean_of_the_others() -> None:
    sent = [trained(seed) for seed in (1, 2, 3)]
    asked: list[Message] = []
    # Without steps nobody moves: the second pass asks what the first has asked.
    nodes = [node(seed, asked, LearningOptions(steps=0)) for seed in (1, 2, 3)]
    result, _ = play(FedRot(CONFIG, other_basis=PASSES), trained(0), sent, nodes)
    assert len(asked) == 6
    own, rest = (
        [tensors_of(message.content.array_records[name]) for message in asked[:3]]
        for name in (UPDATE, ANCHOR)
    )
    weights = [10, 11, 12]
    for name, mean in tensors_of(result).items():
        for place in range(3):
            others = [i for i in range(3) if i != place]
            expected = sum(weights[i] * own[i][name] for i in others) / sum(weights[i] for i in others)
            assert torch.allclose(rest[place][name], expected, atol=1e-5)
            again = asked[3 + place].content.array_records[UPDATE]
            assert torch.allclose(tensors_of(again)[name], own[place][name], atol=1e-5)
        expected = sum(w * o[name] for w, o in zip(weights, own, strict=True)) / 33
        assert torch.allclose(mean, expected, atol=1e-5)


@pytest.mark.parametrize("canonical", [None, False], ids=["rotated", "permuted"])
def test_clients_learn_the_stream_where_it_is_rotated(canonical: bool | None) -> None:
    """A stream that is permuted stays in its order."""
    found: set[str] = set()

    def noting(seed: int) -> Client:
        learns = node(seed)

        def answer(message: Message) -> Message:
            answered = learns(message)
            assert answered is not None
            found.update(answered.content.array_records[ELEMENTS])
            return answered

        return answer

    options = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL, canonical=canonical)
    others = OtherBasis(options=options, learning_passes=1)
    sent = [trained(seed) for seed in (1, 2)]
    play(FedRot(CONFIG, other_basis=others), trained(0), sent, [noting(1), noting(2)])
    symmetry = fedrot.symmetry_of(CONFIG, trained(0)).rotated
    learned = {group.part for group in symmetry.groups if group.name in found}
    assert learned == ({"attention"} if canonical is False else {"attention", "residual"})


def test_each_update_keeps_its_function() -> None:
    class Noting(FedRot):
        def on_update(self, update: Any) -> None:
            losses.append(loss(dict(update.tensors)))

    losses: list[float] = []
    sent = [trained(seed) for seed in (1, 2)]
    play(Noting(CONFIG, other_basis=PASSES), trained(0), sent, [node(1), node(2)])
    assert losses == pytest.approx([loss(update) for update in sent], abs=1e-4)


def test_clients_that_fail_keep_their_alignment(warnings: Any) -> None:
    sent = [trained(seed) for seed in (1, 2, 3)]
    result, _ = play(FedRot(CONFIG, other_basis=PASSES), trained(0), sent, [failure] * 3)
    matched = OtherBasis(options=PASSES.options)
    expected, _ = play(FedRot(CONFIG, other_basis=matched), trained(0), sent, [failure] * 3)
    found, expected = tensors_of(result), tensors_of(expected)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in found)
    assert warnings().count("stay unchanged") == 6


def test_nobody_learns_where_no_reply_comes_from_another_basis() -> None:
    base = trained(0)
    sent = [near(base, 0.01, seed) for seed in (1, 2)]
    asked: list[Message] = []
    play(FedRot(CONFIG, other_basis=PASSES), base, sent, [node(1, asked), node(2, asked)])
    assert not asked


def test_negative_passes_are_refused() -> None:
    with pytest.raises(fedrot.FedrotError, match="must not be negative"):
        OtherBasis(options=PASSES.options, learning_passes=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_answer_in_either_precision_ends_no_round(dtype: torch.dtype) -> None:
    """The server's own elements are in float64; an honest client may answer in float32."""
    symmetry = fedrot.symmetry_of(CONFIG, trained(0))
    rotations = [g for g in symmetry.groups if g.part == "attention"]
    generator = torch.Generator().manual_seed(0)
    elements = {g.name: g.kind.random(generator).to(dtype) for g in rotations}

    def answer(message: Message) -> Message:
        return Message(RecordDict({ELEMENTS: to_arrays(elements)}), reply_to=message)

    others = OtherBasis(options=fedrot.AlignmentOptions(("residual", "attention")), learning_passes=1)
    sent = [trained(seed) for seed in (1, 2, 3)]
    result, metrics = play(FedRot(CONFIG, other_basis=others), trained(0), sent, [answer] * 3)
    assert metrics["fedrot-replies-accepted"] == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors_of(result).values())


def test_an_answer_of_the_second_pass_comes_after_that_of_the_first() -> None:
    """Rotations do not commute: the second element acts on what the first has moved."""
    symmetry = fedrot.symmetry_of(CONFIG, trained(0))
    rotations = [g for g in symmetry.groups if g.part == "attention"]
    passes: list[dict[str, torch.Tensor]] = [
        {g.name: g.kind.random(torch.Generator().manual_seed(seed)) for g in rotations}
        for seed in (0, 1)
    ]
    asked: list[Message] = []

    def answer(message: Message) -> Message:
        asked.append(message)
        elements = passes[len(asked) - 1]
        return Message(RecordDict({ELEMENTS: to_arrays(elements)}), reply_to=message)

    class Noting(FedRot):
        def on_update(self, update: Any) -> None:
            found.append(dict(update.tensors))

    found: list[Any] = []
    sent = [trained(seed) for seed in (1, 2)]
    play(Noting(CONFIG, other_basis=PASSES), trained(0), sent, [answer, failure])
    expected = tensors_of(asked[0].content.array_records[UPDATE])
    for elements in passes:
        expected = apply_moves(expected, [Move(g, elements[g.name]) for g in rotations])
    of_first = min(found, key=lambda one: difference(one, expected))
    assert difference(of_first, expected) < 1e-4


def test_the_first_of_two_answers_of_a_client_counts() -> None:
    class Twice(FakeGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            answers = super().send_and_receive(messages, timeout=timeout)
            return [one for answer in answers for one in (answer, another(answer))]

    def another(answer: Message) -> Message:
        again = copy.copy(answer)
        again.content = RecordDict({ELEMENTS: to_arrays(elements)})
        return again

    symmetry, generator = fedrot.symmetry_of(CONFIG, trained(0)), torch.Generator().manual_seed(0)
    rotations = [g for g in symmetry.groups if g.part == "attention"]
    elements = {g.name: g.kind.random(generator) for g in rotations}

    sent, results = [trained(seed) for seed in (1, 2, 3)], []
    for grid in (FakeGrid, Twice):
        asked: list[Message] = []
        nodes = {100 + seed: node(seed, asked) for seed in (1, 2, 3)}
        one_pass = OtherBasis(options=PASSES.options, learning_passes=1)
        strategy = FedRot(CONFIG, other_basis=one_pass)
        results.append(tensors_of(play(strategy, trained(0), sent, grid(nodes))[0]))
        assert len(asked) == 3
    assert difference(*results) == 0


def test_a_client_that_is_nearly_all_of_the_mean_is_not_asked_to_learn() -> None:
    """The mean of the others would be the rounding of the whole one."""
    asked: list[Message] = []

    def noting(message: Message) -> Message:
        asked.append(message)
        return failure(message)

    strategy = FedRot(CONFIG, other_basis=PASSES)
    messages = broadcast(strategy, trained(0), {100: noting, 101: noting})
    weights = {100: 1e9, 101: 10}
    nodes = [message.metadata.dst_node_id for message in messages]
    sent = [reply(m, trained(1 + i), weights[nodes[i]], i) for i, m in enumerate(messages)]
    strategy.aggregate_train(1, sent)
    assert [message.metadata.dst_node_id for message in asked] == [101, 101]
