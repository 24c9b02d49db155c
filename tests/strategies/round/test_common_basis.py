"""Clients that learn a common basis together: what they are asked, and what becomes of
the mean.
"""

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

import fedrot
from fedrot.aggregation import Mean
from fedrot.alignment.learning import LearningOptions
from fedrot.strategies import FedRot, Matching, OtherBasis, match_at_client
from fedrot.strategies.client.moves import ANCHOR, ELEMENTS, UPDATE
from fedrot.strategies.wire.arrays import to_arrays
from fedrot.symmetry.groups import Move, apply_moves
from tests.models import largest_difference as difference
from tests.models import near
from tests.strategies.fakes import (
    aggregated,
    broadcast,
    failure,
    reply,
    tensors_of,
)
from tests.trained import CONFIG, build, loss, rows, trained

PASSES = OtherBasis(
    options=fedrot.AlignmentOptions(fedrot.WHOLE_MODEL), learning_passes=2
)

DEFAULT = LearningOptions()


def node(seed, asked=None, learning=DEFAULT):
    """Return a client that learns on its own rows, and notes what it is asked."""
    app = ClientApp()
    match_at_client(
        app, lambda *_: Matching(build, lambda: rows(seed, 20), learning=learning)
    )
    context = Context(1, 1, {}, RecordDict(), {})

    def answer(message):
        if asked is not None:
            asked.append(message)
        return app(message, context)

    return answer


class Noting(Mean):
    """Keeps the updates that it receives."""

    kept = []  # noqa: RUF012

    def add(self, update, weight, statistics=None):
        self.kept.append(dict(update))
        super().add(update, weight, statistics)


def merged_by(strategy, sent, nodes):
    """Play a round, and return the moved updates that its aggregation received."""
    Noting.kept.clear()
    aggregated(strategy, trained(0), sent, nodes=nodes)
    return [*Noting.kept]


def of_three():
    return [trained(seed) for seed in (1, 2, 3)]


def random_rotations(*seeds):
    """Return the groups of rotations, and for each seed an element of each of them."""
    groups = [
        g
        for g in fedrot.symmetry_of(CONFIG, trained(0)).groups
        if g.part == "attention"
    ]
    drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
    return groups, [
        {g.name: g.action.random(generator) for g in groups} for generator in drawn
    ]


def test_learning_together_lowers_the_loss_of_the_mean():
    sent = of_three()
    nodes = [node(seed, learning=LearningOptions(steps=15)) for seed in (1, 2, 3)]
    losses = {}
    for passes in (0, 2):
        others = OtherBasis(options=PASSES.options, learning_passes=passes)
        strategy = FedRot(CONFIG, other_basis=others)
        losses[passes] = loss(
            tensors_of(aggregated(strategy, trained(0), sent, nodes=nodes)[0])
        )
    assert losses[2] < losses[0] - 0.02


def test_every_client_receives_its_own_model_and_the_mean_of_the_others():
    sent = of_three()
    asked = []
    # Without steps nobody moves: the second pass asks what the first has asked.
    nodes = [node(seed, asked, LearningOptions(steps=0)) for seed in (1, 2, 3)]
    result, _ = aggregated(
        FedRot(CONFIG, other_basis=PASSES), trained(0), sent, nodes=nodes
    )
    assert len(asked) == 6
    own, rest = (
        [tensors_of(message.content.array_records[name]) for message in asked[:3]]
        for name in (UPDATE, ANCHOR)
    )
    weights = [10, 11, 12]
    for name, mean in tensors_of(result).items():
        for place in range(3):
            others = [i for i in range(3) if i != place]
            expected = sum(weights[i] * own[i][name] for i in others) / sum(
                weights[i] for i in others
            )
            assert torch.allclose(rest[place][name], expected, atol=1e-5)
            again = asked[3 + place].content.array_records[UPDATE]
            assert torch.allclose(tensors_of(again)[name], own[place][name], atol=1e-5)
        expected = sum(w * o[name] for w, o in zip(weights, own, strict=True)) / 33
        assert torch.allclose(mean, expected, atol=1e-5)


