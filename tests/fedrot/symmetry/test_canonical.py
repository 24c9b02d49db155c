"""The canonical form: the same function, one value for what says nothing, and only
there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedrot
from fedrot import (
    WHOLE_MODEL,
    AlignmentOptions,
    Anchor,
    FedrotError,
    align,
    random_equivalent,
)
from fedrot.symmetry.canonical import CanonicalView
from tests.families import MEMBERS, outputs, state_of, symmetry_for
from tests.fedrot.oracles import gap
from tests.fedrot.pairs import with_other_gains
from tests.fedrot.symmetry.traits import (
    NO_REDUNDANT_BIAS,
    TURNING,
    TURNING_LAYERNORM,
    VALUES_ONLY,
)
from tests.models import copied, largest_difference, squared_distance


@pytest.mark.parametrize("name", MEMBERS)
def test_the_function_stays_and_what_says_nothing_goes(name: str) -> None:
    state = state_of(name)
    symmetry = symmetry_for(name)
    before = copied(state)
    found = fedrot.canonical(state, symmetry)
    assert largest_difference(state, before) == 0
    expected = outputs(name, state)
    assert gap(outputs(name, found), expected) <= 1e-9 * expected.abs().max()
    for redundant in symmetry.redundant_biases:
        assert not redundant.bias.of(found[redundant.bias.tensor]).any()
        assert redundant.bias.of(state[redundant.bias.tensor]).any()
    for fold in symmetry.folds:
        assert not bool((state[fold.gain] == 1).any())
        assert bool((found[fold.gain] == 1).all())
        assert not (fold.bias and fold.holds_bias and bool(found[fold.bias].any()))
    for tensor, axis in symmetry.centred:
        assert float(found[tensor].mean(axis).abs().max()) <= 1e-15
    again = fedrot.canonical(found, symmetry)
    assert largest_difference(again, found) <= 1e-15
    centred = {tensor for tensor, _ in symmetry.centred}
    for reader in (
        reader for fold in symmetry.folds if fold.holds_bias for reader in fold.readers
    ):
        assert reader.weight in centred or again[reader.weight] is found[reader.weight]


@pytest.mark.parametrize("name", MEMBERS)
def test_members_have_the_biases_and_norms_that_their_models_allow(name: str) -> None:
    symmetry = symmetry_for(name)
    keys = [
        redundant for redundant in symmetry.redundant_biases if redundant.read is None
    ]
    values = [
        redundant
        for redundant in symmetry.redundant_biases
        if redundant.read is not None
    ]
    assert bool(values) == (name not in NO_REDUNDANT_BIAS)
    assert len(keys) == (0 if name in VALUES_ONLY else len(values))
    assert bool(symmetry.folds) == (name in TURNING)
    assert bool(symmetry.centred) == (name in TURNING_LAYERNORM)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-biased"])
def test_clients_with_other_redundant_biases_meet_their_anchor(name: str) -> None:
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    other = with_other_gains(anchor, symmetry, 4)
    assert squared_distance(other, anchor) > 1
    update = random_equivalent(other, symmetry, 5)
    options = AlignmentOptions(canonical=True)
    alignment = align(update, anchor, symmetry, options)
    expected = fedrot.canonical(anchor, symmetry)
    assert largest_difference(alignment.apply(update), expected) <= 1e-8
    assert alignment.report.after <= 1e-12 * alignment.report.before


def test_statistics_follow_only_where_nothing_is_folded_or_redundant() -> None:
    options = AlignmentOptions(canonical=True, chance=0)
    fisher = {"fisher": {"model.norm.weight": torch.ones(24, dtype=torch.float64)}}
    for name in ("bert", "gemma3"):
        symmetry = symmetry_for(name)
        alignment = align(state_of(name, 1), state_of(name), symmetry, options)
        if name == "bert":
            with pytest.raises(FedrotError, match=r"fedrot\.canonical"):
                alignment.transport({"fisher": {}})
            continue
        assert not symmetry.redundant_biases + symmetry.folds
        found = alignment.transport(fisher)["fisher"]["model.norm.weight"]
        assert torch.equal(found, fisher["fisher"]["model.norm.weight"])


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_an_anchor_serves_both_forms(name: str) -> None:
    """What it knows of its tensors is not taken for what is true of their canonical
    form.
    """
    symmetry = symmetry_for(name)
    shared = Anchor(state_of(name))
    update = {
        key: t + 1e-2 * (state_of(name, 1)[key] - t)
        for key, t in state_of(name).items()
    }
    for canonical in (False, True, False):
        options = AlignmentOptions(canonical=canonical)
        ours, own = (
            align(update, anchor, symmetry, options).report.groups
            for anchor in (shared, Anchor(state_of(name)))
        )
        assert ours == own
    known = shared._known.bounds
    in_form = shared._canonical.bounds
    assert known
    assert known.keys() == in_form.keys()
    if name != "bert":
        assert all(
            not torch.equal(bound, in_form[key][0]) for key, (bound, _) in known.items()
        )


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5-gated", "bert", "falcon-7b"])
def test_each_tensor_alone_has_the_same_canonical_form(name: str) -> None:
    """In a view, and from the part of the symmetry around it, which is a layer at
    most.
    """
    symmetry = symmetry_for(name)
    tensors = state_of(name)
    expected = fedrot.canonical(tensors, symmetry)
    found = CanonicalView(tensors, symmetry)
    assert list(found) == list(tensors)
    assert len(found) == len(tensors)
    for key in tensors:
        part = symmetry.around([key])
        assert len(part.shapes) < len(tensors) / 2
        assert not part.groups
        assert torch.equal(found[key], expected[key])


def test_the_default_is_canonical_where_the_stream_can_be_rotated() -> None:
    for name, rotates in (
        ("llama", True),
        ("gpt2", True),
        ("bert", False),
        ("xglm", False),
    ):
        symmetry = symmetry_for(name)
        parts = tuple(part for part in WHOLE_MODEL if part not in symmetry.refused)
        chosen = AlignmentOptions(parts).for_model(symmetry)
        assert chosen.canonical is chosen.rotates is rotates
        assert (
            AlignmentOptions(parts, canonical=False).for_model(symmetry).canonical
            is False
        )
        assert AlignmentOptions().for_model(symmetry).canonical is False
    tied = replace(
        symmetry_for("gpt2"), tied=(("lm_head.weight", "transformer.wte.weight"),)
    )
    assert AlignmentOptions(WHOLE_MODEL).for_model(tied).canonical is False
