"""Alignment: the way back, distances that never grow, honest reports, inputs left alone, errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.moves import apply_moves
from tests.models import (
    CASES,
    DIM,
    FEW,
    HEADS,
    NEURONS,
    WIDTH,
    Names,
    State,
    config_of,
    fresh_model,
    largest_difference,
    logits,
    near,
    squared_distance,
    state_of,
)

FULL = ("heads", "attention", "rescale", "ffn")
SUBSETS = [subset for size in range(5) for subset in combinations(FULL, size)]
MODULES = {
    "attention": ("query", "key", "value", "output"),
    "heads": ("query", "key", "value", "output"),
    "rescale": ("query", "key", "value", "output"),
    "ffn": ("up", "down"),
}


def _symmetry(name: str) -> fedrot.Symmetry:
    return fedrot.symmetry_of(config_of(name), state_of(name))


def _touched(names: Names, parts: tuple[str, ...], layers: tuple[int, ...] = (0, 1)) -> set[str]:
    """Return the tensors that the parts act on: output biases of ``output`` and ``down`` excluded."""
    touched = set()
    for layer in layers:
        for module in {m for part in parts for m in MODULES[part]}:
            touched.add(f"{names.of(layer, module)}.weight")
            if module not in ("output", "down"):
                touched.add(f"{names.of(layer, module)}.bias")
    return touched


def _only(state: State, names: set[str]) -> State:
    return {name: state[name] for name in names}


# The way back


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", [FULL, ("attention", "ffn"), ("heads", "ffn"), ("rescale",)])
def test_alignment_undoes_a_random_element(name: str, parts: tuple[str, ...]) -> None:
    state, symmetry = state_of(name), _symmetry(name)
    for seed in range(3):
        moved = fedrot.random_equivalent(state, symmetry, seed, parts)
        alignment = fedrot.align(moved, state, symmetry, fedrot.AlignmentOptions(parts=parts))
        assert largest_difference(alignment.apply(moved), state) <= 1e-8
        assert alignment.report.before > 1
        assert alignment.report.after <= 1e-9 * alignment.report.before


@pytest.mark.parametrize("name", CASES)
def test_inverse_undoes_apply(name: str) -> None:
    anchor, symmetry = state_of(name), _symmetry(name)
    update = state_of(name, seed=4)
    alignment = fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=FULL))
    aligned = alignment.apply(update)
    assert largest_difference(aligned, update) > 0.1
    assert largest_difference(alignment.inverse().apply(aligned), update) <= 1e-12
    assert largest_difference(alignment.inverse().inverse().apply(update), aligned) <= 1e-12
    assert (logits(name, aligned) - logits(name, update)).abs().max() <= 1e-10


def test_aligning_what_is_aligned_moves_nothing() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), _symmetry(name)
    options = fedrot.AlignmentOptions(parts=("heads", "attention", "ffn"))
    update = fedrot.random_equivalent(near(anchor, 0.1), symmetry, 2, options.parts)
    aligned = fedrot.align(update, anchor, symmetry, options).apply(update)
    again = fedrot.align(aligned, anchor, symmetry, options)
    assert largest_difference(again.apply(aligned), aligned) <= 1e-9


# Distances


def _opposed(state: State, names: Names) -> State:
    return {name: -tensor for name, tensor in state.items()}


def _near(state: State, names: Names) -> State:
    return near(state, 0.05)


def _barely(state: State, names: Names) -> State:
    return near(state, 1e-9)


def _far(state: State, names: Names) -> State:
    return near(state, 1.5)


def _large(state: State, names: Names) -> State:
    return {name: 1e3 * tensor for name, tensor in near(state, 0.2).items()}


def _small(state: State, names: Names) -> State:
    return {name: 1e-6 * tensor for name, tensor in near(state, 0.2).items()}


def _zero(state: State, names: Names) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def _conflicting(state: State, names: Names) -> State:
    """Heads and neurons shuffled differently in every module: no single order serves them all."""
    out = near(state, 0.05)
    for layer in range(2):
        for shift, module in enumerate(("query", "key", "value"), start=0):
            for leaf in ("weight", "bias"):
                key = f"{names.of(layer, module)}.{leaf}"
                out[key] = out[key].roll(shift * DIM, 0)
        output, up = f"{names.of(layer, 'output')}.weight", f"{names.of(layer, 'up')}.weight"
        out[output] = out[output].roll(3 * DIM, 1)
        out[up] = out[up].roll(1, 0)
    return out


def _unequal_scales(state: State, names: Names) -> State:
    """Queries and values decide everything in some heads, keys and outputs in the others."""
    out = near(state, 0.3)
    for layer in range(2):
        out[f"{names.of(layer, 'query')}.weight"][: 2 * DIM] *= 100
        out[f"{names.of(layer, 'key')}.weight"][2 * DIM :] *= -100
        out[f"{names.of(layer, 'value')}.weight"][DIM:] *= 1e-3
    return out


def _unrelated(state: State, names: Names) -> State:
    name = next(n for n in FEW if CASES[n].names == names)
    return state_of(name, seed=7)


PAIRS: dict[str, Callable[[State, Names], State]] = {
    "near": _near,
    "barely": _barely,
    "far": _far,
    "unrelated": _unrelated,
    "opposed": _opposed,
    "large": _large,
    "small": _small,
    "zero": _zero,
    "conflicting": _conflicting,
    "unequal-scales": _unequal_scales,
}


def _check_distances(
    name: str, pair: str, options: fedrot.AlignmentOptions, layers: tuple[int, ...] = (0, 1)
) -> None:
    names, symmetry = CASES[name].names, _symmetry(name)
    anchor = state_of(name)
    update = PAIRS[pair](anchor, names)
    alignment = fedrot.align(update, anchor, symmetry, options)
    aligned = alignment.apply(update)
    before, after = squared_distance(update, anchor), squared_distance(aligned, anchor)
    assert after <= before * (1 + 1e-12)
    touched = _touched(names, options.parts, layers)
    mine = squared_distance(_only(update, touched), anchor)
    left = squared_distance(_only(aligned, touched), anchor)
    report = alignment.report
    size = squared_distance(_only(update, touched), {n: torch.zeros(()) for n in touched}) + mine
    assert report.before == pytest.approx(mine, rel=1e-9, abs=1e-20)
    assert report.after == pytest.approx(left, rel=1e-9, abs=1e-11 * size)
    assert report.before - report.after == pytest.approx(before - after, rel=1e-6, abs=1e-11 * size)
    assert report.share() * report.before == pytest.approx(before - after, rel=1e-6, abs=1e-11 * size)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", FEW)
def test_distance_never_grows_and_is_reported(name: str, pair: str) -> None:
    for parts in SUBSETS:
        _check_distances(name, pair, fedrot.AlignmentOptions(parts=parts))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("threshold", [1e-3, 0.1, 0.6])
def test_distance_never_grows_with_a_threshold(pair: str, threshold: float) -> None:
    for parts in SUBSETS:
        _check_distances(
            "bert-classifier", pair, fedrot.AlignmentOptions(parts=parts, threshold=threshold)
        )


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("ridge", [0.01, 1.0, 100.0])
def test_distance_never_grows_with_a_ridge(pair: str, ridge: float) -> None:
    for parts in SUBSETS:
        _check_distances("bert-classifier", pair, fedrot.AlignmentOptions(parts=parts, ridge=ridge))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ridge", [0.0, 0.3, 30.0])
def test_distance_never_grows_for_unrelated_models(seed: int, ridge: float) -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), state_of(name, 10 + seed), _symmetry(name)
    for parts in SUBSETS:
        options = fedrot.AlignmentOptions(parts=parts, ridge=ridge)
        aligned = fedrot.align(update, anchor, symmetry, options).apply(update)
        assert squared_distance(aligned, anchor) <= squared_distance(update, anchor) * (1 + 1e-12)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("layers", ["first:1", "last:1", [1]])
def test_distance_report_of_some_layers(pair: str, layers: Any) -> None:
    chosen = (0,) if layers == "first:1" else (1,)
    for parts in (FULL, ("attention", "ffn")):
        options = fedrot.AlignmentOptions(parts=parts, layers=layers)
        _check_distances("bert-classifier", pair, options, chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pair", ["near", "barely", "unrelated", "conflicting", "zero"])
def test_distance_never_grows_in_low_precision(pair: str, dtype: torch.dtype) -> None:
    name = "bert-classifier"
    names, symmetry = CASES[name].names, _symmetry(name)
    anchor64 = state_of(name)
    update = {k: v.to(dtype) for k, v in PAIRS[pair](anchor64, names).items()}
    anchor = {k: v.to(dtype) for k, v in anchor64.items()}
    size = squared_distance(anchor, {k: torch.zeros(()) for k in anchor})
    aligned = fedrot.align(update, anchor, symmetry).apply(update)
    before, after = squared_distance(update, anchor), squared_distance(aligned, anchor)
    # Storing a rotated weight rounds it: an error of the dtype's precision, relative to the weight.
    rounding = torch.finfo(dtype).eps * (before * size) ** 0.5 + torch.finfo(dtype).eps ** 2 * size
    assert after <= before + rounding


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", FEW)
def test_every_row_of_the_report_is_true(name: str, pair: str) -> None:
    """Replay the moves one by one and recompute each row's distances from the tensors."""
    names, symmetry = CASES[name].names, _symmetry(name)
    anchor = state_of(name)
    update = PAIRS[pair](anchor, names)
    alignment = fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=FULL))
    moves = {move.group.name: move for move in alignment.moves}
    tensors = {group.name: {slot.tensor for slot in group.slots} for group in symmetry.groups}
    current: State = dict(update)
    rows = alignment.report.rows()
    assert sorted(row["group"] for row in rows) == sorted(tensors)
    for row in rows:
        group = tensors[row["group"]]
        size = squared_distance(_only(current, group), {n: torch.zeros(()) for n in group})
        measured = squared_distance(_only(current, group), anchor)
        slack = 1e-11 * (size + measured)
        assert row["before"] == pytest.approx(measured, rel=1e-9, abs=1e-20)
        if row["group"] in moves:
            current = apply_moves(current, [moves[row["group"]]])
        else:
            assert row["moved"] == 0
        measured = squared_distance(_only(current, group), anchor)
        assert row["after"] == pytest.approx(measured, rel=1e-9, abs=slack)
        assert row["of"] == (NEURONS if row["part"] == "ffn" else HEADS)
        assert row["group"].startswith(names.stack.split(".", 1)[1] + f".{row['layer']}.")
        assert row["skipped"] is False
    assert largest_difference(current, alignment.apply(update)) == 0


