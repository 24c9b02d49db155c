"""Pairs of models that are hard to align, which tensors a part may touch, and what
reports must say.
"""

from dataclasses import replace

import pytest
import torch

from fedrot import AlignmentOptions, align, random_equivalent
from fedrot.symmetry.groups import apply_moves
from tests import families
from tests.fedrot.oracles import normal, seeded
from tests.models import (
    CASES,
    DIM,
    EAGER,
    EVERY,
    EVERYTHING,
    FEW,
    FULL,
    HEADS,
    LAYERS,
    NEURONS,
    align_tensors,
    cast,
    changed,
    largest_difference,
    movable,
    near,
    squared_distance,
    state_of,
    symmetry_for,
    tensors_of,
)

#: The modules of a layer that a part acts on.
MODULES = {
    "attention": ("query", "key", "value", "output"),
    "heads": ("query", "key", "value", "output"),
    "ffn": ("up", "down"),
}


#: Options that families are aligned with, on a CPU and elsewhere.
OPTIONS = {
    "default": AlignmentOptions(),
    "eager": EAGER,
    "layers": AlignmentOptions(parts=FULL, chance=0),
    "biases": AlignmentOptions(canonical=True, chance=0),
    "whole": AlignmentOptions(parts=EVERYTHING),
}


def movable_options(options, family):
    """Return the options with the parts that a family may move."""
    return replace(options, parts=movable(families.symmetry_for(family), options.parts))


def beside(family, *shares):
    """Return a model and others, a share of an unrelated one away from it; float32."""
    anchor, other = (
        cast(families.state_of(family, seed), torch.float32) for seed in (0, 1)
    )
    moved = [
        {
            name: tensor + share * other[name] if tensor.is_floating_point() else tensor
            for name, tensor in anchor.items()
        }
        for share in shares
    ]
    return [anchor, *moved]


def touched_by(names, parts, layers=(0, 1)):
    """Return the tensors that the parts act on: output biases of ``output`` and
    ``down`` excluded.
    """
    found = set()
    for layer in layers:
        for module in {m for part in parts for m in MODULES[part]}:
            found.add(f"{names.of(layer, module)}.weight")
            if module not in ("output", "down"):
                found.add(f"{names.of(layer, module)}.bias")
    return found


def only(state, names):
    """Return the tensors of these names."""
    return {name: state[name] for name in names}


def _conflicting(state, names):
    """Heads and neurons shuffled differently in every module: no single order serves
    them all.
    """
    out = near(state, 0.05)
    for layer in range(2):
        for shift, module in enumerate(("query", "key", "value"), start=0):
            for leaf in ("weight", "bias"):
                key = f"{names.of(layer, module)}.{leaf}"
                out[key] = out[key].roll(shift * DIM, 0)
        output = f"{names.of(layer, 'output')}.weight"
        up = f"{names.of(layer, 'up')}.weight"
        out[output] = out[output].roll(3 * DIM, 1)
        out[up] = out[up].roll(1, 0)
    return out


#: Clients of an anchor, by what is hard about them.
PAIRS = {
    "near": lambda state, names: near(state, 0.05),
    "barely": lambda state, names: near(state, 1e-9),
    "far": lambda state, names: near(state, 1.5),
    "unrelated": lambda state, names: state_of(
        next(n for n in FEW if CASES[n].names == names), 7
    ),
    "opposed": lambda state, names: {name: -tensor for name, tensor in state.items()},
    "large": lambda state, names: {
        name: 1e3 * tensor for name, tensor in near(state, 0.2).items()
    },
    "small": lambda state, names: {
        name: 1e-6 * tensor for name, tensor in near(state, 0.2).items()
    },
    "zero": lambda state, names: {
        name: torch.zeros_like(tensor) for name, tensor in state.items()
    },
    "conflicting": _conflicting,
}


