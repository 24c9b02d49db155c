"""Replies from other bases: their residual streams are in orders of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn
from transformers import BertForSequenceClassification

import fedrot
from fedrot.aggregation import Mean
from fedrot.anchors import ANCHORS
from fedrot.strategies import FedRot
from fedrot.strategies.client_matching import OTHER_BASIS_OPTIONS
from fedrot.strategies.settings import OtherBasis
from tests.models import (
    BARE,
    EAGER,
    State,
    config_of,
    near,
    squared_distance,
    state_of,
)
from tests.models import largest_difference as difference
from tests.strategies.classifier import NAME, SYMMETRY, WHOLE, build, error, permuted, state
from tests.strategies.fakes import (
    broadcast,
    largest_difference,
    reply,
    tensors_of,
)

ANCHOR = pytest.mark.parametrize("anchor", sorted(ANCHORS))

Sent = Sequence[tuple[State, float]]


def never() -> nn.Module:
    raise AssertionError("the model is not needed")


def play(strategy: FedRot, base: State, sent: Sent) -> tuple[ArrayRecord, MetricRecord]:
    """Play one round and return the new model and the metrics."""
    messages = broadcast(strategy, base, len(sent))
    replies = [reply(m, u, w, i) for i, (m, (u, w)) in enumerate(zip(messages, sent, strict=True))]
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert metrics is not None
    return arrays, metrics


def mean(sent: Iterable[tuple[Mapping[str, Tensor], float]]) -> State:
    total = Mean()
    for update, weight in sent:
        total.add(update, weight)
    return total.result()


@ANCHOR
def test_permuted_copies_of_one_model_average_to_its_function(
    anchor: str, warnings: Callable[[], str]
) -> None:
    base, other = state(), state(3)
    sent = [(permuted(other, seed), 10.0 + seed) for seed in range(3)]
    result, _ = play(
        FedRot(
            config_of(NAME),
            alignment=fedrot.AlignmentOptions(anchor=anchor),
            other_basis=OtherBasis(model=build),
        ),
        base,
        sent,
    )
    assert error(result, other) <= 1e-4
    assert warnings() == ""
    lost, _ = play(
        FedRot(config_of(NAME), alignment=fedrot.AlignmentOptions(anchor=anchor)),
        base,
        sent,
    )
    assert error(lost, other) > 0.1
    assert "3 of 3 replies seem not to have started from the broadcast model" in warnings()
    assert "OtherBasis(model=...)" in warnings()


@pytest.mark.parametrize("heaviest", range(3))
@ANCHOR
def test_where_most_are_other_basis_the_heaviest_reply_is_the_anchor(anchor: str, heaviest: int) -> None:
    base, other = state(), state(3)
    weights = [5.0, 6.0, 7.0]
    weights[heaviest] = 9.0
    sent = [(permuted(other, seed), weights[seed]) for seed in range(3)]
    strategy = FedRot(
        config_of(NAME),
        alignment=fedrot.AlignmentOptions(anchor=anchor),
        other_basis=OtherBasis(options=WHOLE),
    )
    result, _ = play(strategy, base, sent)
    assert difference(tensors_of(result), sent[heaviest][0]) <= 1e-4


def test_unrelated_replies_are_matched_to_the_heaviest_by_weights_and_probes() -> None:
    """The oracle: ``align`` with activations of the same tokens, model by model."""
    sent = [(state(seed), weight) for seed, weight in ((3, 5.0), (4, 9.0), (5, 7.0))]
    result, _ = play(
        FedRot(
            config_of(NAME),
            alignment=fedrot.AlignmentOptions(anchor="global"),
            other_basis=OtherBasis(model=build),
        ),
        state(),
        sent,
    )
    symmetry = SYMMETRY
    evidence = fedrot.collect.activations.probing(build, config_of(NAME).to_dict(), symmetry)
    anchor = sent[1][0]
    aligned = [
        (fedrot.align(u, anchor, symmetry, OTHER_BASIS_OPTIONS, evidence(anchor, u)).apply(u), w)
        for u, w in sent
    ]
    assert difference(tensors_of(result), mean(aligned)) <= 1e-5
    assert difference(aligned[1][0], anchor) <= 1e-6
    by_weights, _ = play(
        FedRot(
            config_of(NAME),
            alignment=fedrot.AlignmentOptions(anchor="global"),
            other_basis=OtherBasis(options=WHOLE),
        ),
        state(),
        sent,
    )
    assert largest_difference(result, by_weights) > 1e-3


@pytest.mark.parametrize("members", [3, 1], ids=["minority", "half"])
@ANCHOR
def test_a_late_joiner_comes_into_the_broadcast_coordinates(anchor: str, members: int) -> None:
    base = state()
    honest = [(near(base, 0.02, 30 + i), 4.0) for i in range(members + 1)]
    late = (permuted(honest[-1][0], 1), 90.0)
    honest[-1] = (honest[-1][0], 90.0)
    # The late joiner is the heaviest and comes first.
    for given, accepted in ((OtherBasis(options=WHOLE), 1e-4), (OtherBasis(build), 0.05)):
        strategy = FedRot(
            config_of(NAME),
            alignment=replace(EAGER, anchor=anchor),
            other_basis=given,
        )
        expected, _ = play(strategy, base, honest[::-1])
        result, _ = play(strategy, base, [late, *honest[-2::-1]])
        # Probes have a say in the rotations, so with a model these are not the weights' alone.
        assert largest_difference(expected, result) <= accepted
        distances = [squared_distance(tensors_of(r), base) for r in (expected, result)]
        assert distances[1] <= 1.5 * distances[0]


class Peeking(BertForSequenceClassification):
    """A head that looks at hidden units by their number."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, output_hidden_states=True, **kwargs)
        out.logits = out.logits + out.hidden_states[-1][:, 0, :3]
        return out


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        (NAME, lambda: Peeking(config_of(NAME)), "Moving residual changes this model's outputs"),
        ("bert-bare", lambda: BARE["bert-bare"].build("eager"), "Part 'residual' cannot be moved"),
    ],
    ids=["peeking", "bare"],
)
def test_a_model_that_cannot_be_matched_as_a_whole_is_refused_before_clients_train(
    name: str, model: Callable[[], nn.Module], reason: str
) -> None:
    strategy = FedRot(config_of(name), other_basis=OtherBasis(model=model))
    for _ in range(2):
        with pytest.raises(fedrot.SymmetryError, match=f"Omit other_basis .*{reason}"):
            broadcast(strategy, state_of(name, dtype=torch.float32))


