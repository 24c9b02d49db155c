"""Distances never grow, and the report tells the truth about them."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

import pytest
import torch

import fedrot
from fedrot.symmetry.moves import apply_moves
from tests.fedrot.pairs import PAIRS, only, touched_by
from tests.models import (
    CASES,
    EAGER,
    FEW,
    FULL,
    HEADS,
    NEURONS,
    WIDTH,
    State,
    largest_difference,
    squared_distance,
    state_of,
    symmetry_for,
)

SUBSETS = [subset for size in range(5) for subset in combinations(FULL, size)]
CHANCE = pytest.mark.parametrize("chance", [0.0, fedrot.AlignmentOptions.chance])


def _check_distances(
    name: str, pair: str, options: fedrot.AlignmentOptions, layers: tuple[int, ...] = (0, 1)
) -> None:
    names, symmetry = CASES[name].names, symmetry_for(name)
    anchor = state_of(name)
    update = PAIRS[pair](anchor, names)
    alignment = fedrot.align(update, anchor, symmetry, options)
    aligned = alignment.apply(update)
    before, after = squared_distance(update, anchor), squared_distance(aligned, anchor)
    assert after <= before * (1 + 1e-12)
    touched = touched_by(names, options.parts, layers)
    mine = squared_distance(only(update, touched), anchor)
    left = squared_distance(only(aligned, touched), anchor)
    report = alignment.report
    size = squared_distance(only(update, touched), {n: torch.zeros(()) for n in touched}) + mine
    assert report.before == pytest.approx(mine, rel=1e-9, abs=1e-20)
    assert report.after == pytest.approx(left, rel=1e-9, abs=1e-11 * size)
    assert report.before - report.after == pytest.approx(before - after, rel=1e-6, abs=1e-11 * size)
    assert report.share() * report.before == pytest.approx(before - after, rel=1e-6, abs=1e-11 * size)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", FEW)
@CHANCE
def test_distance_never_grows_and_is_reported(chance: float, name: str, pair: str) -> None:
    for parts in SUBSETS:
        _check_distances(name, pair, fedrot.AlignmentOptions(parts=parts, chance=chance))


@pytest.mark.parametrize("seed", range(6))
def test_distance_never_grows_for_unrelated_models(seed: int) -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), state_of(name, 10 + seed), symmetry_for(name)
    for parts in SUBSETS:
        options = fedrot.AlignmentOptions(parts=parts, chance=0)
        aligned = fedrot.align(update, anchor, symmetry, options).apply(update)
        assert squared_distance(aligned, anchor) <= squared_distance(update, anchor) * (1 + 1e-12)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("layers", ["first:1", "last:1", [1]])
def test_distance_report_of_some_layers(pair: str, layers: Any) -> None:
    chosen = (0,) if layers == "first:1" else (1,)
    for parts in (FULL, ("attention", "ffn")):
        options = fedrot.AlignmentOptions(parts=parts, layers=layers, chance=0)
        _check_distances("bert-classifier", pair, options, chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pair", ["near", "barely", "unrelated", "conflicting", "zero"])
def test_distance_never_grows_in_low_precision(pair: str, dtype: torch.dtype) -> None:
    name = "bert-classifier"
    names, symmetry = CASES[name].names, symmetry_for(name)
    anchor64 = state_of(name)
    update = {k: v.to(dtype) for k, v in PAIRS[pair](anchor64, names).items()}
    anchor = {k: v.to(dtype) for k, v in anchor64.items()}
    size = squared_distance(anchor, {k: torch.zeros(()) for k in anchor})
    aligned = fedrot.align(update, anchor, symmetry, EAGER).apply(update)
    before, after = squared_distance(update, anchor), squared_distance(aligned, anchor)
    # Storing a rotated weight rounds it: an error of the dtype's precision, relative to the weight.
    rounding = torch.finfo(dtype).eps * (before * size) ** 0.5 + torch.finfo(dtype).eps ** 2 * size
    assert after <= before + rounding


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", FEW)
@CHANCE
def test_every_row_of_the_report_is_true(chance: float, name: str, pair: str) -> None:
    """Replay the moves one by one and recompute each row's distances from the tensors."""
    names, symmetry = CASES[name].names, symmetry_for(name)
    anchor = state_of(name)
    update = PAIRS[pair](anchor, names)
    options = fedrot.AlignmentOptions(parts=FULL, chance=chance)
    alignment = fedrot.align(update, anchor, symmetry, options)
    moves = {move.group.name: move for move in alignment.moves}
    groups = symmetry.select(FULL)
    tensors = {group.name: {slot.tensor for slot in group.slots} for group in groups}
    current: State = dict(update)
    rows = alignment.report.rows()
    assert sorted(row["group"] for row in rows) == sorted(tensors)
    for row in rows:
        group = tensors[row["group"]]
        size = squared_distance(only(current, group), {n: torch.zeros(()) for n in group})
        measured = squared_distance(only(current, group), anchor)
        slack = 1e-11 * (size + measured)
        assert row["before"] == pytest.approx(measured, rel=1e-9, abs=1e-20)
        if row["group"] in moves:
            current = apply_moves(current, [moves[row["group"]]])
        else:
            assert row["moved"] == 0
        measured = squared_distance(only(current, group), anchor)
        assert row["after"] == pytest.approx(measured, rel=1e-9, abs=slack)
        assert row["of"] == (NEURONS if row["part"] == "ffn" else HEADS)
        assert row["group"].startswith(names.stack.split(".", 1)[1] + f".{row['layer']}.")
        assert row["skipped"] is (row["group"] not in moves and row["found"] > 0)
        assert not (row["skipped"] and chance == 0)
    assert largest_difference(current, alignment.apply(update)) == 0