@pytest.mark.parametrize("canonical", [None, False], ids=["rotated", "permuted"])
def test_clients_learn_the_stream_where_it_is_rotated_and_updates_keep_their_functions(
    canonical,
):
    """A stream that is permuted stays in its order."""
    found = set()

    def noting(seed):
        learns = node(seed)

        def answer(message):
            answered = learns(message)
            assert answered is not None
            found.update(answered.content.array_records[ELEMENTS])
            return answered

        return answer

    options = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL, canonical=canonical)
    others = OtherBasis(options=options, learning_passes=1)
    sent = [trained(seed) for seed in (1, 2)]
    moved = merged_by(
        FedRot(CONFIG, other_basis=others, aggregation=Noting),
        sent,
        [noting(1), noting(2)],
    )
    assert [loss(update) for update in moved] == pytest.approx(
        [loss(u) for u in sent], abs=1e-4
    )
    symmetry = fedrot.symmetry_of(CONFIG, trained(0)).rotated
    learned = {group.part for group in symmetry.groups if group.name in found}
    assert learned == (
        {"attention"} if canonical is False else {"attention", "residual"}
    )


def test_clients_that_fail_keep_their_alignment(warnings):
    sent = of_three()
    result, _ = aggregated(FedRot(CONFIG, other_basis=PASSES), trained(0), sent)
    matched = OtherBasis(options=PASSES.options)
    expected, _ = aggregated(FedRot(CONFIG, other_basis=matched), trained(0), sent)
    found = tensors_of(result)
    expected = tensors_of(expected)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in found)
    assert warnings().count("stay unchanged") == 6


def test_nobody_learns_where_no_reply_comes_from_another_basis():
    base = trained(0)
    sent = [near(base, 0.01, seed) for seed in (1, 2)]
    asked = []
    aggregated(
        FedRot(CONFIG, other_basis=PASSES),
        base,
        sent,
        nodes=[node(1, asked), node(2, asked)],
    )
    assert not asked


def test_an_answer_in_float32_ends_no_round():
    """The server's own elements are in float64; an honest client may answer in
    float32.
    """
    elements = {
        name: element.float() for name, element in random_rotations(0)[1][0].items()
    }

    def answer(message):
        return Message(RecordDict({ELEMENTS: to_arrays(elements)}), reply_to=message)

    others = OtherBasis(
        options=fedrot.AlignmentOptions(("residual", "attention")), learning_passes=1
    )
    sent = of_three()
    result, metrics = aggregated(
        FedRot(CONFIG, other_basis=others), trained(0), sent, nodes=[answer] * 3
    )
    assert metrics["fedrot-replies-accepted"] == 3
    assert all(
        bool(torch.isfinite(tensor).all()) for tensor in tensors_of(result).values()
    )


def test_an_answer_of_the_second_pass_comes_after_that_of_the_first():
    """Rotations do not commute: the second element acts on what the first has moved."""
    groups, passes = random_rotations(0, 1)
    asked = []

    def answer(message):
        asked.append(message)
        return Message(
            RecordDict({ELEMENTS: to_arrays(passes[len(asked) - 1])}), reply_to=message
        )

    strategy = FedRot(CONFIG, other_basis=PASSES, aggregation=Noting)
    moved = merged_by(strategy, [trained(seed) for seed in (1, 2)], [answer, failure])
    expected = tensors_of(asked[0].content.array_records[UPDATE])
    for elements in passes:
        expected = apply_moves(
            expected, [Move(group, elements[group.name]) for group in groups]
        )
    assert min(difference(update, expected) for update in moved) < 1e-4


def test_a_client_that_is_nearly_all_of_the_mean_is_not_asked_to_learn():
    """The mean of the others would be the rounding of the whole one."""
    asked = []

    def noting(message):
        asked.append(message)
        return failure(message)

    strategy = FedRot(CONFIG, other_basis=PASSES)
    messages = broadcast(strategy, trained(0), [noting, noting])
    weights = {100: 1e9, 101: 10}
    nodes = [message.metadata.dst_node_id for message in messages]
    sent = [
        reply(m, trained(1 + i), weights[nodes[i]], i) for i, m in enumerate(messages)
    ]
    strategy.aggregate_train(1, sent)
    assert [message.metadata.dst_node_id for message in asked] == [101, 101]