def test_the_model_is_asked_once_and_left_alone() -> None:
    base, built = state(), [0]

    def counted() -> nn.Module:
        built[0] += 1
        return build()

    strategy = FedRot(config_of(NAME), other_basis=OtherBasis(model=counted))
    honest = [(near(base, 0.02, i), 1.0) for i in range(2)]
    for _ in range(3):
        play(strategy, base, honest)
    assert built == [1]


@pytest.mark.parametrize("other_basis", [True, False])
def test_a_round_draws_nothing_from_the_caller_s_random_numbers(other_basis: bool) -> None:
    """Though the model is initialised at random: it is built in the first round, or after a resume."""
    drawn = []

    def initialised() -> nn.Module:
        before = torch.random.get_rng_state()
        model = build()
        drawn.append(not torch.equal(torch.random.get_rng_state(), before))
        return model

    base = state()
    sent = [(permuted(base, i) if other_basis else near(base, 0.02, i), 1.0) for i in range(2)]
    before = torch.random.get_rng_state()
    play(FedRot(config_of(NAME), other_basis=OtherBasis(model=initialised)), base, sent)
    assert torch.equal(torch.random.get_rng_state(), before)
    # Once to see what the model is; in two copies to probe it.
    assert drawn == ([True, True, True] if other_basis else [True])


