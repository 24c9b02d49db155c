"""The strategy with other families than BERT: scrambled clients give the unscrambled average."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flwr.app import ArrayRecord

import fedrot
from fedrot.strategies import FedRot
from fedrot.strategies.settings import OtherBasis
from tests.families import KINDS, config_of, model_of, state_of, symmetry_for
from tests.models import EAGER, near
from tests.strategies.fakes import aggregated, largest_difference


@pytest.mark.parametrize(("place", "name"), enumerate(KINDS))
def test_scrambled_clients_of_every_family_give_the_unscrambled_average(place: int, name: str) -> None:
    base, symmetry = state_of(name), symmetry_for(name)
    honest = [near(base, 0.02, seed) for seed in range(3)]
    scrambled = [fedrot.random_equivalent(u, symmetry, seed) for seed, u in enumerate(honest)]
    options = replace(EAGER, anchor=("global", "running")[place % 2])
    (expected, _), (found, metrics) = (
        aggregated(FedRot(config_of(name), alignment=options), base, updates, (10, 11, 12))
        for updates in (honest, scrambled)
    )
    assert largest_difference(found, expected) <= 1e-9
    assert metrics["fedrot-share-removed"] > 0


@pytest.mark.parametrize(
    ("name", "rotates", "asked"),
    [("vit", True, False), ("gpt2", False, True), ("llama", True, False), ("bert", False, True)],
)
def test_replies_from_other_bases_are_matched_in_every_family(
    name: str, rotates: bool, asked: bool
) -> None:
    """By weights, and where texts are read and the stream is permuted by random tokens, too.

    GPT-2 ties its tables, so that its stream is permuted.
    """
    model, symmetry = model_of(name).float(), symmetry_for(name)
    base = {key: value.float() for key, value in state_of(name).items()}
    other = fedrot.random_equivalent(base, symmetry, 3, fedrot.WHOLE_MODEL)
    strategy = FedRot(config_of(name), other_basis=OtherBasis(model=lambda: model))
    arrays, _ = aggregated(strategy, base, [base, other, other])
    # Most replies have a base of their own: the first of these is the anchor of this round.
    assert strategy.other_bases is not None
    assert strategy.other_bases.rotates is rotates
    expected = fedrot.canonical(other, symmetry) if rotates else other
    assert largest_difference(arrays, ArrayRecord(expected)) <= 1e-4
    assert (strategy.other_bases.evidence is not None) == asked