def test_report_counts_moves_angles_and_shares() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), _symmetry(name)
    moved = fedrot.random_equivalent(anchor, symmetry, 1, ("attention", "ffn"))
    report = fedrot.align(moved, anchor, symmetry).report
    changed = 0
    for layer in range(2):
        key = f"bert.encoder.layer.{layer}.intermediate.dense.bias"
        changed += int((moved[key] != anchor[key]).sum())
    assert report.moved("ffn") == changed
    assert report.moved("attention") == 2 * 2 * HEADS
    assert report.moved("heads") == 0
    assert report.share("attention") + report.share("ffn") == pytest.approx(report.share())
    assert report.share() == pytest.approx(1)
    by_part: dict[str, float] = defaultdict(float)
    for row in report.rows():
        by_part[row["part"]] += row["before"] - row["after"]
        assert (row["angle"] > 5) == (row["part"] == "attention")
    assert by_part["ffn"] / report.before == pytest.approx(report.share("ffn"))
    assert report.seconds > 0
    assert report.to_dict()["before"] == report.before
    still = fedrot.align(anchor, anchor, symmetry, fedrot.AlignmentOptions(parts=FULL)).report
    assert (still.before, still.after, still.share()) == (0, 0, 0)
    assert all(row["certified"] for row in still.rows() if row["part"] == "ffn")


