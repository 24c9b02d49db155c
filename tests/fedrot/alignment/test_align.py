"""Alignment: the way back, inputs left alone, dtypes kept, ties kept, anchors
reused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from fedrot import (
    WHOLE_MODEL,
    AlignmentOptions,
    Anchor,
    align,
    random_equivalent,
    symmetry_of,
)
from tests.fedrot.pairs import touched_by
from tests.models import (
    CASES,
    EAGER,
    FULL,
    Parts,
    State,
    align_tensors,
    config_of,
    copied,
    fresh_model,
    largest_difference,
    near,
    same,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"


def _cast(state: State, weights: torch.dtype, biases: torch.dtype) -> State:
    return {
        k: t.to(weights if k.endswith("weight") else biases, copy=True)
        for k, t in state.items()
    }


@pytest.mark.parametrize("parts", [FULL, WHOLE_MODEL])
@pytest.mark.parametrize(
    ("weights", "biases", "of_anchor"),
    [
        (torch.float64, torch.float64, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_dtypes_return_as_they_came_and_inputs_are_left_alone(
    weights: torch.dtype,
    biases: torch.dtype,
    of_anchor: torch.dtype,
    parts: Parts,
) -> None:
    buffers = {
        "position_ids": torch.arange(40)[None],
        "seen": torch.tensor([True, False]),
    }
    # A tensor that nobody has described holds the residual stream where it is.
    buffers = {
        f"bert.embeddings.{name}": t for name, t in buffers.items() if parts == FULL
    }
    anchor = {**_cast(state_of(NAME), of_anchor, of_anchor), **buffers}
    symmetry = symmetry_of(config_of(NAME), anchor)
    update = {**_cast(state_of(NAME), weights, biases), **buffers}
    update = random_equivalent(update, symmetry, 1, parts)
    kept = [copied(state) for state in (anchor, update)]
    options = AlignmentOptions(parts=parts)
    alignment = align(update, Anchor(anchor), symmetry, options)
    aligned = alignment.apply(update)
    # Each step rounds once in the travelling dtype; the weights still come back to that
    # precision.
    coarse = max(torch.finfo(dtype).eps for dtype in (weights, biases, of_anchor))
    assert largest_difference(aligned, anchor) <= 16 * coarse
    touched = {slot.tensor for group in symmetry.select(parts) for slot in group.slots}
    moved = random_equivalent(update, symmetry, 1, parts)
    for out in (aligned, alignment.inverse().apply(update), moved):
        assert list(out) == list(update)
        assert {key: out[key].dtype for key in out} == {
            key: update[key].dtype for key in update
        }
        assert {key for key in update if out[key] is not update[key]} == touched
        for key in touched:
            assert (
                out[key].untyped_storage().data_ptr()
                != update[key].untyped_storage().data_ptr()
            )
            assert out[key].is_contiguous()
            out[key].zero_()
    for before, now in zip(kept, (anchor, update), strict=True):
        assert before.keys() == now.keys()
        assert same(before, now)


def test_parameters_and_strided_tensors_give_the_same_answer() -> None:
    anchor = state_of(NAME, 1)
    symmetry = symmetry_for(NAME)
    model = fresh_model(NAME)
    plain = align_tensors(model.state_dict(), anchor, symmetry, EAGER)
    strided = {
        k: t.T.contiguous().T if t.ndim == 2 else t
        for k, t in model.state_dict().items()
    }
    for update in (dict(model.named_parameters()), strided):
        aligned = align_tensors(update, anchor, symmetry, EAGER)
        assert largest_difference(plain, aligned) <= 1e-12
        assert not any(
            aligned[k].requires_grad for k in touched_by(CASES[NAME].names, EAGER.parts)
        )


@pytest.mark.parametrize(
    "name", ["bert-mlm", "electra-mlm", "distilbert-mlm", "roberta-mlm"]
)
def test_tied_tensors_stay_tied(name: str) -> None:
    model = fresh_model(name)
    state = model.state_dict()
    pointers = defaultdict(list)
    for key, tensor in state.items():
        pointers[tensor.data_ptr()].append(key)
    expected = sorted(sorted(keys) for keys in pointers.values() if len(keys) > 1)
    assert any(
        "embeddings.word_embeddings.weight" in key for keys in expected for key in keys
    )
    symmetry = symmetry_of(model.config, state)
    assert sorted(sorted(keys) for keys in symmetry.tied) == expected
    moved = random_equivalent(state, symmetry, 1, FULL)
    options = AlignmentOptions(parts=FULL)
    aligned = align_tensors(moved, state, symmetry, options)
    for out in (moved, aligned):
        for keys in expected:
            assert len({out[key].data_ptr() for key in keys}) == 1


def test_an_anchor_reused_for_a_round_gives_the_same_alignments() -> None:
    anchor = state_of(NAME)
    symmetry = symmetry_for(NAME)
    reused = Anchor(anchor)
    for seed in range(3):
        update = random_equivalent(near(anchor, 0.05, seed), symmetry, seed)
        fresh = align(update, anchor, symmetry)
        again = align(update, reused, symmetry)
        assert largest_difference(fresh.apply(update), again.apply(update)) == 0
        assert replace(fresh.report, seconds=0) == replace(again.report, seconds=0)
