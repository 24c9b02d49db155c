"""Rotary phases and signs against what the definition says of each head alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedrot
from fedrot.matching.rotary import RotarySolver
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from tests.fedrot.oracles import seeded

HEADS, FREQUENCIES = 3, 4
#: One head of large evidence, one of ordinary and one of small.
SIZES = torch.tensor([100.0, 1.0, 0.01], dtype=torch.float64)[:, None]


@pytest.mark.parametrize("ridge", [0.1, 0.5])
def test_the_ridge_is_relative_to_the_largest_evidence_of_each_head(ridge: float) -> None:
    """Whatever other heads have seen, and in a matrix of pairs of heads likewise."""
    options = fedrot.AlignmentOptions(ridge=ridge)
    shape = (HEADS, HEADS, FREQUENCIES)
    evidence = SIZES * torch.randn(shape, generator=seeded(1), dtype=torch.complex128)
    phases = RotarySolver().best(RotaryPhases(HEADS, 2 * FREQUENCIES), evidence, options)
    signs = RotarySolver().best(RotarySigns(HEADS, 2 * FREQUENCIES), evidence, options)
    assert phases.shape == signs.shape == shape
    for i, j in np.ndindex(HEADS, HEADS):
        of_head = evidence[i, j].numpy()
        pulled = of_head + ridge * max(abs(s) for s in of_head)
        assert np.abs(phases[i, j].numpy() - np.angle(pulled)).max() <= 1e-12
        assert signs[i, j].tolist() == [-1 if s.real < 0 else 1 for s in pulled]
    assert {-1, 1} == set(signs.flatten().tolist())


@pytest.mark.parametrize("kind", [RotaryPhases, RotarySigns])
def test_the_best_elements_do_not_depend_on_the_unit_of_a_head_s_evidence(
    kind: type[RotaryPhases | RotarySigns],
) -> None:
    group, options = kind(HEADS, 2 * FREQUENCIES), fedrot.AlignmentOptions(ridge=0.3)
    evidence = torch.randn(HEADS, FREQUENCIES, generator=seeded(2), dtype=torch.complex128)
    one, other = (RotarySolver().best(group, e, options) for e in (evidence, SIZES * evidence))
    assert torch.allclose(one.double(), other.double(), rtol=0, atol=1e-12)
    assert group.moved(one).tolist() == [True] * HEADS
