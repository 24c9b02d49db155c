"""Alignment in front of every strategy and every privacy wrapper of Flower, end to
end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from flwr.serverapp.strategy.result import Result
from flwr.supercore.differential_privacy import KEY_NORM_BIT
from flwr.supercore.privacy_accounting import SamplingMethod
from torch import nn

import fedrot
from fedrot.strategies import FedRot, OtherBasis, align_mod
from tests.models import EAGER, config_of, near, squared_distance
from tests.strategies.classifier import NAME, SYMMETRY, build, error, permuted, state
from tests.strategies.fakes import (
    broadcast,
    grid_of,
    in_front_of,
    model_in,
    node_of,
    reply,
    round_of,
    tensors_of,
)

CONFIG, ROUNDS, CLIENTS = config_of(NAME), 2, 7
COMMON = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}

#: Clips every client, so that clipping shows.
CLIP = 0.2
FIXED = {"noise_multiplier": 0.0, "clipping_norm": CLIP, "num_sampled_clients": CLIENTS}
ADAPTIVE = {
    "noise_multiplier": 0.0,
    "initial_clipping_norm": CLIP,
    "num_sampled_clients": CLIENTS,
}

#: What is left of a gap, relative to how far two rounds move the model.
ROUNDED = 1e-4


@dataclass(frozen=True)
class Case:
    """A strategy, its arguments, the clients' mods that belong to it, and what rounding
    does to it.
    """

    strategy: type[Strategy]
    settings: dict[str, Any] = field(default_factory=dict)
    mods: tuple[Any, ...] = ()
    rounding: float = ROUNDED

    def arguments(self):
        """Return the arguments of the strategy, of a wrapper around FedAvg where it is
        one.
        """
        if issubclass(self.strategy, FedAvg):
            return (), self.settings | COMMON
        return (FedAvg(**COMMON),), self.settings

    def plain(self):
        args, settings = self.arguments()
        return self.strategy(*args, **settings)

    def aligned(self, **ours):
        """Return the strategy with alignment in front; where clients clip, they align
        themselves.
        """
        args, settings = self.arguments()
        chosen = None if self.mods else replace(EAGER, anchor="global")
        given = {"alignment": chosen, **ours}
        return in_front_of(self.strategy)(CONFIG, *args, **settings, **given)


SERVER_SIDE = {
    "server, fixed": Case(DifferentialPrivacyServerSideFixedClipping, FIXED),
    "server, adaptive": Case(DifferentialPrivacyServerSideAdaptiveClipping, ADAPTIVE),
}
CLIENT_SIDE = {
    "client, fixed": Case(
        DifferentialPrivacyClientSideFixedClipping, FIXED, (fixedclipping_mod,)
    ),
    "client, adaptive": Case(
        DifferentialPrivacyClientSideAdaptiveClipping, ADAPTIVE, (adaptiveclipping_mod,)
    ),
}
CASES = {
    "FedAvgM": Case(FedAvgM, {"server_learning_rate": 0.7, "server_momentum": 0.9}),
    "FedAdam": Case(FedAdam, {"eta": 0.01}),
    "FedYogi": Case(FedYogi, {"eta": 0.01}),
    "FedAdagrad": Case(FedAdagrad, {"eta": 0.01}),
    "FedProx": Case(FedProx, {"proximal_mu": 0.1}),
    "FedMedian": Case(FedMedian),
    "FedTrimmedAvg": Case(FedTrimmedAvg, {"beta": 0.2}),
    "Krum": Case(Krum, {"num_malicious_nodes": 1}),
    "MultiKrum": Case(MultiKrum, {"num_malicious_nodes": 1, "num_nodes_to_select": 3}),
    # It takes the clients nearest to the median, weight by weight: rounding decides
    # where two are equally near on either side.
    "Bulyan": Case(Bulyan, {"num_malicious_nodes": 1}, rounding=0.02),
    "QFedAvg": Case(QFedAvg, {"q": 0.5, "client_learning_rate": 0.5}),
    **SERVER_SIDE,
    **CLIENT_SIDE,
}


#: Strategies that subtract the broadcast model.
COMPARING = ("FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "QFedAvg")

#: Buffers that Flower's own arithmetic fails on, or counts as distance between clients.
INTEGERS = {"steps": torch.tensor(7), "mask": torch.tensor([True, False])}


def client(index, scramble, mods):
    """Return a node that trains from what it receives; no two clients move equally
    far.
    """

    def train(message, context):
        received = model_in(message)
        number = round_of(message)
        weights = {
            name: tensor for name, tensor in received.items() if name not in INTEGERS
        }
        update = near(weights, 0.01 * (1 + 0.3 * index), 10 * number + index)
        if scramble:
            update = fedrot.random_equivalent(update, SYMMETRY, 100 * number + index)
        if "steps" in received:
            update |= {
                "steps": torch.tensor(1000 * index),
                "mask": torch.tensor([False, True]),
            }
        return reply(
            message, update, 10 + 3 * index, index, train_loss=0.5 + 0.1 * index
        )

    app = ClientApp()
    app.train(mods=list(mods))(train)
    return node_of(app)


def run(
    strategy,
    scramble,
    mods=(),
    rounds=ROUNDS,
    **more,
):
    """Run rounds; whatever noise is drawn is the same in all runs."""
    np.random.seed(0)
    grid = grid_of(client(i, scramble, mods) for i in range(CLIENTS))
    return strategy.start(grid, ArrayRecord({**state(), **more}), rounds)


@cache
def finished(name, scramble, aligned):
    """Return the end of a case, with alignment where it belongs or without."""
    case = CASES[name]
    at_clients = (align_mod(CONFIG, EAGER),) if aligned and case.mods else ()
    return run(
        case.aligned() if aligned else case.plain(), scramble, (*case.mods, *at_clients)
    )


def gap(one, other):
    left, right = (
        tensors_of(r.arrays) if isinstance(r, Result) else r for r in (one, other)
    )
    assert left.keys() == right.keys()
    return squared_distance(left, right) ** 0.5


@pytest.mark.parametrize("name", CASES)
def test_scrambled_clients_end_where_unscrambled_ones_do(name):
    case = CASES[name]
    honest = finished(name, scramble=False, aligned=True)
    moved = gap(honest, state())
    assert gap(honest, finished(name, scramble=True, aligned=False)) > 0.5 * moved
    assert len(honest.train_metrics_clientapp) == ROUNDS
    # Otherwise float64 is what clients receive from the second round on.
    assert {array.dtype for array in honest.arrays.values()} == {"float32"}
    if case.mods:
        assert (
            gap(honest, finished(name, scramble=True, aligned=True))
            < case.rounding * moved
        )
        return
    # Integer buffers are averaged or play no part.
    scrambled = tensors_of(run(case.aligned(), True, **INTEGERS).arrays)
    averaged = {"steps": torch.tensor(3632), "mask": torch.tensor([False, True])}
    of_the_mean = name in ("FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedProx")
    for buffer, value in (averaged if of_the_mean else INTEGERS).items():
        assert torch.equal(scrambled.pop(buffer), value)
    assert gap(honest, scrambled) < case.rounding * moved
    if name in (*COMPARING, "Krum"):
        # The same, had the clients aligned: what the strategy is given and what it does
        # do not change.
        at_clients = run(case.plain(), True, (align_mod(CONFIG, EAGER),))
        assert gap(scrambled, at_clients) < case.rounding * moved


def idle(index, other):
    """Return a node that sends what it received in other coordinates, the stream's too
    if ``other``.
    """

    def answer(message):
        received = model_in(message)
        move = (
            permuted if other else partial(fedrot.random_equivalent, symmetry=SYMMETRY)
        )
        turned = move(received, seed=index)
        return reply(message, turned, 10 + 3 * index, index, train_loss=0.5)

    return answer


CANONICAL = fedrot.AlignmentOptions(
    ("attention", "ffn"), anchor="global", canonical=True
)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        *((name, None) for name in (*COMPARING, *SERVER_SIDE, "Krum")),
        ("FedAdam", 1),
        *((name, CLIENTS - 1) for name in ("FedAvgM", "FedAdam", "QFedAvg", "Krum")),
        # Their step differs from FedAdam's only in its second moments.
        pytest.param("FedYogi", CLIENTS - 1, marks=pytest.mark.long),
        pytest.param("FedAdagrad", CLIENTS - 1, marks=pytest.mark.long),
    ],
)
def test_clients_that_learned_nothing_change_no_function(name, others):
    """In canonical rounds (None), and where many come from another basis, whose
    coordinates it takes.

    A strategy that compares updates with the broadcast model is given that in these
    coordinates.
    """
    grid = grid_of(idle(i, other=i < (others or 0)) for i in range(CLIENTS))
    ours = {"alignment": CANONICAL}
    if others:
        ours = {
            "alignment": fedrot.AlignmentOptions(),
            "other_basis": OtherBasis(build),
        }
    result = (
        CASES[name]
        .aligned(**ours)
        .start(grid, ArrayRecord(state()), 1 if others else ROUNDS)
    )
    if others:
        assert result.train_metrics_clientapp[1]["fedrot-groups-moved"] > 0
    else:
        assert gap(result, state()) > 0.1
    assert error(result.arrays, state()) < ROUNDED


@pytest.mark.parametrize("name", ["server, adaptive", "client, adaptive"])
def test_the_clipping_norm_adapts_to_aligned_updates(name):
    case = CASES[name]
    mods = (*case.mods, align_mod(CONFIG, EAGER)) if case.mods else ()
    norms = []
    for scramble in (False, True):
        strategy = case.aligned()
        run(strategy, scramble, mods)
        norms.append(strategy.clipping_norm)
    assert norms[0] == norms[1] != CLIP


# Differential privacy


def test_a_norm_bit_is_0_or_1():
    wrapper = in_front_of(DifferentialPrivacyClientSideAdaptiveClipping)
    strategy = wrapper(
        None, FedAvg(), 1.0, 3, clipped_count_stddev=10.0, alignment=None
    )
    asked = zip(broadcast(strategy, {"w": torch.zeros(3)}), (1e9, 1, 0), strict=True)
    sent = [
        reply(message, {"w": torch.ones(3)}, 1, **{KEY_NORM_BIT: bit})
        for message, bit in asked
    ]
    _, metrics = strategy.aggregate_train(1, sent)
    assert metrics["fedrot-replies-dropped"] == 1


class Ledger:
    config = SimpleNamespace(
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
        population_size=CLIENTS,
        max_epsilon=None,
    )

    def __init__(self):
        self.releases = 0

    def compose(self, event):
        self.releases += 1

    def get_privacy_spent(self):
        return SimpleNamespace(
            epsilon=float(self.releases), delta=1e-5, num_releases=self.releases
        )


def with_metrics(change):
    """Return a mod that changes the metrics of a reply, given its node."""

    def mod(message, context, call_next):
        answer = call_next(message, context)
        change(answer.content.metric_records["metrics"], message.metadata.dst_node_id)
        return answer

    return mod


def test_an_accountant_is_served_with_alignment_in_front():
    equal = with_metrics(lambda m, _: m.update({"num-examples": 1}))
    results = []
    for scramble in (False, True):
        ledger = Ledger()
        given = {**FIXED, "noise_multiplier": 0.01, "accountant": ledger}
        case = Case(DifferentialPrivacyServerSideFixedClipping, given)
        results.append(run(case.aligned(), scramble, (equal,)))
        assert ledger.releases == ROUNDS
    assert gap(*results) < ROUNDED * gap(results[0], state())


def test_one_client_moves_the_sum_by_no_more_than_it_may():
    honest = [
        fedrot.random_equivalent(near(state(), 0.05, i), SYMMETRY, i)
        for i in range(1, CLIENTS)
    ]
    sums = []
    for seed, scale in ((3, 1.0), (54, 30.0)):
        updates = [
            {name: scale * tensor for name, tensor in state(seed).items()},
            *honest,
        ]
        grid = grid_of(
            (lambda message, u=update: reply(message, u, 10)) for update in updates
        )
        result = (
            SERVER_SIDE["server, fixed"].aligned().start(grid, ArrayRecord(state()), 1)
        )
        sums.append(tensors_of(result.arrays))
    assert 0 < CLIENTS * squared_distance(*sums) ** 0.5 <= 2 * CLIP


#: One client would move the others' updates, so that clipping its own bounds nothing:
#: by its part in the anchor, or if it is the heaviest of another basis. Others have
#: clipped before alignment.
UNSAFE = [
    *(
        (name, {"alignment": fedrot.AlignmentOptions(anchor=anchor)}, "anchor='global'")
        for name in SERVER_SIDE
        for anchor in sorted(set(fedrot.alignment.anchors.ANCHORS) - {"global"})
    ),
    (
        "server, fixed",
        {"other_basis": OtherBasis(lambda: nn.Linear(1, 1))},
        "anchor='global'",
    ),
    *(
        (name, {"alignment": fedrot.AlignmentOptions()}, "align_mod")
        for name in CLIENT_SIDE
    ),
]


@pytest.mark.parametrize(("name", "given", "word"), UNSAFE)
def test_what_breaks_the_guarantee_of_privacy_is_refused(name, given, word):
    with pytest.raises(fedrot.FedrotError, match=word):
        CASES[name].aligned(**given)


@pytest.mark.parametrize("name", SERVER_SIDE | CLIENT_SIDE)
def test_a_privacy_wrapper_is_refused_around_a_strategy_that_aligns_or_fits_a_head(
    name,
):
    """Before anybody trains; around one that moves nothing it is fine."""
    case = CASES[name]
    for settings, word in (
        ({}, r"clips updates before .*class Private\(Aligned, "),
        (
            {"alignment": None, "fit_head": "classifier"},
            r"other sums of the clients\. Omit fit_head",
        ),
    ):
        ours = case.strategy(FedRot(CONFIG, **settings, **COMMON), **case.settings)
        with pytest.raises(fedrot.FedrotError, match=word):
            run(ours, True, case.mods)
    ours = case.strategy(FedRot(CONFIG, alignment=None, **COMMON), **case.settings)
    result = run(ours, True, (*case.mods, align_mod(CONFIG, EAGER)))
    expected = finished(name, scramble=True, aligned=True)
    assert gap(result, expected) < ROUNDED * gap(expected, state())


@pytest.mark.parametrize("name", CASES)
def test_without_a_good_reply_the_model_stays(name):
    # Each with a fault of its own: one fault of all would end the run.
    broken = with_metrics(lambda metrics, node: metrics.update({"num-examples": -node}))
    case = CASES[name]
    result = run(case.aligned(), False, (*case.mods, broken), rounds=1)
    assert result.arrays.object_id == ArrayRecord(state()).object_id
    assert result.train_metrics_clientapp[1]["fedrot-replies-dropped"] == CLIENTS
