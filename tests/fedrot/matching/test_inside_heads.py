"""Rotary phases and signs against random elements."""

import pytest
import torch

from fedrot import AlignmentOptions
from fedrot.matching.rotary import RotarySolver
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from tests.fedrot.oracles import gap, normal, seeded

KEY_HEADS, FREQUENCIES = 3, 4
#: One head of large evidence, one of ordinary and one of small.
SIZES = torch.tensor([100.0, 1.0, 0.01], dtype=torch.float64)[:, None]


@pytest.mark.parametrize("action", [RotaryPhases, RotarySigns])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_best_turn_of_every_frequency_is_not_beaten(action, interleaved):
    """Evidence from blocks and from cross matrices agrees with what elements make of
    the blocks.
    """
    dim, options, rng = 2 * FREQUENCIES, AlignmentOptions(), seeded(4)
    group = action(KEY_HEADS, dim, interleaved)
    solver = RotarySolver()
    shape = (KEY_HEADS, dim, 5)
    a, c = normal(rng, 2, KEY_HEADS * dim, 5)
    evidence = solver.of_cross(group, a.reshape(shape) @ c.reshape(shape).mT)
    assert gap(solver.similarity(group, [(a, c)]), evidence) <= 1e-12

    def reached(element):
        return (a * group.act(element, c, 0)).reshape(KEY_HEADS, -1).sum(1)

    best = solver.best(group, evidence, options)
    for element in (best, *(group.random(rng) for _ in range(20))):
        assert torch.allclose(solver.value(group, element, evidence), reached(element))
        assert bool((reached(element) <= reached(best) + 1e-9).all())
    if action is RotaryPhases:
        small = [best + 1e-3 * group.random(rng) for _ in range(20)]
        assert all(bool((reached(element) < reached(best)).all()) for element in small)
    still = group.compose(group.inverse(best), best)
    assert torch.allclose(solver.still(group, evidence), reached(still))
    other = solver.best(group, SIZES * evidence, options)
    assert torch.allclose(best.double(), other.double(), rtol=0, atol=1e-12)
    kept = solver.best(group, evidence, AlignmentOptions(within_heads="permutation"))
    assert not group.moved(kept).any()
