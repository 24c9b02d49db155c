"""Fused projections that are refused, heads that keep their order, and stored
experts.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedrot import (
    AlignmentOptions,
    SymmetryError,
    check_function,
    random_equivalent,
    symmetry_of,
)
from fedrot.symmetry.describe.family import Family
from fedrot.symmetry.describe.layers import attention
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from fedrot.symmetry.describe.spaces import Space
from fedrot.symmetry.describe.task_heads import UNMEASURED
from fedrot.symmetry.signs import SignedPermutation
from tests.families import MEMBERS, model_of, outputs, state_of, symmetry_for
from tests.fedrot.oracles import gap
from tests.models import EVERYTHING, align_tensors, largest_difference, squared_distance


def test_rotary_heads_that_lie_beside_their_keys_and_values_are_refused():
    heads = Heads(4, 2, 2, rotary=1)
    projections = Projections.fused("qkv", heads, Units("out"), by_head=True)
    with pytest.raises(SymmetryError, match=r"'qkv' stores 2"):
        attention("", heads, projections)


def test_a_space_is_there_with_one_tensor_and_without_another():
    space = Space(present="a", absent="b")
    names = ((), ("a",), ("a", "b"), ("b",))
    assert [space.exists(found) for found in names] == [False, True, False, False]


def test_buffers_are_known_by_the_end_of_their_names():
    names = ("embeddings.position_ids", "s.0.mask", "s.0.bitmask", "mask")
    family = Family(
        "mine",
        ("mine",),
        (),
        (),
        features=UNMEASURED,
        buffers={"mask": 3, "embeddings.position_ids": 2},
    )
    expected = {"embeddings.position_ids": 2, "s.0.mask": 3, "mask": 3}
    assert family.describe({}, names)[1] == {
        name: (None,) * axes for name, axes in expected.items()
    }


def test_alibi_orders_query_heads_that_share_a_key_head_too():
    settings = {**MEMBERS["falcon-7b"].settings, "alibi": True}
    model = replace(MEMBERS["falcon-7b"], settings=settings).build("eager")
    symmetry = symmetry_of(model.config, model.state_dict())
    assert {group.part for group in symmetry.groups} == {"residual", "attention", "ffn"}
    assert {group.within for group in symmetry.groups} == {""}
    assert (
        check_function(model, model.config, symmetry, ("residual", "attention", "ffn"))
        <= 1e-9
    )


def test_experts_that_are_stored_as_modules_keep_their_order(tmp_path):
    """As transformers saves them, and had them in memory before version 5."""
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    symmetry = symmetry_of(model.config, state)
    assert not symmetry.refused
    neurons = [group for group in symmetry.groups if group.part == "ffn"]
    (experts,) = {
        g.action.units
        for g in symmetry_for("mixtral").groups
        if g.name.endswith("experts")
    }
    assert len(neurons) == 2 * experts
    assert {type(group.action) for group in neurons} == {SignedPermutation}
    moved = random_equivalent(state, symmetry, 1, EVERYTHING)
    assert squared_distance(moved, state) > 1
    save_file(moved, file, metadata={"format": "pt"})
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    assert largest_difference(again, model.state_dict()) > 0.1
    expected = outputs("mixtral", state_of("mixtral"))
    assert gap(outputs("mixtral", again), expected) <= 1e-9 * expected.abs().max()
    options = AlignmentOptions(parts=EVERYTHING, canonical=False)
    assert (
        largest_difference(align_tensors(moved, state, symmetry, options), state)
        <= 1e-8
    )
