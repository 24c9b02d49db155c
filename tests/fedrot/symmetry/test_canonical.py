"""Canonical biases: the same function, one value for what says nothing, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedrot
from fedrot.symmetry.canonical import CanonicalView
from tests.families import MEMBERS, outputs, state_of, symmetry_for
from tests.models import State, largest_difference, squared_distance

#: Members whose attention has no bias, or whose key biases are seen while outputs have no bias.
WITHOUT = {
    *("t5", "t5-gated", "t5-classifier", "mt5", "t5-encoder", "gpt-neox-tokens"),
    *(
        "vit-plain",
        "llama",
        "llama-factor",
        "mistral",
        "qwen2",
        "gemma3",
        "phi3",
        "phi3-partial",
        "modernbert",
        "gptj",
        "gptj-whole",
        "falcon-7b",
        "falcon-11b",
        "falcon-40b",
        "mixtral",
    ),
}

#: Members whose value biases alone are redundant: rotary positions on all of a head, and positions that
#: attend to content while keys of positions have no bias of their own.
VALUES_ONLY = {
    *("llama-biased", "qwen3", "modernbert-biased"),
    *("deberta", "deberta-c2p", "deberta-embedding", "deberta-v3", "deberta-v3-new"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_the_function_stays_and_the_biases_go(name: str) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    before = {key: value.clone() for key, value in state.items()}
    found = fedrot.canonical(state, symmetry)
    assert largest_difference(state, before) == 0
    expected = outputs(name, state)
    assert (outputs(name, found) - expected).abs().max() <= 1e-9 * expected.abs().max()
    for redundant in symmetry.redundant_biases:
        assert not redundant.bias.of(found[redundant.bias.tensor]).any()
        assert redundant.bias.of(state[redundant.bias.tensor]).any()
    assert largest_difference(fedrot.canonical(found, symmetry), found) <= 1e-15


@pytest.mark.parametrize("name", MEMBERS)
def test_redundant_biases_are_where_they_should_be(name: str) -> None:
    redundant_biases = symmetry_for(name).redundant_biases
    keys = [redundant for redundant in redundant_biases if redundant.read is None]
    values = [redundant for redundant in redundant_biases if redundant.read is not None]
    assert bool(values) == (name not in WITHOUT)
    assert len(keys) == (0 if name in VALUES_ONLY else len(values))


def _other_biases(name: str, seed: int) -> State:
    """Return the same function with other biases: written by hand, not by the library's table."""
    state, generator = state_of(name), torch.Generator().manual_seed(seed)
    for key in [k for k in state if k.endswith("attention.self.key.bias")]:
        state[key] += torch.randn(state[key].shape, generator=generator, dtype=torch.float64)
        value, output = (key.replace("self.key", part) for part in ("self.value", "output.dense"))
        shift = torch.randn(state[value].shape, generator=generator, dtype=torch.float64)
        state[value] += shift
        state[output] -= state[output.replace("bias", "weight")] @ shift
    return state


def test_models_that_differ_in_redundant_biases_alone_meet() -> None:
    name = "bert"
    state, other, symmetry = state_of(name), _other_biases(name, 3), symmetry_for(name)
    assert squared_distance(state, other) > 1
    both = [fedrot.canonical(tensors, symmetry) for tensors in (state, other)]
    assert largest_difference(*both) <= 1e-12


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt-neox", "llama-biased", "deberta"])
def test_alignment_by_canonical_biases(name: str) -> None:
    """A client in other coordinates and another redundant bias meets its anchor; by default it does
    not."""
    anchor, symmetry = state_of(name), symmetry_for(name)
    start = _other_biases(name, 4) if name == "bert" else anchor
    update = fedrot.random_equivalent(start, symmetry, 5)
    options = fedrot.AlignmentOptions(canonical=True)
    alignment = fedrot.align(update, anchor, symmetry, options)
    expected = fedrot.canonical(anchor, symmetry)
    assert largest_difference(alignment.apply(update), expected) <= 1e-8
    assert alignment.report.after <= 1e-12 * alignment.report.before
    if name == "bert":
        plain = fedrot.align(update, anchor, symmetry)
        assert largest_difference(plain.apply(update), anchor) > 1e-2


def test_statistics_cannot_follow_canonical_biases() -> None:
    name = "bert"
    anchor, symmetry = state_of(name), symmetry_for(name)
    options = fedrot.AlignmentOptions(canonical=True, chance=0)
    alignment = fedrot.align(state_of(name, 1), anchor, symmetry, options)
    with pytest.raises(fedrot.FedrotError, match=r"fedrot\.canonical"):
        alignment.transport({"fisher": {}})