def checked_report(name, update, anchor, options):
    """Check the totals and rows of a report against the tensors; return both distances.

    Rows of groups that share no tensors are checked by replaying the moves one by one.
    """
    symmetry = symmetry_for(name)
    layers = options.layer_indices(LAYERS)
    groups = symmetry.select(options.parts, layers)
    touched = tensors_of(groups)
    alignment = align(update, anchor, symmetry, options)
    aligned = alignment.apply(update)
    report = alignment.report

    def distance(state, names=touched):
        return squared_distance(only(state, names), anchor)

    assert changed(aligned, update) <= touched
    before, after = map(distance, (update, aligned))
    slack = 1e-11 * (before + sum(float(update[key].square().sum()) for key in touched))
    assert squared_distance(aligned, anchor) <= squared_distance(update, anchor) * (
        1 + 1e-12
    )
    assert report.before == pytest.approx(before, rel=1e-9, abs=1e-20)
    assert report.after == pytest.approx(after, rel=1e-9, abs=slack)
    removed = report.share() * report.before
    assert removed == pytest.approx(before - after, rel=1e-6, abs=slack)
    if options.coupled:
        return before, after
    assert touched == touched_by(EVERY[name].names, tuple(options.parts), layers)
    moves = {move.group.name: move for move in alignment.moves}
    assert alignment.moved == {group.name: group.name in moves for group in groups}
    current = dict(update)
    for group, row in zip(groups, report.rows(), strict=True):
        assert row["group"] == group.name
        names = tensors_of([group])
        moved = group.name in moves
        measured = distance(current, names)
        assert row["before"] == pytest.approx(measured, rel=1e-9, abs=1e-20)
        if moved:
            current = apply_moves(current, [moves[group.name]])
        measured = distance(current, names)
        assert row["after"] == pytest.approx(measured, rel=1e-9, abs=slack)
        assert row["of"] == (NEURONS if row["part"] == "ffn" else HEADS)
        assert moved or row["moved"] == 0
        assert row["skipped"] is (not moved and row["found"] > 0)
        assert not (row["skipped"] and options.chance == 0)
    assert largest_difference(current, aligned) == 0
    return before, after


def recovered(moved, anchor, symmetry, options, expected=None):
    """Check that a moved model meets its anchor, and comes back; return the alignment.

    The anchor in canonical form is another expected result.
    """
    alignment = align(moved, anchor, symmetry, options)
    aligned = alignment.apply(moved)
    report = alignment.report
    assert largest_difference(aligned, expected or anchor) <= 1e-8
    assert report.after <= 1e-12 * report.before
    assert largest_difference(alignment.inverse().apply(aligned), moved) <= 1e-8
    return alignment


def scrambled(anchor, symmetry, parts, count=2):
    """Return clients near the anchor and aligned to it, each scrambled, and the way
    back.

    The difference between a client and its scrambled self is then a coordinate change
    and no more.
    """
    options = AlignmentOptions(parts=parts, chance=0, canonical=False)
    found = []
    for seed in range(count):
        client = near(anchor, 0.02, seed + 1)
        for _ in range(2):
            client = align_tensors(client, anchor, symmetry, options)
        moved = random_equivalent(client, symmetry, 5 + seed, parts)
        alignment = align(moved, anchor, symmetry, options)
        assert largest_difference(alignment.apply(moved), client) <= 1e-9
        found.append((client, moved, alignment))
    return found


def with_other_gains(state, symmetry, seed):
    """Return the same function with other gains, biases of norms, and redundant
    attention biases.
    """
    out = dict(state)
    rng = seeded(seed)

    def noise(like):
        return normal(rng, like.shape)

    for fold in symmetry.folds:
        gain = 0.5 + noise(out[fold.gain]).abs()
        shift = noise(gain) if fold.bias and fold.holds_bias else torch.zeros_like(gain)
        out[fold.gain] = gain * out[fold.gain]
        if fold.bias:
            out[fold.bias] = gain * out[fold.bias] + shift
        for reader in fold.readers:
            weight = out[reader.weight]
            by_input = gain if reader.axis == weight.ndim - 1 else gain[:, None]
            out[reader.weight] = weight / by_input
            if fold.bias and fold.holds_bias:
                lost = torch.tensordot(
                    out[reader.weight], shift, dims=([reader.axis], [0])
                )
                out[reader.bias] = out[reader.bias] - lost
    for redundant in symmetry.redundant_biases:
        before = out[redundant.bias.tensor].clone()
        entries = redundant.bias.slice.of(before, 0)
        added = noise(entries)
        redundant.bias.slice.write(before, 0, entries + added)
        out[redundant.bias.tensor] = before
        if redundant.read is not None:
            units = redundant.read.rows(out[redundant.read.tensor], torch.float64)
            by_head = added.unflatten(0, (redundant.heads, -1))
            constant = by_head.repeat_interleave(len(units) // len(added), 0).flatten()
            out[redundant.taken_up] = out[redundant.taken_up] - constant @ units
    return out
