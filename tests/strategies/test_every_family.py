"""The strategy with other families than BERT: scrambled clients give the unscrambled
average.
"""

from dataclasses import replace

import pytest

import fedrot
from fedrot.strategies import FedRot
from tests.families import KINDS, config_of, state_of, symmetry_for
from tests.models import EAGER, near
from tests.strategies.fakes import aggregated, largest_difference


@pytest.mark.parametrize(("place", "name"), enumerate(KINDS))
def test_scrambled_clients_of_every_family_give_the_unscrambled_average(place, name):
    base = state_of(name)
    symmetry = symmetry_for(name)
    honest = [near(base, 0.02, seed) for seed in range(3)]
    scrambled = [
        fedrot.random_equivalent(u, symmetry, seed) for seed, u in enumerate(honest)
    ]
    options = replace(EAGER, anchor=("global", "running")[place % 2])
    (expected, _), (found, metrics) = (
        aggregated(
            FedRot(config_of(name), alignment=options), base, updates, (10, 11, 12)
        )
        for updates in (honest, scrambled)
    )
    assert largest_difference(found, expected) <= 1e-9
    assert metrics["fedrot-share-removed"] > 0
