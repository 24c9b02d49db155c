"""Replies from other bases: their residual streams are in orders of their own."""

from dataclasses import replace

import pytest
import torch
from transformers import BertForSequenceClassification

import fedrot
from fedrot.aggregation import Mean
from fedrot.strategies import FedRot, OtherBasis
from fedrot.strategies.client.moves import OTHER_BASIS_OPTIONS
from tests.models import (
    BARE,
    EAGER,
    config_of,
    near,
    squared_distance,
    state_of,
)
from tests.models import largest_difference as difference
from tests.strategies.classifier import (
    NAME,
    SYMMETRY,
    WHOLE,
    build,
    error,
    permuted,
    state,
)
from tests.strategies.fakes import (
    aggregated,
    broadcast,
    largest_difference,
    tensors_of,
)

CONFIG = config_of(NAME)
GLOBAL, RUNNING = (
    fedrot.AlignmentOptions(anchor=anchor) for anchor in ("global", "running")
)
BY_WEIGHTS = OtherBasis(options=WHOLE)
BY_PROBES = OtherBasis(build)


def play(strategy, base, sent):
    updates, weights = zip(*sent, strict=True)
    return aggregated(strategy, base, updates, weights)


def mean(sent):
    total = Mean()
    for update, weight in sent:
        total.add(update, weight)
    return total.result()


@pytest.mark.parametrize(
    ("alignment", "others"), [(GLOBAL, BY_PROBES), (RUNNING, BY_WEIGHTS)]
)
def test_permuted_copies_of_one_model_average_to_its_function(
    alignment, others, warnings
):
    base = state()
    other = state(3)
    sent = [(permuted(other, seed), 10.0 + seed) for seed in range(3)]
    result, _ = play(
        FedRot(CONFIG, alignment=alignment, other_basis=others), base, sent
    )
    assert error(result, other) <= 1e-4
    assert warnings() == ""
    lost, _ = play(FedRot(CONFIG, alignment=alignment), base, sent)
    assert error(lost, other) > 0.1
    assert (
        "3 of 3 replies seem not to have started from the broadcast model" in warnings()
    )


@pytest.mark.parametrize(
    ("heaviest", "alignment"), [(0, RUNNING), (1, GLOBAL), (2, RUNNING)]
)
def test_where_most_are_of_another_basis_the_heaviest_reply_is_the_anchor(
    alignment, heaviest
):
    weights = [5.0, 6.0, 7.0]
    weights[heaviest] = 9.0
    sent = [(permuted(state(3), seed), weights[seed]) for seed in range(3)]
    result, _ = play(
        FedRot(CONFIG, alignment=alignment, other_basis=BY_WEIGHTS), state(), sent
    )
    assert difference(tensors_of(result), sent[heaviest][0]) <= 1e-4


def test_unrelated_replies_are_matched_to_the_heaviest_by_weights_and_probes():
    """The oracle: ``align`` with activations of the same tokens, model by model."""
    sent = [(state(seed), weight) for seed, weight in ((3, 5.0), (4, 9.0), (5, 7.0))]
    result, _ = play(
        FedRot(CONFIG, alignment=GLOBAL, other_basis=BY_PROBES), state(), sent
    )
    evidence = fedrot.collect.activations.probing(build, CONFIG.to_dict(), SYMMETRY)
    anchor = sent[1][0]
    aligned = [
        (
            fedrot.align(
                u, anchor, SYMMETRY, OTHER_BASIS_OPTIONS, evidence(anchor, u)
            ).apply(u),
            w,
        )
        for u, w in sent
    ]
    assert difference(tensors_of(result), mean(aligned)) <= 1e-5
    assert difference(aligned[1][0], anchor) <= 1e-6
    by_weights, _ = play(
        FedRot(CONFIG, alignment=GLOBAL, other_basis=BY_WEIGHTS), state(), sent
    )
    assert largest_difference(result, by_weights) > 1e-3


