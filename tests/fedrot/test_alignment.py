"""Alignment: the way back, inputs left alone, dtypes kept, ties kept, anchors reused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

import fedrot
from tests.fedrot.pairs import touched_by
from tests.models import (
    CASES,
    EAGER,
    FULL,
    config_of,
    fresh_model,
    largest_difference,
    logits,
    near,
    state_of,
    symmetry_for,
)

# The way back


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", [FULL, ("attention", "ffn"), ("heads", "ffn"), ("rescale",)])
def test_alignment_undoes_a_random_element(name: str, parts: tuple[str, ...]) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    for seed in range(3):
        moved = fedrot.random_equivalent(state, symmetry, seed, parts)
        alignment = fedrot.align(moved, state, symmetry, fedrot.AlignmentOptions(parts=parts))
        assert largest_difference(alignment.apply(moved), state) <= 1e-8
        assert alignment.report.before > 1
        assert alignment.report.after <= 1e-9 * alignment.report.before


@pytest.mark.parametrize("name", CASES)
def test_inverse_undoes_apply(name: str) -> None:
    anchor, symmetry = state_of(name), symmetry_for(name)
    update = state_of(name, seed=4)
    alignment = fedrot.align(update, anchor, symmetry, replace(EAGER, parts=FULL))
    aligned = alignment.apply(update)
    assert largest_difference(aligned, update) > 0.1
    assert largest_difference(alignment.inverse().apply(aligned), update) <= 1e-12
    assert largest_difference(alignment.inverse().inverse().apply(update), aligned) <= 1e-12
    assert (logits(name, aligned) - logits(name, update)).abs().max() <= 1e-10


def test_aligning_what_is_aligned_moves_nothing() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), symmetry_for(name)
    options = fedrot.AlignmentOptions(parts=("heads", "attention", "ffn"), chance=0)
    update = fedrot.random_equivalent(near(anchor, 0.1), symmetry, 2, options.parts)
    aligned = fedrot.align(update, anchor, symmetry, options).apply(update)
    again = fedrot.align(aligned, anchor, symmetry, options)
    assert largest_difference(again.apply(aligned), aligned) <= 1e-9


# Inputs, outputs and dtypes


def test_inputs_are_never_changed_and_moved_tensors_share_nothing() -> None:
    name = "bert-mlm"
    anchor, update, symmetry = state_of(name), state_of(name, 2), symmetry_for(name)
    kept = [{k: v.clone() for k, v in d.items()} for d in (anchor, update)]
    options = replace(EAGER, parts=FULL)
    reused = fedrot.Anchor(anchor)
    alignment = fedrot.align(update, reused, symmetry, options)
    outputs = [
        alignment.apply(update),
        alignment.inverse().apply(update),
        fedrot.random_equivalent(update, symmetry, 1, FULL),
    ]
    touched = touched_by(CASES[name].names, FULL)
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
    anchor, update, symmetry = state_of(name), state_of(name, 2), symmetry_for(name)
    alignment = fedrot.align(update, anchor, symmetry, EAGER)
    delta = near(update, 0.1)
    total = {k: update[k] + delta[k] for k in update}
    aligned = alignment.apply(total)
    parts = [alignment.apply(d) for d in (update, delta)]
    touched = touched_by(CASES[name].names, ("attention", "ffn"))
    assert max(float((aligned[k] - parts[0][k] - parts[1][k]).abs().max()) for k in touched) <= 1e-12


def test_parameters_that_require_gradients_are_accepted() -> None:
    name = "bert-classifier"
    model = fresh_model(name)
    symmetry = symmetry_for(name)
    update = dict(model.named_parameters())
    anchor = state_of(name, 1)
    alignment = fedrot.align(update, anchor, symmetry, EAGER)
    aligned = alignment.apply(update)
    for key in touched_by(CASES[name].names, ("attention", "ffn")):
        assert not aligned[key].requires_grad


def test_non_contiguous_inputs_give_the_same_answer() -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), state_of(name, 2), symmetry_for(name)
    strided = {k: v.T.contiguous().T if v.ndim == 2 else v for k, v in update.items()}
    plain = fedrot.align(update, anchor, symmetry, EAGER).apply(update)
    other = fedrot.align(strided, anchor, symmetry, EAGER).apply(strided)
    assert largest_difference(plain, other) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("anchor_dtype", [torch.float32, torch.bfloat16, None])
def test_dtypes_return_as_they_came(dtype: torch.dtype, anchor_dtype: torch.dtype | None) -> None:
    name = "bert-classifier"
    symmetry = symmetry_for(name)
    anchor = state_of(name, dtype=anchor_dtype or dtype)
    update = fedrot.random_equivalent(state_of(name, dtype=dtype), symmetry, 1, FULL)
    aligned = fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=FULL)).apply(update)
    assert all(aligned[k].dtype == dtype for k in aligned)
    # Each step rounds once in the travelling dtype; the weights still come back to that precision.
    coarse = max(torch.finfo(dtype).eps, torch.finfo(anchor_dtype or dtype).eps)
    assert largest_difference(aligned, anchor) <= 16 * coarse


def test_mixed_dtypes_in_one_model_are_kept() -> None:
    name = "bert-classifier"
    symmetry = symmetry_for(name)
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


def test_an_anchor_reused_for_a_round_gives_the_same_alignments() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name), symmetry_for(name)
    reused = fedrot.Anchor(anchor)
    for seed in range(3):
        update = fedrot.random_equivalent(near(anchor, 0.05, seed), symmetry, seed)
        fresh = fedrot.align(update, anchor, symmetry)
        again = fedrot.align(update, reused, symmetry)
        assert largest_difference(fresh.apply(update), again.apply(update)) == 0
        assert replace(fresh.report, seconds=0) == replace(again.report, seconds=0)