def test_report_counts_moves_angles_and_shares() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), symmetry_for(name)
    moved = fedrot.random_equivalent(anchor, symmetry, 1, ("attention", "ffn"))
    report = fedrot.align(moved, anchor, symmetry).report
    changed = 0
    for layer in range(2):
        key = f"bert.encoder.layer.{layer}.intermediate.dense.bias"
        changed += int((moved[key] != anchor[key]).sum())
    moved_units = dict.fromkeys(("ffn", "attention"), 0)
    for group in report.groups:
        moved_units[group.part] += group.moved
    # Queries with keys, and values with outputs, in two layers.
    assert moved_units == {"ffn": changed, "attention": 4 * HEADS}
    assert report.share("attention") + report.share("ffn") == pytest.approx(report.share())
    assert report.share() == pytest.approx(1)
    by_part: dict[str, float] = defaultdict(float)
    for row in report.rows():
        by_part[row["part"]] += row["before"] - row["after"]
        assert (row["angle"] > 5) == (row["part"] == "attention")
    assert by_part["ffn"] / report.before == pytest.approx(report.share("ffn"))
    assert report.seconds > 0
    still = fedrot.align(anchor, anchor, symmetry, fedrot.AlignmentOptions(parts=FULL)).report
    assert (still.before, still.after, still.share()) == (0, 0, 0)
    assert [row["certified"] for row in still.rows() if row["part"] == "ffn"] == [True, True]


def test_reported_angle_is_the_rotation_s_angle() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), symmetry_for(name)
    update = {k: v.clone() for k, v in anchor.items()}
    c, s = torch.cos(torch.tensor(0.5)), torch.sin(torch.tensor(0.5))
    plane = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    turn = torch.block_diag(*[plane] * (WIDTH // 2))
    for module in ("query", "key"):
        for leaf in ("weight", "bias"):
            key = f"bert.encoder.layer.0.attention.self.{module}.{leaf}"
            update[key] = turn @ update[key]
    rows = {row["group"]: row for row in fedrot.align(update, anchor, symmetry).report.rows()}
    assert rows["encoder.layer.0.qk"]["angle"] == pytest.approx(28.6479, abs=1e-3)
    assert rows["encoder.layer.0.vo"]["angle"] == 0
    assert rows["encoder.layer.0.vo"]["moved"] == 0