def test_reported_angle_is_the_rotation_s_angle() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), _symmetry(name)
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


# Options


def test_layers_and_parts_restrict_what_moves() -> None:
    name = "bert-classifier"
    names, anchor, symmetry = CASES[name].names, state_of(name), _symmetry(name)
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
            options = fedrot.AlignmentOptions(parts=parts, layers=layers)
            aligned = fedrot.align(update, anchor, symmetry, options).apply(update)
            changed = {key for key in update if not torch.equal(aligned[key], update[key])}
            assert changed == _touched(names, parts, expected), (layers, parts)


@pytest.mark.parametrize(
    "layers",
    ["", "first", "first:", "first:-1", "last:x", "middle:1", "first:1.5", "first:²", [2], [0, -1]],
)
def test_bad_layers_are_refused(layers: Any) -> None:
    state = state_of("bert-classifier")
    with pytest.raises(fedrot.FedrotError, match=r"(?i)layer"):
        fedrot.align(state, state, _symmetry("bert-classifier"), fedrot.AlignmentOptions(layers=layers))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": ("atention",)}, "atention"),
        ({"parts": "ffn"}, "part"),
        ({"ridge": -1.0}, "ridge"),
        ({"ridge": float("nan")}, "ridge"),
        ({"threshold": 1.0}, "threshold"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
    ],
)
def test_bad_options_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fedrot.FedrotError, match=message):
        fedrot.AlignmentOptions(**settings)


