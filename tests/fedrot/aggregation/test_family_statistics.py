"""Every family: statistics move with the weights, and RegMean does not see the clients' coordinates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.aggregation import RegMean
from fedrot.collect.statistics import INPUT_AXIS, MEANS
from fedrot.precision import Float64
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.groups import Group
from fedrot.symmetry.moves import Move
from fedrot.symmetry.rotary_actions import RotaryPhases
from tests.families import KINDS, answers, inputs, model_of, state_of, symmetry_for
from tests.fedrot.oracles import seeded
from tests.fedrot.pairs import scrambled
from tests.models import EVERYTHING, State, largest_difference

Grams = dict[str, dict[str, Tensor]]

#: The axis of inputs by kind of statistics.
AXIS = {**INPUT_AXIS, **{kind: axis for axis, kind in MEANS.items()}}

#: Members whose output has no ``logits``, as a diagonal Fisher needs them.
WITHOUT_LOGITS = ["mistral", "clip", "clip-text", "clip-image", "clip-text-bare", "t5-encoder"]


def _grams(name: str, state: State, rows: int = 2) -> Grams:
    """Return the Gram matrices that a client would send, in float64."""
    with Float64():
        return fedrot.collect_gram(model_of(name, state), [inputs(name, rows)])


def _everything(name: str) -> tuple[str, ...]:
    return tuple(part for part in EVERYTHING if part not in symmetry_for(name).refused)


def _rotates(group: Group) -> bool:
    return isinstance(group.kind, (HeadRotation, RotaryPhases))


def _random(name: str, wanted: Callable[[Group], bool] = lambda group: True) -> fedrot.Alignment:
    """Return a random element of every group that is wanted."""
    symmetry, rng = symmetry_for(name), seeded(1)
    chosen = [group for group in symmetry.select(_everything(name)) if wanted(group)]
    moves = tuple(Move(group, group.kind.random(rng)) for group in chosen)
    return fedrot.Alignment(symmetry, moves, fedrot.AlignmentReport((), 0, 0, 0))


def _same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert value.dtype == found[key].dtype == torch.float64
        assert (found[key] - value).abs().max() <= 1e-9 * value.abs().max(), key


def _far(one: State, other: State, at_least: float = 1e-3) -> set[str]:
    """Return the names whose tensors differ visibly."""
    return {k for k in one if (one[k] - other[k]).abs().max() > at_least * one[k].abs().max()}


# Gram matrices


@pytest.mark.parametrize("name", KINDS)
def test_gram_matrices_follow_a_random_element_of_all_parts(name: str) -> None:
    state, alignment = state_of(name), _random(name)
    before, after = (_grams(name, s) for s in (state, alignment.apply(state)))
    moved = alignment.transport(before)
    assert moved.keys() == after.keys() == before.keys()
    for kind, expected in after.items():
        _same(moved[kind], expected)
        read = {
            slot.tensor
            for move in alignment.moves
            for slot in move.group.slots
            if slot.axis == AXIS[kind] and move.group.kind.moved(move.element).any()
        }
        assert _far(before[kind], expected) == read & before[kind].keys()
    assert ("gram_conv1d" in after) == ("input_mean_conv1d" in after) == name.startswith("gpt2")


# Gradients


def _gradients(name: str, state: State) -> State:
    """Return the gradients of one loss, by every name of a parameter that the loss sees."""
    model = model_of(name, state)
    out = answers(name, model)
    target = torch.randn(out.shape, generator=seeded(2), dtype=torch.float64)
    ((out - target).square() + 3 * out.sin()).sum().backward()
    named = model.named_parameters(remove_duplicate=False)
    return {key: parameter.grad for key, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize("name", KINDS)
def test_squares_of_gradients_follow_what_does_not_rotate(name: str) -> None:
    state, alignment = state_of(name), _random(name, lambda group: not _rotates(group))
    before, after = (
        {key: value.square() for key, value in _gradients(name, s).items()}
        for s in (state, alignment.apply(state))
    )
    scale = max(float(value.max()) for value in after.values())
    moved = alignment.transport({"fisher": before})["fisher"]
    assert moved.keys() == after.keys()
    for key, value in after.items():
        assert (moved[key] - value).abs().max() <= 1e-9 * scale, key
    with pytest.raises(fedrot.FedrotError, match="rotation"):
        _random(name, _rotates).transport({"fisher": before})


@pytest.mark.parametrize("name", [name for name in KINDS if name not in WITHOUT_LOGITS])
def test_a_collected_fisher_follows_what_does_not_rotate(name: str) -> None:
    state, alignment = state_of(name), _random(name, lambda group: not _rotates(group))

    def fisher(tensors: State) -> State:
        with Float64():
            model = model_of(name, tensors)
            return fedrot.collect_fisher(model, [inputs(name)], max_rows=1)["fisher"]

    before, after = fisher(state), fisher(alignment.apply(state))
    moved = alignment.transport({"fisher": before})["fisher"]
    scale = max(float(value.max()) for value in after.values())
    assert moved.keys() == after.keys()
    for key, value in after.items():
        assert (moved[key] - value).abs().max() <= 1e-9 * scale, key


# RegMean


@pytest.mark.parametrize("whole", [False, True], ids=["default", "whole"])
@pytest.mark.parametrize("name", KINDS)
def test_scrambled_clients_give_the_same_regmean_with_transport_only(name: str, whole: bool) -> None:
    symmetry = symmetry_for(name)
    asked = fedrot.WHOLE_MODEL if whole else fedrot.AlignmentOptions().parts
    parts = tuple(part for part in asked if part not in symmetry.refused)
    plain, transported, raw = RegMean(0.9), RegMean(0.9), RegMean(0.9)
    for seed, (client, moved, alignment) in enumerate(scrambled(state_of(name), symmetry, parts)):
        weight, rows = 1.0 + seed, 6 + 2 * seed
        plain.add(client, weight, _grams(name, client, rows))
        statistics, aligned = _grams(name, moved, rows), alignment.apply(moved)
        transported.add(aligned, weight, alignment.transport(statistics))
        raw.add(aligned, weight, statistics)
    expected = plain.result()
    assert largest_difference(transported.result(), expected) <= 1e-8
    assert len(_far(expected, raw.result())) >= 2


@pytest.mark.parametrize("name", ["t5", "t5-gated", "bart"])
def test_labels_alone_are_what_a_decoder_reads(name: str) -> None:
    """The usual batch of sequence-to-sequence training has no inputs of the decoder."""
    model = model_of(name)
    given = {key: value for key, value in inputs(name).items() if not key.startswith("decoder")}
    labels = torch.tensor([[5, 9, 7, 1], [8, 6, -100, -100]])
    read = model.prepare_decoder_input_ids_from_labels(labels=labels)
    shown = {"decoder_input_ids": read, "decoder_attention_mask": (labels != -100).long()}
    short, full = {**given, "labels": labels}, {**given, **shown, "labels": labels}
    for collect in (fedrot.collect_gram, partial(fedrot.collect_fisher, labels="data")):
        found, expected = (collect(model, [batch]) for batch in (short, full))
        assert found.keys() == expected.keys()
        for kind, by_name in expected.items():
            assert largest_difference(found[kind], by_name) == 0
