"""Actions on a mixture of experts, and both ways in which transformers stores one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedrot
from fedrot.matching.descent import compact
from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.describe.mixture import ExpertNeurons, ExpertPermutation
from fedrot.symmetry.groups import Group
from fedrot.symmetry.moves import Move, apply_moves
from tests.families import model_of, outputs, state_of, symmetry_for
from tests.fedrot.oracles import seeded
from tests.models import EVERYTHING, largest_difference, squared_distance

EXPERTS, NEURONS = 3, 5
KIND, ONE = ExpertNeurons(EXPERTS, NEURONS), SignedPermutation(NEURONS)


def _elements() -> tuple[Tensor, Tensor]:
    rng = seeded(1)
    return KIND.random(rng), KIND.random(rng)


def test_each_expert_has_an_element_of_its_own() -> None:
    first, second = _elements()
    x = torch.randn(EXPERTS, NEURONS, 4, generator=seeded(2), dtype=torch.float64)
    for axis, tensor in ((1, x), (2, x.mT)):
        moved = KIND.act(first, tensor, axis)
        for i in range(EXPERTS):
            assert torch.equal(moved[i], ONE.act(first[i], tensor[i], axis - 1))
    for i in range(EXPERTS):
        assert torch.equal(KIND.inverse(first)[i], ONE.inverse(first[i]))
        assert torch.equal(KIND.compose(second, first)[i], ONE.compose(second[i], first[i]))
        assert torch.equal(KIND.on_fisher(first)[i], ONE.on_fisher(first[i]))
    moved_units = torch.cat([ONE.moved(row) for row in first])
    assert torch.equal(KIND.moved(first), moved_units)
    assert len(moved_units) == KIND.units == EXPERTS * NEURONS


def test_elements_from_elsewhere_are_checked() -> None:
    element, _ = _elements()
    assert KIND.contains(element)
    for wrong in (element[:2], element.double(), element.clamp(min=2), torch.zeros_like(element)):
        assert not KIND.contains(wrong)


def _groups() -> list[Group]:
    kinds = (ExpertPermutation, ExpertNeurons)
    return [group for group in symmetry_for("mixtral").groups if isinstance(group.kind, kinds)]


def test_experts_carry_their_neurons_where_moves_are_joined() -> None:
    state, rng = state_of("mixtral"), seeded(4)
    moves = [Move(group, group.kind.random(rng)) for _ in range(3) for group in reversed(_groups())]
    joined = compact(moves)
    assert len(joined) == len(_groups())
    assert largest_difference(apply_moves(state, joined), apply_moves(state, moves)) == 0


# The layout of saved models


def test_experts_that_are_stored_as_modules_keep_their_order(tmp_path: Path) -> None:
    """As transformers saves them, and had them in memory before version 5."""
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    assert "model.layers.1.block_sparse_moe.experts.2.w1.weight" in state
    symmetry = fedrot.symmetry_of(model.config, state)
    assert not symmetry.refused
    neurons = [group for group in symmetry.groups if group.part == "ffn"]
    assert len(neurons) == 2 * EXPERTS
    assert {type(group.kind) for group in neurons} == {SignedPermutation}
    moved = fedrot.random_equivalent(state, symmetry, 1, EVERYTHING)
    assert squared_distance(moved, state) > 1
    save_file(moved, file, metadata={"format": "pt"})
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    assert largest_difference(again, model.state_dict()) > 0.1
    expected = outputs("mixtral", model.state_dict())
    assert (outputs("mixtral", again) - expected).abs().max() <= 1e-9 * expected.abs().max()
    options = fedrot.AlignmentOptions(parts=EVERYTHING, canonical=False)
    assert largest_difference(fedrot.align(moved, state, symmetry, options).apply(moved), state) <= 1e-8