def test_random_equivalent_refuses_unknown_parts() -> None:
    with pytest.raises(fedrot.FedrotError, match="neurons"):
        fedrot.random_equivalent(
            state_of("bert-classifier"), _symmetry("bert-classifier"), parts=("neurons",)
        )


def test_threshold_skips_small_gains_and_says_so() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), _symmetry(name)
    update = near(anchor, 0.3)
    free = fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=FULL))
    shares = {row["group"]: 1 - row["after"] / row["before"] for row in free.report.rows()}
    options = fedrot.AlignmentOptions(parts=FULL, threshold=0.9)
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
    anchor, symmetry = state_of(name), _symmetry(name)
    noisy = near(anchor, 0.2)
    update = fedrot.random_equivalent(noisy, symmetry, 5, scrambled)
    options = fedrot.AlignmentOptions(parts=("heads", "attention"), threshold=0.2)
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


# Inputs, outputs and dtypes


def test_inputs_are_never_changed_and_moved_tensors_share_nothing() -> None:
    name = "bert-mlm"
    anchor, update, symmetry = state_of(name), state_of(name, 2), _symmetry(name)
    kept = [{k: v.clone() for k, v in d.items()} for d in (anchor, update)]
    options = fedrot.AlignmentOptions(parts=FULL)
    reused = fedrot.Anchor(anchor)
    alignment = fedrot.align(update, reused, symmetry, options)
    outputs = [
        alignment.apply(update),
        alignment.inverse().apply(update),
        fedrot.random_equivalent(update, symmetry, 1, FULL),
    ]
    touched = _touched(CASES[name].names, FULL)
    for out in outputs:
        assert list(out) == list(update)
        for key in update:
            if key in touched:
                assert out[key].untyped_storage().data_ptr() != update[key].untyped_storage().data_ptr()
                assert out[key].is_contiguous()
                out[key].zero_()
            else:
                assert out[key] is update[key]
    for before, now in zip(kept, (anchor, update), strict=True):
        assert before.keys() == now.keys()
        assert all(torch.equal(before[k], now[k]) for k in before)


def test_one_alignment_applies_to_any_model_of_the_same_shape() -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), state_of(name, 2), _symmetry(name)
    alignment = fedrot.align(update, anchor, symmetry)
    delta = near(update, 0.1)
    total = {k: update[k] + delta[k] for k in update}
    aligned = alignment.apply(total)
    parts = [alignment.apply(d) for d in (update, delta)]
    touched = _touched(CASES[name].names, ("attention", "ffn"))
    assert max(float((aligned[k] - parts[0][k] - parts[1][k]).abs().max()) for k in touched) <= 1e-12


def test_parameters_that_require_gradients_are_accepted() -> None:
    name = "bert-classifier"
    model = fresh_model(name)
    symmetry = _symmetry(name)
    update = dict(model.named_parameters())
    anchor = state_of(name, 1)
    alignment = fedrot.align(update, anchor, symmetry)
    aligned = alignment.apply(update)
    for key in _touched(CASES[name].names, ("attention", "ffn")):
        assert not aligned[key].requires_grad


