"""Distances never grow, and the report tells the truth about them."""

from collections import defaultdict

import pytest
import torch

from fedrot import WHOLE_MODEL, AlignmentOptions, align, random_equivalent
from tests.fedrot.pairs import PAIRS, checked_report
from tests.models import (
    CASES,
    EAGER,
    FEW,
    FULL,
    HEADS,
    WIDTH,
    align_tensors,
    copied,
    squared_distance,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"
SETTINGS = [
    {"parts": FULL, "chance": 0},
    {"parts": FULL},
    {"parts": FULL, "layers": "first:1", "chance": 0},
    {"parts": ("attention", "ffn"), "layers": [1]},
    {"parts": ("heads",), "chance": 0},
    {"parts": ()},
    {"parts": WHOLE_MODEL},
    {"parts": ("residual", "ffn")},
    {"parts": ("output", "attention")},
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", FEW)
def test_distance_never_grows_and_every_row_of_the_report_is_true(name, pair):
    anchor = state_of(name)
    update = PAIRS[pair](anchor, CASES[name].names)
    # Every pair meets all settings, each with one of the models.
    for settings in SETTINGS[(FEW.index(name) + [*PAIRS].index(pair)) % 2 :: 2]:
        checked_report(name, update, anchor, AlignmentOptions(**settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_distance_never_grows_in_low_precision(dtype):
    names = CASES[NAME].names
    symmetry = symmetry_for(NAME)
    for pair in ("near", "barely", "unrelated", "conflicting", "zero"):
        update = {k: v.to(dtype) for k, v in PAIRS[pair](state_of(NAME), names).items()}
        anchor = {k: v.to(dtype) for k, v in state_of(NAME).items()}
        size = squared_distance(anchor, {k: torch.zeros(()) for k in anchor})
        aligned = align_tensors(update, anchor, symmetry, EAGER)
        before = squared_distance(update, anchor)
        after = squared_distance(aligned, anchor)
        # Storing a rotated weight rounds it: an error of the dtype's precision,
        # relative to the weight.
        eps = torch.finfo(dtype).eps
        assert after <= before + eps * (before * size) ** 0.5 + eps**2 * size


def test_report_counts_moves_angles_and_shares():
    anchor = state_of(NAME)
    symmetry = symmetry_for(NAME)
    moved = random_equivalent(anchor, symmetry, 1, ("attention", "ffn"))
    report = align(moved, anchor, symmetry).report
    changed = 0
    for layer in range(2):
        key = f"bert.encoder.layer.{layer}.intermediate.dense.bias"
        changed += int((moved[key] != anchor[key]).sum())
    moved_units = dict.fromkeys(("ffn", "attention"), 0)
    for group in report.groups:
        moved_units[group.part] += group.moved
    # Queries with keys, and values with outputs, in two layers.
    assert moved_units == {"ffn": changed, "attention": 4 * HEADS}
    assert report.share("attention") + report.share("ffn") == pytest.approx(
        report.share()
    )
    assert report.share() == pytest.approx(1)
    by_part = defaultdict(float)
    for row in report.rows():
        by_part[row["part"]] += row["before"] - row["after"]
        assert (row["angle"] > 5) == (row["part"] == "attention")
    assert by_part["ffn"] / report.before == pytest.approx(report.share("ffn"))
    assert report.seconds > 0
    still = align(anchor, anchor, symmetry, AlignmentOptions(parts=FULL)).report
    assert (still.before, still.after, still.share()) == (0, 0, 0)
    assert [row["certified"] for row in still.rows() if row["part"] == "ffn"] == [
        True,
        True,
    ]


def test_reported_angle_is_the_rotation_s_angle():
    anchor = state_of(NAME)
    symmetry = symmetry_for(NAME)
    update = copied(anchor)
    c = torch.cos(torch.tensor(0.5))
    s = torch.sin(torch.tensor(0.5))
    plane = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    turn = torch.block_diag(*[plane] * (WIDTH // 2))
    for module in ("query", "key"):
        for leaf in ("weight", "bias"):
            key = f"bert.encoder.layer.0.attention.self.{module}.{leaf}"
            update[key] = turn @ update[key]
    rows = {row["group"]: row for row in align(update, anchor, symmetry).report.rows()}
    assert rows["encoder.layer.0.qk"]["angle"] == pytest.approx(28.6479, abs=1e-3)
    assert (
        rows["encoder.layer.0.vo"]["angle"],
        rows["encoder.layer.0.vo"]["moved"],
    ) == (0, 0)


def test_an_alignment_prints_a_summary_of_a_few_lines():
    anchor = state_of(NAME)
    symmetry = symmetry_for(NAME)
    alignment = align(random_equivalent(anchor, symmetry, 1), anchor, symmetry)
    removed = alignment.report.share("attention")
    assert f"  attention: {removed:.1%} removed, 4 of 4 groups moved\n" in str(
        alignment
    )
    nothing = str(align(anchor, anchor, symmetry))
    assert (
        "ffn: 0.0% removed, 0 of 2 groups moved, 2 already in the best order" in nothing
    )
    assert len(repr(alignment)) < 300
