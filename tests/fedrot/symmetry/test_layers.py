"""Where the units of fused projections lie, and heads that keep their order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedrot
from fedrot.symmetry.describe.layers import attention
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from tests.families import MEMBERS, outputs, state_of, symmetry_for

#: Four query heads of two units, two to a key head: q0 q1 k0 v0 q2 q3 k1 v1.
HEADS = Heads(4, 2, 2)


def _places(units: Units, heads: int) -> list[list[int]]:
    return [slot.slice.of(torch.arange(16), 0).tolist() for slot in units.written(heads, 2)]


def test_queries_lie_beside_their_key_and_value() -> None:
    found = Projections.fused("qkv", HEADS, Units("out"), by_head=True)
    assert _places(found.query, 4) == [[0, 1, 2, 3, 8, 9, 10, 11]] * 2
    assert _places(found.key, 2) == [[4, 5, 12, 13]] * 2
    assert _places(found.value, 2) == [[6, 7, 14, 15]] * 2
    found = Projections.fused("qkv", HEADS, Units("out"))
    assert _places(found.query, 4) == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
    assert _places(found.key, 2) == [[8, 9, 10, 11]] * 2
    assert _places(found.value, 2) == [[12, 13, 14, 15]] * 2


def test_a_part_of_heads_that_lie_side_by_side_has_no_place() -> None:
    projections = Projections.fused("qkv", HEADS, Units("out"), by_head=True)
    with pytest.raises(fedrot.SymmetryError, match=r"'qkv' stores 2 heads side by side"):
        attention("", replace(HEADS, rotary=1), projections)


@pytest.mark.parametrize("ordered", [False, True])
def test_ordered_heads_have_groups_inside_them_alone(ordered: bool) -> None:
    projections = Projections.fused("qkv", HEADS, Units("out"), by_head=True)
    block = attention("", replace(HEADS, ordered=ordered), projections)
    free = {"heads", "queries"}
    inside = {"qk", "vo", "qk.scale", "vo.scale"}
    assert {group.name for group in block.groups} == (inside if ordered else inside | free)
    assert {group.within for group in block.groups} == ({""} if ordered else {"heads", ""})
    assert block.refused.keys() == ({"heads"} if ordered else set())


def test_alibi_orders_query_heads_that_share_a_key_head_too() -> None:
    member = replace(
        MEMBERS["falcon-7b"], settings={**MEMBERS["falcon-7b"].settings, "alibi": True}, attention=()
    )
    model = member.build("eager")
    symmetry = fedrot.symmetry_of(model.config, model.state_dict())
    assert {group.part for group in symmetry.groups} == {"residual", "attention", "rescale", "ffn"}
    assert fedrot.check_function(model, model.config, symmetry, ("residual", "attention", "ffn")) <= 1e-9


def test_whole_models_with_alibi_are_matched_without_the_heads() -> None:
    state, symmetry = state_of("bloom", 1), symmetry_for("bloom")
    options = fedrot.AlignmentOptions(parts=("residual", "output", "attention", "ffn"), canonical=False)
    aligned = fedrot.align(state, state_of("bloom"), symmetry, options).apply(state)
    expected = outputs("bloom", state)
    assert (outputs("bloom", aligned) - expected).abs().max() <= 1e-9 * expected.abs().max()