def test_non_contiguous_inputs_give_the_same_answer() -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), state_of(name, 2), _symmetry(name)
    strided = {k: v.T.contiguous().T if v.ndim == 2 else v for k, v in update.items()}
    plain = fedrot.align(update, anchor, symmetry).apply(update)
    other = fedrot.align(strided, anchor, symmetry).apply(strided)
    assert largest_difference(plain, other) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("anchor_dtype", [torch.float32, torch.bfloat16, None])
def test_dtypes_return_as_they_came(dtype: torch.dtype, anchor_dtype: torch.dtype | None) -> None:
    name = "bert-classifier"
    symmetry = _symmetry(name)
    anchor = state_of(name, dtype=anchor_dtype or dtype)
    update = fedrot.random_equivalent(state_of(name, dtype=dtype), symmetry, 1, FULL)
    aligned = fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=FULL)).apply(update)
    assert all(aligned[k].dtype == dtype for k in aligned)
    # Each step rounds once in the travelling dtype; the weights still come back to that precision.
    coarse = max(torch.finfo(dtype).eps, torch.finfo(anchor_dtype or dtype).eps)
    assert largest_difference(aligned, anchor) <= 16 * coarse


def test_mixed_dtypes_in_one_model_are_kept() -> None:
    name = "bert-classifier"
    symmetry = _symmetry(name)
    anchor = state_of(name, dtype=torch.float32)
    update = {
        k: v.to(torch.bfloat16) if k.endswith("weight") else v
        for k, v in fedrot.random_equivalent(anchor, symmetry, 1).items()
    }
    aligned = fedrot.align(update, anchor, symmetry).apply(update)
    assert {k: v.dtype for k, v in aligned.items()} == {k: v.dtype for k, v in update.items()}
    assert largest_difference(aligned, anchor) <= 0.05


def test_integer_and_boolean_buffers_are_untouched() -> None:
    name = "bert-classifier"
    state = state_of(name)
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]
    state["bert.embeddings.seen"] = torch.tensor([True, False])
    symmetry = fedrot.symmetry_of(config_of(name), state)
    moved = fedrot.random_equivalent(state, symmetry, 1, FULL)
    aligned = fedrot.align(moved, state, symmetry, fedrot.AlignmentOptions(parts=FULL)).apply(moved)
    for key in ("bert.embeddings.position_ids", "bert.embeddings.seen"):
        assert moved[key] is state[key]
        assert aligned[key] is state[key]


@pytest.mark.parametrize("name", ["bert-mlm", "electra-mlm", "distilbert-mlm", "roberta-mlm"])
def test_tied_tensors_stay_tied(name: str) -> None:
    model = fresh_model(name)
    state = model.state_dict()
    pointers: dict[int, list[str]] = defaultdict(list)
    for key, tensor in state.items():
        pointers[tensor.data_ptr()].append(key)
    expected = sorted(sorted(keys) for keys in pointers.values() if len(keys) > 1)
    assert any("embeddings.word_embeddings.weight" in key for keys in expected for key in keys)
    symmetry = fedrot.symmetry_of(model.config, state)
    assert sorted(sorted(keys) for keys in symmetry.tied) == expected
    moved = fedrot.random_equivalent(state, symmetry, 1, FULL)
    aligned = fedrot.align(moved, state, symmetry, fedrot.AlignmentOptions(parts=FULL)).apply(moved)
    for out in (moved, aligned):
        for keys in expected:
            assert len({out[key].data_ptr() for key in keys}) == 1


# Errors


def _without(key: str) -> Callable[[State], None]:
    def damage(state: State) -> None:
        del state[key]

    return damage


def _with(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[State], None]:
    def damage(state: State) -> None:
        state[key] = change(state[key])

    return damage


def _extra(state: State) -> None:
    state["adapter.weight"] = torch.ones(2, 2)