def test_a_separation_that_was_measured_serves_canonical_biases_too() -> None:
    """An anchor that is used for many clients keeps what it knows."""
    name = "bert"
    anchor, symmetry = fedrot.Anchor(state_of(name)), symmetry_for(name)
    options = fedrot.AlignmentOptions(canonical=True, chance=0)
    for seed in (1, 2):
        fedrot.align(state_of(name, seed), anchor, symmetry, options)
    assert anchor._canonical.bounds


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_anchor_serves_both_forms(name: str) -> None:
    """What it knows of its tensors is not taken for what is true of their canonical form."""
    symmetry, shared = symmetry_for(name), fedrot.Anchor(state_of(name))
    update = {key: t + 1e-2 * (state_of(name, 1)[key] - t) for key, t in state_of(name).items()}
    for canonical in (False, True, False):
        options = fedrot.AlignmentOptions(canonical=canonical)
        ours, own = (
            fedrot.align(update, anchor, symmetry, options).report.groups
            for anchor in (shared, fedrot.Anchor(state_of(name)))
        )
        assert ours == own
    known, in_form = shared._known.bounds, shared._canonical.bounds
    assert known.keys() == in_form.keys()
    for key, (bound, _) in known.items():
        assert not torch.equal(bound, in_form[key][0])


def test_statistics_follow_where_nothing_is_folded_or_redundant() -> None:
    symmetry, anchor = symmetry_for("gemma3"), state_of("gemma3")
    assert not symmetry.redundant_biases
    assert not symmetry.folds
    options = fedrot.AlignmentOptions(canonical=True, chance=0)
    alignment = fedrot.align(state_of("gemma3", 1), anchor, symmetry, options)
    fisher = {"fisher": {"model.norm.weight": torch.ones_like(anchor["model.norm.weight"])}}
    found = alignment.transport(fisher)["fisher"]["model.norm.weight"]
    assert torch.equal(found, fisher["fisher"]["model.norm.weight"])


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5-gated", "vit", "bert", "falcon-7b"])
def test_a_view_of_the_canonical_form_computes_each_tensor_alone(name: str) -> None:
    symmetry, tensors = symmetry_for(name), state_of(name)
    expected = fedrot.canonical(tensors, symmetry)
    found = CanonicalView(tensors, symmetry)
    assert list(found) == list(tensors)
    assert len(found) == len(tensors)
    assert all(torch.equal(found[key], expected[key]) for key in tensors)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_part_around_a_tensor_is_enough_for_its_canonical_form(name: str) -> None:
    symmetry, tensors = symmetry_for(name), state_of(name)
    expected = fedrot.canonical(tensors, symmetry)
    sizes = []
    for key in tensors:
        part = symmetry.around([key])
        alone = fedrot.canonical({other: tensors[other] for other in part.shapes}, part)
        assert torch.equal(alone[key], expected[key])
        sizes.append(len(part.shapes))
    assert max(sizes) < len(tensors) / 2, "a layer at most"


def test_what_is_folded_already_is_not_copied() -> None:
    symmetry = symmetry_for("llama")
    folded = fedrot.canonical(state_of("llama"), symmetry)
    again = fedrot.canonical(folded, symmetry)
    readers = {reader.weight for fold in symmetry.folds for reader in fold.readers}
    assert all(again[name] is folded[name] for name in readers)


def test_the_default_is_canonical_where_the_stream_can_be_rotated() -> None:
    for name, rotates in (("llama", True), ("gpt2", True), ("bert", False), ("xglm", False)):
        symmetry = symmetry_for(name)
        parts = tuple(part for part in fedrot.WHOLE_MODEL if part not in symmetry.refused)
        chosen = fedrot.AlignmentOptions(parts).for_model(symmetry)
        assert chosen.canonical is chosen.rotates is rotates
        assert fedrot.AlignmentOptions(parts, canonical=False).for_model(symmetry).canonical is False
        assert fedrot.AlignmentOptions().for_model(symmetry).canonical is False
    tied = replace(symmetry_for("gpt2"), tied=(("lm_head.weight", "transformer.wte.weight"),))
    assert fedrot.AlignmentOptions(fedrot.WHOLE_MODEL).for_model(tied).canonical is False
