"""The strategy with other families than BERT: scrambled clients give the unscrambled average."""

from __future__ import annotations

import pytest
from flwr.app import ArrayRecord

import fedrot
from fedrot.strategies import FedRot
from tests.families import MEMBERS, config_of, state_of, symmetry_for
from tests.models import near
from tests.strategies.fakes import broadcast, largest_difference, reply


@pytest.mark.parametrize("anchor", ["global", "running"])
@pytest.mark.parametrize("name", MEMBERS)
def test_scrambled_clients_of_every_family_give_the_unscrambled_average(name: str, anchor: str) -> None:
    base, symmetry = state_of(name), symmetry_for(name)
    honest = [near(base, 0.02, seed) for seed in range(3)]
    scrambled = [fedrot.random_equivalent(u, symmetry, seed) for seed, u in enumerate(honest)]
    results: list[ArrayRecord] = []
    for updates in (honest, scrambled):
        strategy = FedRot(config_of(name), anchor=anchor, fraction_evaluate=0.0)
        messages = broadcast(strategy, base)
        sent = enumerate(zip(messages, updates, strict=True))
        replies = [reply(m, u, 10 + i, i) for i, (m, u) in sent]
        arrays, metrics = strategy.aggregate_train(1, replies)
        assert arrays is not None
        assert metrics is not None
        results.append(arrays)
    assert largest_difference(*results) <= 1e-9
    # The metrics of the scrambled round say how far the clients had been apart.
    assert metrics["fedrot-distance-after"] < metrics["fedrot-distance-before"]
