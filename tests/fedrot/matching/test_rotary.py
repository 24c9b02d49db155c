"""Rotary phases and signs against what the definition says of each head alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedrot
from fedrot.matching.inside_heads import RotarySolver
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from tests.fedrot.oracles import seeded

HEADS, FREQUENCIES = 3, 4
#: One head of large evidence, one of ordinary and one of small.
SIZES = torch.tensor([100.0, 1.0, 0.01], dtype=torch.float64)[:, None]


@pytest.mark.parametrize("kind", [RotaryPhases, RotarySigns])
def test_the_best_elements_do_not_depend_on_the_unit_of_a_head_s_evidence(
    kind: type[RotaryPhases | RotarySigns],
) -> None:
    group, options = kind(HEADS, 2 * FREQUENCIES), fedrot.AlignmentOptions()
    evidence = torch.randn(HEADS, FREQUENCIES, generator=seeded(2), dtype=torch.complex128)
    one, other = (RotarySolver().best(group, e, options) for e in (evidence, SIZES * evidence))
    assert torch.allclose(one.double(), other.double(), rtol=0, atol=1e-12)
    assert group.moved(one).tolist() == [True] * HEADS


@pytest.mark.parametrize("kind", [RotaryPhases, RotarySigns])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_frequency_turns_its_own_two_coordinates(
    kind: type[RotaryPhases | RotarySigns], interleaved: bool
) -> None:
    """As a rotation of the head would, entry by entry; what is found from blocks and crosses agrees."""
    group, dim = kind(HEADS, 2 * FREQUENCIES, interleaved), 2 * FREQUENCIES
    element = group.random(seeded(3))
    turns = torch.zeros(HEADS, dim, dim, dtype=torch.float64)
    for head, f in np.ndindex(HEADS, FREQUENCIES):
        places = [2 * f, 2 * f + 1] if interleaved else [f, f + FREQUENCIES]
        value = float(element[head, f])
        angle = value if kind is RotaryPhases else (1 - value) * np.pi / 2
        cos, sin = np.cos(angle), np.sin(angle)
        block = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
        turns[head][np.ix_(places, places)] = block
    a, c = torch.randn(2, HEADS * dim, 5, generator=seeded(4), dtype=torch.float64)
    rotation = HeadRotation(HEADS, dim)
    for axis, x in ((0, c), (1, c.mT), (0, c[:, 0])):
        expected = rotation.act(turns, x, axis)
        assert (group.act(element, x, axis) - expected).abs().max() <= 1e-12
    solver, heads = RotarySolver(), (HEADS, dim, 5)
    cross = a.reshape(heads) @ c.reshape(heads).mT
    evidence = solver.of_cross(group, cross)
    assert (solver.similarity(group, [(a, c)]) - evidence).abs().max() <= 1e-12
    assert torch.allclose(solver.value(group, element, evidence), (turns * cross).sum((1, 2)))
