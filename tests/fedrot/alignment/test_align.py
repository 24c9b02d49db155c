"""Alignment: the way back, inputs left alone, dtypes kept, ties kept, anchors
reused.
"""

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
    align_tensors,
    cast,
    config_of,
    copied,
    fresh_model,
    largest_difference,
    near,
    same,
    state_of,
    symmetry_for,
    tensors_of,
)

NAME = "bert-classifier"
BASE, SYMMETRY = state_of(NAME), symmetry_for(NAME)


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
    weights, biases, of_anchor, parts
):
    anchor = cast(BASE, of_anchor)
    update = {
        name: tensor.to(weights if name.endswith("weight") else biases)
        for name, tensor in BASE.items()
    }
    # A tensor that nobody has described holds the residual stream where it is.
    if parts == FULL:
        for state in (anchor, update):
            state["bert.embeddings.position_ids"] = torch.arange(40)[None]
            state["bert.embeddings.seen"] = torch.tensor([True, False])
    symmetry = symmetry_of(config_of(NAME), anchor)
    update = random_equivalent(update, symmetry, 1, parts)
    kept = [copied(state) for state in (anchor, update)]
    alignment = align(update, Anchor(anchor), symmetry, AlignmentOptions(parts=parts))
    aligned = alignment.apply(update)
    # Each step rounds once in the travelling dtype; the weights still come back to that
    # precision.
    coarse = max(torch.finfo(dtype).eps for dtype in (weights, biases, of_anchor))
    assert largest_difference(aligned, anchor) <= 16 * coarse
    touched = tensors_of(symmetry.select(parts))
    moved = random_equivalent(update, symmetry, 1, parts)
    for out in (aligned, alignment.inverse().apply(update), moved):
        assert list(out) == list(update)
        for key, tensor in out.items():
            came = update[key]
            assert tensor.dtype == came.dtype
            assert (tensor is not came) == (key in touched)
            if key in touched:
                places = (t.untyped_storage().data_ptr() for t in (tensor, came))
                assert len({*places}) == 2
                assert tensor.is_contiguous()
                tensor.zero_()
    assert all(map(same, kept, (anchor, update)))


def test_parameters_and_strided_tensors_give_the_same_answer():
    anchor = state_of(NAME, 1)
    model = fresh_model(NAME)
    plain = align_tensors(BASE, anchor, SYMMETRY, EAGER)
    strided = {k: t.T.contiguous().T if t.ndim == 2 else t for k, t in BASE.items()}
    for update in (dict(model.named_parameters()), strided):
        aligned = align_tensors(update, anchor, SYMMETRY, EAGER)
        assert largest_difference(plain, aligned) <= 1e-12
        touched = touched_by(CASES[NAME].names, EAGER.parts)
        assert not any(aligned[name].requires_grad for name in touched)


@pytest.mark.parametrize(
    "name", ["bert-mlm", "electra-mlm", "distilbert-mlm", "roberta-mlm"]
)
def test_tied_tensors_stay_tied(name):
    model = fresh_model(name)
    state = model.state_dict()
    pointers = defaultdict(set)
    for key, tensor in state.items():
        pointers[tensor.data_ptr()].add(key)
    expected = [keys for keys in pointers.values() if len(keys) > 1]
    symmetry = symmetry_of(model.config, state)
    assert {frozenset(keys) for keys in symmetry.tied} == {*map(frozenset, expected)}
    assert any("embeddings.word_embeddings.weight" in str(keys) for keys in expected)
    moved = random_equivalent(state, symmetry, 1, FULL)
    aligned = align_tensors(moved, state, symmetry, AlignmentOptions(parts=FULL))
    for out in (moved, aligned):
        for keys in expected:
            assert len({out[key].data_ptr() for key in keys}) == 1


def test_an_anchor_reused_for_a_round_gives_the_same_alignments():
    reused = Anchor(BASE)
    for seed in range(3):
        update = random_equivalent(near(BASE, 0.05, seed), SYMMETRY, seed)
        fresh, again = (align(update, anchor, SYMMETRY) for anchor in (BASE, reused))
        assert same(fresh.apply(update), again.apply(update))
        assert replace(fresh.report, seconds=0) == replace(again.report, seconds=0)