def _entry(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        out = tensor.clone()
        out.view(-1)[3] = value
        return out

    return change


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
UP_BIAS = "bert.encoder.layer.0.intermediate.dense.bias"
DAMAGES: list[tuple[Callable[[State], None], str, str]] = [
    (_without(QUERY), QUERY, "missing"),
    (_without("classifier.bias"), "classifier.bias", "missing"),
    (_extra, "adapter.weight", "not part of the model"),
    (_with(QUERY, lambda t: t[:-1]), QUERY, "shape"),
    (_with(QUERY, lambda t: t.reshape(-1)), QUERY, "shape"),
    (_with("classifier.weight", lambda t: t.T), "classifier.weight", "shape"),
    (_with(QUERY, _entry(float("nan"))), QUERY, "NaN or Inf"),
    (_with(QUERY, _entry(float("-inf"))), QUERY, "NaN or Inf"),
    (_with(UP_BIAS, _entry(float("nan"))), UP_BIAS, "NaN or Inf"),
    (_with(UP_BIAS, _entry(float("inf"))), UP_BIAS, "NaN or Inf"),
    (_with(QUERY, lambda t: (100 * t).to(torch.int8)), QUERY, "int8"),
    (_with(UP_BIAS, lambda t: t > 0), UP_BIAS, "bool"),
]
DAMAGE = pytest.mark.parametrize(
    ("damage", "tensor", "message"),
    DAMAGES,
    ids=[
        f"{i}-{tensor.split('.')[-2]}-{message.split()[0]}"
        for i, (_, tensor, message) in enumerate(DAMAGES)
    ],
)


@DAMAGE
@pytest.mark.parametrize("parts", [("attention", "ffn"), FULL], ids=["default", "full"])
def test_a_bad_update_is_refused_by_name(
    damage: Callable[[State], None], tensor: str, message: str, parts: tuple[str, ...]
) -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), near(state_of(name), 0.1), _symmetry(name)
    damage(update)
    with pytest.raises(fedrot.UpdateError, match=message) as caught:
        fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=parts))
    assert f"'{tensor}'" in str(caught.value)


@DAMAGE
def test_a_bad_anchor_is_refused_by_name(
    damage: Callable[[State], None], tensor: str, message: str
) -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), near(state_of(name), 0.1), _symmetry(name)
    damage(anchor)
    with pytest.raises(fedrot.UpdateError, match=message) as caught:
        fedrot.align(update, anchor, symmetry)
    assert f"'{tensor}'" in str(caught.value)


@pytest.mark.parametrize("part", FULL)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_every_part_on_its_own_refuses_what_is_not_finite(part: str, value: float) -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), near(state_of(name), 0.1), _symmetry(name)
    key = f"{CASES[name].names.of(0, MODULES[part][0])}.weight"
    update[key] = _entry(value)(update[key])
    with pytest.raises(fedrot.UpdateError, match="NaN or Inf") as caught:
        fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=(part,)))
    assert f"'{key}'" in str(caught.value)


def test_values_that_overflow_float32_are_refused() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name, dtype=torch.float32), _symmetry(name)
    for part in FULL:
        update = near(anchor, 0.1)
        update[f"{CASES[name].names.of(0, MODULES[part][0])}.weight"].mul_(1e30)
        with pytest.raises(fedrot.UpdateError, match="overflow"):
            fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=(part,)))


def test_apply_and_random_equivalent_check_names_and_shapes() -> None:
    name = "bert-classifier"
    state, symmetry = state_of(name), _symmetry(name)
    alignment = fedrot.align(state_of(name, 1), state, symmetry)
    incomplete = {k: v for k, v in state.items() if k != QUERY}
    for run in (alignment.apply, lambda tensors: fedrot.random_equivalent(tensors, symmetry)):
        with pytest.raises(fedrot.UpdateError, match="missing"):
            run(incomplete)


def test_tensors_on_different_devices_are_refused() -> None:
    name = "bert-classifier"
    state, symmetry = state_of(name), _symmetry(name)
    update = {k: v.to("meta") for k, v in state.items()}
    with pytest.raises(fedrot.UpdateError, match="device"):
        fedrot.align(update, state, symmetry)


def test_an_anchor_reused_for_a_round_gives_the_same_alignments() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), _symmetry(name)
    reused = fedrot.Anchor(anchor)
    for seed in range(3):
        update = fedrot.random_equivalent(near(anchor, 0.05, seed), symmetry, seed)
        fresh = fedrot.align(update, anchor, symmetry)
        again = fedrot.align(update, reused, symmetry)
        assert largest_difference(fresh.apply(update), again.apply(update)) == 0
        assert replace(fresh.report, seconds=0) == replace(again.report, seconds=0)
