"""The canonical form: the same function, one value for what says nothing, and only
there.
"""

from dataclasses import replace

import pytest
import torch

from fedrot import (
    AlignmentOptions,
    Anchor,
    FedrotError,
    align,
    canonical,
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
from tests.models import copied, largest_difference, movable, same, squared_distance


@pytest.mark.parametrize("name", MEMBERS)
def test_the_function_stays_and_what_says_nothing_goes(name):
    """Members have the biases and norms that their models allow."""
    state = state_of(name)
    symmetry = symmetry_for(name)
    before = copied(state)
    found = canonical(state, symmetry)
    assert same(state, before)
    expected = outputs(name, state)
    assert gap(outputs(name, found), expected) <= 1e-9 * expected.abs().max()
    of_values = [redundant.read is not None for redundant in symmetry.redundant_biases]
    assert any(of_values) == (name not in NO_REDUNDANT_BIAS)
    keys = 0 if name in VALUES_ONLY else sum(of_values)
    assert len(of_values) == sum(of_values) + keys
    for redundant in symmetry.redundant_biases:
        assert not redundant.bias.of(found[redundant.bias.tensor]).any()
        assert redundant.bias.of(state[redundant.bias.tensor]).any()
    assert bool(symmetry.folds) == (name in TURNING)
    again = canonical(found, symmetry)
    assert largest_difference(again, found) <= 1e-15
    centred = {tensor for tensor, _ in symmetry.centred}
    for fold in symmetry.folds:
        assert not bool((state[fold.gain] == 1).any())
        assert bool((found[fold.gain] == 1).all())
        if fold.holds_bias:
            assert not (fold.bias and bool(found[fold.bias].any()))
            for reader in {reader.weight for reader in fold.readers} - centred:
                assert again[reader] is found[reader]
    assert bool(centred) == (name in TURNING_LAYERNORM)
    for tensor, axis in symmetry.centred:
        assert float(found[tensor].mean(axis).abs().max()) <= 1e-15


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-biased"])
def test_clients_with_other_redundant_biases_meet_their_anchor(name):
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    other = with_other_gains(anchor, symmetry, 4)
    assert squared_distance(other, anchor) > 1
    update = random_equivalent(other, symmetry, 5)
    alignment = align(update, anchor, symmetry, AlignmentOptions(canonical=True))
    expected = canonical(anchor, symmetry)
    assert largest_difference(alignment.apply(update), expected) <= 1e-8
    assert alignment.report.after <= 1e-12 * alignment.report.before


def test_statistics_follow_only_where_nothing_is_folded_or_redundant():
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
def test_an_anchor_serves_both_forms(name):
    """What it knows of its tensors is not taken for what is true of their canonical
    form.
    """
    symmetry = symmetry_for(name)
    shared = Anchor(state_of(name))
    update = {
        key: t + 1e-2 * (state_of(name, 1)[key] - t)
        for key, t in state_of(name).items()
    }
    for in_form in (False, True, False):
        options = AlignmentOptions(canonical=in_form)
        ours, own = (
            align(update, anchor, symmetry, options).report.groups
            for anchor in (shared, Anchor(state_of(name)))
        )
        assert ours == own
    known = shared._known.bounds
    others = shared._canonical.bounds
    assert known
    assert known.keys() == others.keys()
    if name != "bert":
        for key, bound in known.items():
            assert not torch.equal(bound.separation, others[key].separation)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5-gated", "bert", "falcon-7b"])
def test_each_tensor_alone_has_the_same_canonical_form(name):
    """In a view, and from the part of the symmetry around it, which is a layer at
    most.
    """
    symmetry = symmetry_for(name)
    tensors = state_of(name)
    view = CanonicalView(tensors, symmetry)
    assert same(dict(view), canonical(tensors, symmetry))
    assert (list(view), len(view)) == (list(tensors), len(tensors))
    for key in tensors:
        part = symmetry.around([key])
        assert len(part.shapes) < len(tensors) / 2
        assert not part.groups


@pytest.mark.parametrize(
    ("name", "rotates"),
    [("llama", True), ("gpt2", True), ("bert", False), ("xglm", False)],
)
def test_the_default_is_canonical_where_the_stream_can_be_rotated(name, rotates):
    symmetry = symmetry_for(name)
    options = AlignmentOptions(movable(symmetry))
    chosen = options.for_model(symmetry)
    assert chosen.canonical is chosen.rotates is rotates
    tied = replace(symmetry, tied=(("lm_head.weight", "transformer.wte.weight"),))
    for other, model in (
        (replace(options, canonical=False), symmetry),
        (AlignmentOptions(), symmetry),
        (options, tied),
    ):
        assert other.for_model(model).canonical is False
