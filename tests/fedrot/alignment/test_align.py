"""Alignment: the way back, inputs left alone, dtypes kept, ties kept, anchors
reused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedrot
from tests.fedrot.pairs import touched_by
from tests.models import (
    CASES,
    EAGER,
    EVERY,
    EVERYTHING,
    FULL,
    State,
    config_of,
    fresh_model,
    largest_difference,
    logits,
    near,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"
WHOLE = fedrot.WHOLE_MODEL
PARTS = (FULL, ("attention", "ffn"), ("heads", "ffn"), ("residual",), ("output",))
#: One model with every selection; the others with everything, or with one of the
#: selections in turn.
CHOICES = [
    *((NAME, parts) for parts in (EVERYTHING, *PARTS)),
    *(
        (name, PARTS[i // 2 % len(PARTS)] if i % 2 else EVERYTHING)
        for i, name in enumerate(EVERY)
    ),
]


@pytest.mark.parametrize(("name", "parts"), CHOICES)
def test_alignment_undoes_a_random_element(name: str, parts: Any) -> None:
    state = state_of(name)
    symmetry = symmetry_for(name)
    moved = fedrot.random_equivalent(state, symmetry, 3, parts)
    alignment = fedrot.align(
        moved, state, symmetry, fedrot.AlignmentOptions(parts=parts)
    )
    assert largest_difference(alignment.apply(moved), state) <= 1e-8
    assert alignment.report.after <= 1e-9 * alignment.report.before
    assert (
        bool(alignment.moves)
        == (alignment.report.before > 1)
        == bool(symmetry.select(parts))
    )
    assert largest_difference(alignment.inverse().apply(state), moved) <= 1e-8


@pytest.mark.parametrize("parts", [FULL, EVERYTHING])
@pytest.mark.parametrize("name", CASES)
def test_apply_keeps_the_function_and_inverse_undoes_it(name: str, parts: Any) -> None:
    anchor, update, symmetry = (
        state_of(name),
        state_of(name, seed=4),
        symmetry_for(name),
    )
    alignment = fedrot.align(update, anchor, symmetry, replace(EAGER, parts=parts))
    aligned = alignment.apply(update)
    moved = {move.group.part for move in alignment.moves}
    assert moved >= {group.part for group in symmetry.select(parts)} - {"heads"}
    assert largest_difference(aligned, update) > 0.1
    assert (logits(name, aligned) - logits(name, update)).abs().max() <= 1e-10
    assert largest_difference(alignment.inverse().apply(aligned), update) <= 1e-12
    assert (
        largest_difference(alignment.inverse().inverse().apply(update), aligned)
        <= 1e-12
    )


def _cast(state: State, weights: torch.dtype, biases: torch.dtype) -> State:
    return {
        k: t.to(weights if k.endswith("weight") else biases, copy=True)
        for k, t in state.items()
    }


@pytest.mark.parametrize("parts", [FULL, WHOLE])
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
    weights: Any,
    biases: Any,
    of_anchor: Any,
    parts: Any,
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
    symmetry = fedrot.symmetry_of(config_of(NAME), anchor)
    update = {**_cast(state_of(NAME), weights, biases), **buffers}
    update = fedrot.random_equivalent(update, symmetry, 1, parts)
    kept = [
        {key: tensor.clone() for key, tensor in state.items()}
        for state in (anchor, update)
    ]
    options = fedrot.AlignmentOptions(parts=parts)
    alignment = fedrot.align(update, fedrot.Anchor(anchor), symmetry, options)
    aligned = alignment.apply(update)
    # Each step rounds once in the travelling dtype; the weights still come back to that
    # precision.
    coarse = max(torch.finfo(dtype).eps for dtype in (weights, biases, of_anchor))
    assert largest_difference(aligned, anchor) <= 16 * coarse
    touched = {slot.tensor for group in symmetry.select(parts) for slot in group.slots}
    moved = fedrot.random_equivalent(update, symmetry, 1, parts)
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
        assert all(torch.equal(before[key], now[key]) for key in before)


def test_parameters_and_strided_tensors_give_the_same_answer() -> None:
    anchor = state_of(NAME, 1)
    symmetry = symmetry_for(NAME)
    model = fresh_model(NAME)
    plain = fedrot.align(model.state_dict(), anchor, symmetry, EAGER).apply(
        model.state_dict()
    )
    strided = {
        k: t.T.contiguous().T if t.ndim == 2 else t
        for k, t in model.state_dict().items()
    }
    for update in (dict(model.named_parameters()), strided):
        aligned = fedrot.align(update, anchor, symmetry, EAGER).apply(update)
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
    symmetry = fedrot.symmetry_of(model.config, state)
    assert sorted(sorted(keys) for keys in symmetry.tied) == expected
    moved = fedrot.random_equivalent(state, symmetry, 1, FULL)
    options = fedrot.AlignmentOptions(parts=FULL)
    aligned = fedrot.align(moved, state, symmetry, options).apply(moved)
    for out in (moved, aligned):
        for keys in expected:
            assert len({out[key].data_ptr() for key in keys}) == 1


def test_an_anchor_reused_for_a_round_gives_the_same_alignments() -> None:
    anchor = state_of(NAME)
    symmetry = symmetry_for(NAME)
    reused = fedrot.Anchor(anchor)
    for seed in range(3):
        update = fedrot.random_equivalent(near(anchor, 0.05, seed), symmetry, seed)
        fresh = fedrot.align(update, anchor, symmetry)
        again = fedrot.align(update, reused, symmetry)
        assert largest_difference(fresh.apply(update), again.apply(update)) == 0
        assert replace(fresh.report, seconds=0) == replace(again.report, seconds=0)