@pytest.mark.parametrize(
    ("members", "anchor", "others", "accepted"),
    [
        (3, "running", BY_WEIGHTS, 1e-4),
        (1, "global", BY_WEIGHTS, 1e-4),
        (1, "running", BY_PROBES, 0.05),
    ],
)
def test_a_late_joiner_comes_into_the_broadcast_coordinates(
    members, anchor, others, accepted
):
    """Probes have a say in the rotations, so with a model these are not the weights'
    alone.
    """
    base = state()
    honest = [(near(base, 0.02, 30 + i), 4.0) for i in range(members)]
    last = near(base, 0.02, 30 + members)
    strategy = FedRot(
        CONFIG, alignment=replace(EAGER, anchor=anchor), other_basis=others
    )
    # The late joiner is the heaviest and comes first.
    expected, _ = play(strategy, base, [(last, 90.0), *honest])
    result, _ = play(strategy, base, [(permuted(last, 1), 90.0), *honest])
    assert largest_difference(expected, result) <= accepted
    distances = [squared_distance(tensors_of(r), base) for r in (expected, result)]
    assert distances[1] <= 1.5 * distances[0]


class Peeking(BertForSequenceClassification):
    """A head that looks at hidden units by their number."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, output_hidden_states=True, **kwargs)
        out.logits = out.logits + out.hidden_states[-1][:, 0, :3]
        return out


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        (
            NAME,
            lambda: Peeking(config_of(NAME)),
            "Moving residual changes this model's outputs",
        ),
        (
            "bert-bare",
            lambda: BARE["bert-bare"].build("eager"),
            "'residual'",
        ),
    ],
    ids=["peeking", "bare"],
)
def test_a_model_that_cannot_be_matched_as_a_whole_is_refused_before_clients_train(
    name, model, reason
):
    strategy = FedRot(config_of(name), other_basis=OtherBasis(model=model))
    for _ in range(2):
        with pytest.raises(fedrot.SymmetryError, match=f"Omit other_basis .*{reason}"):
            broadcast(strategy, state_of(name, dtype=torch.float32))


@pytest.mark.parametrize(
    ("of_another", "rounds", "builds"), [(False, 3, 1), (True, 1, 3)]
)
def test_the_model_is_built_in_the_first_round_without_the_callers_random_numbers(
    of_another, rounds, builds
):
    """Once to see what the model is, and in two copies to probe it."""
    drawn = []

    def initialised():
        before = torch.random.get_rng_state()
        model = build()
        drawn.append(not torch.equal(torch.random.get_rng_state(), before))
        return model

    base = state()
    sent = [
        (permuted(base, i) if of_another else near(base, 0.02, i), 1.0)
        for i in range(2)
    ]
    before = torch.random.get_rng_state()
    strategy = FedRot(CONFIG, other_basis=OtherBasis(model=initialised))
    for _ in range(rounds):
        play(strategy, base, sent)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert drawn == [True] * builds


def test_given_options_are_kept_where_a_model_is_given_too():
    """They are a promise: nothing is checked, and the stream stays if it is not among
    the parts.
    """
    base = state()
    sent = [(permuted(base, seed), 10.0) for seed in range(3)]
    options = fedrot.AlignmentOptions(parts=("ffn",))
    others = OtherBasis(options=options, model=lambda: Peeking(CONFIG))
    result, _ = play(FedRot(CONFIG, other_basis=others), base, sent)
    aligned = fedrot.align_round(sent, base, SYMMETRY, options)
    assert (
        difference(tensors_of(result), mean([(a.tensors, a.weight) for a in aligned]))
        <= 1e-5
    )


def test_a_bare_encoder_goes_on_as_ever():
    config = config_of("bert-bare")
    base = state_of("bert-bare", dtype=torch.float32)
    sent = [(near(base, 0.02, i), 1.0 + i) for i in range(3)]
    sent.append((state_of("bert-bare", 5, torch.float32), 1.0))
    expected, _ = play(FedRot(config), base, sent)
    result, _ = play(FedRot(config, other_basis=BY_WEIGHTS), base, sent)
    assert largest_difference(result, expected) == 0


def test_ordinary_rounds_are_the_same_to_the_last_bit():
    base = state()
    sent = [
        (fedrot.random_equivalent(near(base, 0.1, i), SYMMETRY, i), weight)
        for i, weight in enumerate((3.0, 5.0, 1.0))
    ]
    expected, stock = play(FedRot(CONFIG), base, sent)
    result, metrics = play(FedRot(CONFIG, other_basis=BY_PROBES), base, sent)
    assert largest_difference(expected, result) == 0
    assert stock == metrics


def test_without_alignment_no_model_is_built():
    def never():
        raise AssertionError("the model is not needed")

    sent = [(permuted(state(), seed), 10.0) for seed in range(2)]
    others = OtherBasis(model=never, at_clients=True)
    arrays, _ = play(FedRot(CONFIG, alignment=None, other_basis=others), state(), sent)
    assert difference(tensors_of(arrays), mean(sent)) <= 1e-6
