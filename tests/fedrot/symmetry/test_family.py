"""The description language: stacks, conditions, spaces, buffers."""

from __future__ import annotations

from typing import Any

import pytest

from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.describe.family import Config, Family, Names, Stack, When, optional
from fedrot.symmetry.describe.layers import Block, attention, feed_forward, together
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from fedrot.symmetry.describe.spaces import RESIDUAL, Space, embedding, linear, norm

CONFIG = {"depth": 2, "inner": 3, "none": None, "one": 1, "tower": {"depth": 1}}


def _ffn(config: Config, names: Names, p: str) -> Block:
    return feed_forward(p, 4, Units(f"{p}up"), Units(f"{p}down"))


def _two(config: Config, names: Names, p: str) -> tuple[Block, Block]:
    heads, projections = Heads(2, 3), Projections.separate(p, "qkvo")
    return attention(p, heads, projections, order="order"), _ffn(config, names, p)


def _family(*body: Any, **more: Any) -> Family:
    return Family("mine", ("mine",), body, **more)


def _groups(family: Family, names: Names = ()) -> list[tuple[int, str]]:
    return [(group.layer, group.name) for group in family.describe(CONFIG, names)[0].groups]


def test_layers_of_all_stacks_are_numbered_in_order() -> None:
    family = _family(Stack("first", "depth", _ffn), Stack("second", ("none", "one", "depth"), _ffn))
    assert _groups(family) == [(0, "first.0.ffn"), (1, "first.1.ffn"), (2, "second.0.ffn")]
    assert family.stacks == ("first", "second")


def test_a_stack_inside_each_layer_numbers_on() -> None:
    family = _family(Stack("groups", "depth", Stack("layers", "inner", _ffn)))
    names = [f"groups.{i}.layers.{j}.ffn" for i in range(2) for j in range(3)]
    assert _groups(family) == list(enumerate(names))


def test_a_section_of_the_configuration_describes_a_stack() -> None:
    assert _groups(_family(Stack("image", "depth", _ffn, section="tower"))) == [(0, "image.0.ffn")]


def test_first_blocks_of_all_layers_come_before_second_ones() -> None:
    """The heads of all layers share one order, and the bias that they add moves with them."""
    family = _family(Stack("s", "depth", _two, order="order", head_bias="bias.weight"))
    body, _ = family.describe(CONFIG, ())
    found = _groups(family)
    assert found[0] == (-1, "order")
    assert [layer for layer, _ in found[1:-2]] == sorted(layer for layer, _ in found[1:-2])
    assert found[-2:] == [(0, "s.0.ffn"), (1, "s.1.ffn")]
    assert body.groups[0].slots[-1].tensor == "bias.weight"
    assert body.axes["bias.weight"] == (None, None)
    within = {group.within for group in body.groups if group.part == "attention"}
    assert within == {"order"}


@pytest.mark.parametrize("present", [True, False])
def test_items_are_there_under_their_condition(present: bool) -> None:
    asked: list[tuple[Config, Names]] = []

    def condition(config: Config, names: Names) -> bool:
        asked.append((config, names))
        return present

    names = ("extra.weight",) if present else ()
    family = _family(
        embedding("tokens"),
        *optional(norm("extra")),
        When(condition, (Stack("more", "depth", _ffn),)),
        task_heads=(When("extra.weight", (linear("head", None, RESIDUAL),)),),
    )
    body, task_heads = family.describe(CONFIG, names)
    assert asked == [(CONFIG, names)]
    assert ("extra.weight" in body.axes) == ("head.weight" in task_heads) == present
    assert len(body.groups) == 2 * present
    assert family.stacks == ("more",)
    assert family.encoder == {"tokens", "extra", "more"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [((), RESIDUAL), (("a",), "small"), (("a", "b"), RESIDUAL), (("b",), RESIDUAL)],
)
def test_a_space_that_a_model_does_not_have_is_the_residual_stream(names: Names, expected: str) -> None:
    family = _family(
        embedding("tokens", "small"),
        task_heads=(norm("last", "small"), linear("head", None, "other")),
        spaces={"small": Space(SignedPermutation, present="a", absent="b")},
    )
    body, task_heads = family.describe(CONFIG, names)
    assert body.axes["tokens.weight"] == (None, expected)
    assert task_heads["last.weight"] == (f"|{expected}|",)
    assert task_heads["last.bias"] == (expected,)
    assert task_heads["head.weight"] == (None, "<other")


def test_buffers_are_known_by_the_end_of_their_names() -> None:
    names = ("embeddings.position_ids", "s.0.mask", "s.0.bitmask", "mask")
    family = _family(
        embedding("tokens"), task_heads=(), buffers={"mask": 3, "embeddings.position_ids": 2}
    )
    _, task_heads = family.describe(CONFIG, names)
    expected = {"embeddings.position_ids": 2, "s.0.mask": 3, "mask": 3}
    assert task_heads == {name: (None,) * axes for name, axes in expected.items()}


def test_axes_alone_are_a_block() -> None:
    block = together(norm("a"), Block(refused={"heads": "a reason"}), linear("b", None, RESIDUAL))
    assert block.axes == {**norm("a"), **linear("b", None, RESIDUAL)}
    assert (block.groups, block.refused) == ((), {"heads": "a reason"})