def test_options_for_other_basis_replies_need_no_model(warnings: Callable[[], str]) -> None:
    base = state()
    sent = [(permuted(base, seed), 10.0) for seed in range(3)]
    result, _ = play(FedRot(config_of(NAME), other_basis=OtherBasis(options=WHOLE)), base, sent)
    assert error(result, base) <= 1e-4
    assert warnings() == ""


def test_given_options_are_kept_where_a_model_is_given_too() -> None:
    """They are a promise: nothing is checked, and the stream stays if it is not among the parts."""
    base = state()
    sent = [(permuted(base, seed), 10.0) for seed in range(3)]
    options = fedrot.AlignmentOptions(parts=("ffn",))
    strategy = FedRot(
        config_of(NAME),
        other_basis=OtherBasis(options=options, model=lambda: Peeking(config_of(NAME))),
    )
    result, _ = play(strategy, base, sent)
    assert strategy.other_bases.options == replace(options, canonical=False)
    aligned = fedrot.align_round(sent, base, SYMMETRY, options)
    assert difference(tensors_of(result), mean([(a.tensors, a.weight) for a in aligned])) <= 1e-5


def test_a_bare_encoder_goes_on_as_ever() -> None:
    name = "bert-bare"
    base = state_of(name, dtype=torch.float32)
    sent = [(near(base, 0.02, i), 1.0 + i) for i in range(3)]
    other_basis = (state_of(name, 5, torch.float32), 1.0)
    config = config_of(name)
    expected, _ = play(FedRot(config), base, [*sent, other_basis])
    result, _ = play(
        FedRot(config, other_basis=OtherBasis(options=WHOLE)),
        base,
        [*sent, other_basis],
    )
    assert largest_difference(result, expected) == 0


@ANCHOR
def test_ordinary_rounds_are_the_same_to_the_last_bit(anchor: str) -> None:
    base, symmetry = state(), SYMMETRY
    sent = [
        (fedrot.random_equivalent(near(base, 0.1, i), symmetry, i), weight)
        for i, weight in enumerate((3.0, 5.0, 1.0))
    ]
    expected, stock = play(
        FedRot(config_of(NAME), alignment=fedrot.AlignmentOptions(anchor=anchor)),
        base,
        sent,
    )
    result, metrics = play(
        FedRot(
            config_of(NAME),
            alignment=fedrot.AlignmentOptions(anchor=anchor),
            other_basis=OtherBasis(model=build),
        ),
        base,
        sent,
    )
    assert largest_difference(expected, result) == 0
    assert stock == metrics


def test_without_alignment_no_model_is_built() -> None:
    base = state()
    sent = [(permuted(base, seed), 10.0) for seed in range(2)]
    strategy = FedRot(
        config_of(NAME), alignment=None, other_basis=OtherBasis(model=never, at_clients=True)
    )
    messages = broadcast(strategy, base, 2)
    replies = [reply(m, u, w, i) for i, (m, (u, w)) in enumerate(zip(messages, sent, strict=True))]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert difference(tensors_of(arrays), mean(sent)) <= 1e-6


def test_the_inputs_of_a_other_basis_round_are_not_changed() -> None:
    base, other = state(), state(3)
    sent = [(permuted(other, seed), 10.0) for seed in range(2)]
    messages = broadcast(
        strategy := FedRot(config_of(NAME), other_basis=OtherBasis(model=build)), base, 2
    )
    replies = [reply(m, u, w, i) for i, (m, (u, w)) in enumerate(zip(messages, sent, strict=True))]
    before: list[dict[str, Tensor]] = [
        copy.deepcopy(tensors_of(message.content["arrays"])) for message in replies
    ]
    strategy.aggregate_train(1, replies)
    for was, message in zip(before, replies, strict=True):
        assert difference(tensors_of(message.content["arrays"]), was) == 0
