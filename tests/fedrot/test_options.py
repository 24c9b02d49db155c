"""Options: what they restrict, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedrot
from fedrot.symmetry import NO_LAYER
from tests import families
from tests.fedrot.pairs import touched_by
from tests.models import (
    CASES,
    EVERYTHING,
    FULL,
    LAYERS,
    logits,
    state_of,
    symmetry_for,
)


def test_layers_and_parts_restrict_what_moves() -> None:
    name = "bert-classifier"
    names, anchor, symmetry = CASES[name].names, state_of(name), symmetry_for(name)
    update = state_of(name, seed=3)
    chosen: list[tuple[Any, tuple[int, ...]]] = [
        ("all", (0, 1)),
        ("first:1", (0,)),
        ("last:1", (1,)),
        ("first:9", (0, 1)),
        ("last:0", ()),
        ([0], (0,)),
        ((1, 0), (0, 1)),
        ([], ()),
    ]
    for layers, expected in chosen:
        for parts in (("attention",), ("ffn",), FULL):
            options = fedrot.AlignmentOptions(parts=parts, layers=layers, chance=0)
            aligned = fedrot.align(update, anchor, symmetry, options).apply(update)
            changed = {key for key in update if not torch.equal(aligned[key], update[key])}
            assert changed == touched_by(names, parts, expected), (layers, parts)


@pytest.mark.parametrize(
    "layers",
    ["", "first", "first:", "first:-1", "last:x", "middle:1", "first:1.5", "first:²", [2], [0, -1]],
)
def test_bad_layers_are_refused(layers: Any) -> None:
    state = state_of("bert-classifier")
    with pytest.raises(fedrot.FedrotError, match=r"(?i)layer"):
        fedrot.align(
            state, state, symmetry_for("bert-classifier"), fedrot.AlignmentOptions(layers=layers)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": ("atention",)}, "atention"),
        ({"parts": "ffn"}, "part"),
        ({"chance": -1.0}, "chance"),
        ({"chance": float("nan")}, "chance"),
        ({"chance": float("inf")}, "chance"),
        ({"within_heads": "order"}, "within_heads"),
        ({"activation_weight": -0.1}, "activation_weight"),
        ({"activation_weight": 1.1}, "activation_weight"),
        ({"activation_weight": float("nan")}, "activation_weight"),
    ],
)
def test_bad_options_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fedrot.FedrotError, match=message):
        fedrot.AlignmentOptions(**settings)


def test_the_whole_model_has_a_name_and_parts_may_be_any_sequence() -> None:
    assert fedrot.AlignmentOptions(parts="whole") == fedrot.AlignmentOptions(fedrot.WHOLE_MODEL)
    assert fedrot.AlignmentOptions(parts=["heads", "ffn"]) == fedrot.AlignmentOptions(("heads", "ffn"))
    assert len({fedrot.AlignmentOptions(parts=["heads"]), fedrot.AlignmentOptions(("heads",))}) == 1


def test_random_equivalent_refuses_unknown_parts() -> None:
    with pytest.raises(fedrot.FedrotError, match="neurons"):
        fedrot.random_equivalent(
            state_of("bert-classifier"), symmetry_for("bert-classifier"), parts=("neurons",)
        )


@pytest.mark.parametrize("layers", ["first:1", [1], []])
def test_layers_do_not_restrict_what_belongs_to_none(layers: Any) -> None:
    """The residual stream and the task head are of the whole model, whatever layers are chosen."""
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), state_of(name, 3), symmetry_for(name)
    options = fedrot.AlignmentOptions(parts=EVERYTHING, layers=layers)
    alignment = fedrot.align(update, anchor, symmetry, options)
    chosen = options.layer_indices(LAYERS)
    inside = {move.group.layer for move in alignment.moves} - {NO_LAYER}
    assert inside == set(chosen)
    assert {m.group.part for m in alignment.moves if m.group.layer == NO_LAYER} == {"residual", "output"}
    rows = alignment.report.rows()
    assert {row["layer"] for row in rows} == {NO_LAYER, *chosen}
    assert (logits(name, alignment.apply(update)) - logits(name, update)).abs().max() <= 1e-10


def test_parts_that_cannot_be_moved_are_left_out_but_the_stream() -> None:
    whole = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL)
    bloom = whole.movable(families.symmetry_for("bloom"))
    assert bloom.parts == tuple(part for part in fedrot.WHOLE_MODEL if part != "heads")
    assert whole.movable(families.symmetry_for("xglm")).parts == fedrot.WHOLE_MODEL
    assert whole.movable(families.symmetry_for("gpt2")) == whole
