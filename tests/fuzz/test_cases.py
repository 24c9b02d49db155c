"""The cases of a fuzzing run are shared out whole."""

from __future__ import annotations

from tests.fuzz import (
    test_configuration,
    test_io,
    test_partitions,
    test_replies,
    test_rounds,
    test_sums,
    test_symmetries,
)
from tests.fuzz.cases import WEIGHT, WEIGHTS


def test_weights_add_up() -> None:
    modules = (
        *(test_configuration, test_io, test_partitions, test_replies),
        *(test_rounds, test_sums, test_symmetries),
    )
    assert {name for module in modules for name in vars(module)} >= set(WEIGHTS)
    assert sum(WEIGHTS.values()) == WEIGHT
