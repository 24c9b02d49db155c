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
    largest_difference,
    logits,
    near,
    squared_distance,
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
        ({"ridge": -1.0}, "ridge"),
        ({"ridge": float("nan")}, "ridge"),
        ({"chance": -1.0}, "chance"),
        ({"chance": float("nan")}, "chance"),
        ({"chance": float("inf")}, "chance"),
        ({"threshold": 1.0}, "threshold"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"sweeps": 0}, "sweeps"),
        ({"restarts": -1}, "restarts"),
        ({"within_heads": "order"}, "within_heads"),
        ({"activation_weight": -0.1}, "activation_weight"),
        ({"activation_weight": 1.1}, "activation_weight"),
        ({"activation_weight": float("nan")}, "activation_weight"),
        ({"tolerance": -1e-3}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
    ],
)
def test_bad_options_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fedrot.FedrotError, match=message):
        fedrot.AlignmentOptions(**settings)


def test_random_equivalent_refuses_unknown_parts() -> None:
    with pytest.raises(fedrot.FedrotError, match="neurons"):
        fedrot.random_equivalent(
            state_of("bert-classifier"), symmetry_for("bert-classifier"), parts=("neurons",)
        )


def test_threshold_skips_small_gains_and_says_so() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), symmetry_for(name)
    update = near(anchor, 0.3)
    free = fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=FULL, chance=0))
    shares = {row["group"]: 1 - row["after"] / row["before"] for row in free.report.rows()}
    options = fedrot.AlignmentOptions(parts=FULL, threshold=0.9, chance=0)
    strict = fedrot.align(update, anchor, symmetry, options)
    assert max(shares.values()) < 0.9
    assert not strict.moves
    assert largest_difference(strict.apply(update), update) == 0
    assert strict.report.before == strict.report.after == pytest.approx(free.report.before)
    for row in strict.report.rows():
        # Certified neurons and heads that stay put had nothing to skip.
        found = shares[row["group"]] != 0
        assert row["skipped"] is found
        assert row["moved"] == 0
        assert row["before"] == row["after"]
    assert sum(row["skipped"] for row in strict.report.rows()) >= 4
    # A large gain passes the same threshold.
    moved = fedrot.random_equivalent(update, symmetry, 1, ("attention",))
    passed = fedrot.align(moved, anchor, symmetry, fedrot.AlignmentOptions(threshold=0.5))
    assert {move.group.part for move in passed.moves} == {"attention"}


@pytest.mark.parametrize("scrambled", [("heads", "attention"), ("heads",)])
def test_threshold_never_separates_heads_from_their_rotation(scrambled: tuple[str, ...]) -> None:
    """A head order is chosen for the rotation that follows, which stays however small its own gain."""
    name = "bert-classifier"
    anchor, symmetry = state_of(name), symmetry_for(name)
    noisy = near(anchor, 0.2)
    update = fedrot.random_equivalent(noisy, symmetry, 5, scrambled)
    options = fedrot.AlignmentOptions(parts=("heads", "attention"), threshold=0.2, chance=0)
    alignment = fedrot.align(update, anchor, symmetry, options)
    moved = {move.group.name for move in alignment.moves}
    for layer in range(2):
        group = f"encoder.layer.{layer}."
        assert {f"{group}heads", f"{group}qk", f"{group}vo"} <= moved
    assert not any(row["skipped"] for row in alignment.report.rows())
    assert squared_distance(alignment.apply(update), anchor) < 0.2 * squared_distance(update, anchor)
    # The same small rotations are skipped where no head has moved.
    still = fedrot.align(noisy, anchor, symmetry, options)
    assert not still.moves


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
