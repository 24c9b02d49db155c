"""The contract of every model: its parts move, alone and together, and the function
stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.symmetry import NO_LAYER
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.describe.mixture import ExpertNeurons, ExpertPermutation
from fedrot.symmetry.groups import Move, apply_moves
from fedrot.symmetry.rotary_actions import RotaryPhases
from tests import families, models
from tests.families import ALIBI, FIXED, KINDS, MEMBERS, inputs, model_of, outputs
from tests.models import (
    DIM,
    EAGER,
    EVERYTHING,
    FULL,
    Names,
    State,
    largest_difference,
    logits,
    near,
)

#: The parts that are tried together.
PARTS = (("attention", "ffn"), FULL, EVERYTHING)
#: Every model with every implementation of attention that it has.
BOTH = [
    *(
        (name, attention)
        for name, member in MEMBERS.items()
        for attention in member.attention
    ),
    *product(models.EVERY, ("eager", "sdpa")),
]
#: Lengths of vectors over labels, spans and vocabularies: biases of outputs, which
#: nothing moves.
OUTPUTS = {1, 2, 3, families.VOCABULARY, models.VOCABULARY}
#: Other tensors that stay, by the end of their names: outputs, and gains that all heads
#: share.
STAY = ("final_logits_bias", "logit_scale", "q_norm.weight", "k_norm.weight")


def model_(name: str) -> tuple[State, fedrot.Symmetry, Callable[[State, str], Tensor]]:
    """Return the tensors of a model of either zoo, its symmetry, and what computes its
    outputs.
    """
    if name in MEMBERS:
        compute = lambda tensors, attention: outputs(name, tensors, attention)  # noqa: E731
        return families.state_of(name), families.symmetry_for(name), compute
    compute = lambda tensors, attention: logits(name, tensors, attention)  # noqa: E731
    return models.state_of(name), models.symmetry_for(name), compute


def movable(
    symmetry: fedrot.Symmetry, asked: tuple[str, ...] = EVERYTHING
) -> tuple[str, ...]:
    return tuple(part for part in asked if part not in symmetry.refused)


def changed(one: State, other: State) -> set[str]:
    return {key for key in one if not torch.equal(one[key], other[key])}


def test_every_family_has_a_member_in_every_attention_that_it_has() -> None:
    found = {model_of(name).config.model_type for name in MEMBERS}
    assert found | {"xlm-roberta", "distilbert"} == set(fedrot.supported())
    for name, member in MEMBERS.items():
        assert ("sdpa" in member.attention) == bool(model_of(name)._supports_sdpa), name


@pytest.mark.parametrize(("name", "attention"), BOTH)
def test_every_tensor_moves_and_every_output_stays(name: str, attention: str) -> None:
    """All but the tensors whose only axis is one of the outputs."""
    state, symmetry, compute = model_(name)
    before = compute(state, attention)
    parts = movable(symmetry)
    seen = set[str]()
    alone = [(part,) for part in parts] if attention == "eager" else []
    for seed, chosen in enumerate((*alone, parts), 3):
        moved = fedrot.random_equivalent(state, symmetry, seed, chosen)
        groups = symmetry.select(chosen)
        assert changed(moved, state) <= {
            slot.tensor for group in groups for slot in group.slots
        }
        assert (
            compute(moved, attention) - before
        ).abs().max() <= 1e-9 * before.abs().max()
        assert groups or chosen == ("output",)
        seen |= changed(moved, state)
    assert models.squared_distance(moved, state) > 0.1 * models.squared_distance(
        near(state, 1.4), state
    )
    if attention == "eager" and "residual" in parts:
        still = {
            k
            for k, t in state.items()
            if t.ndim == 1 and len(t) in OUTPUTS and "mlp" not in k
        }
        assert state.keys() - seen == still | {
            key for key in state if key.endswith(STAY)
        }


@pytest.mark.parametrize("name", models.EVERY)
def test_encoders_have_a_group_of_each_kind_in_each_layer(name: str) -> None:
    """Signs are free where a tanh is odd, and BERT's and RoBERTa's task heads have
    one.
    """
    symmetry = models.symmetry_for(name)
    found = Counter(
        (g.layer, g.part, g.action.units)
        for g in symmetry.groups
        if g.layer != NO_LAYER
    )
    each = {
        ("heads", models.HEADS): 1,
        ("attention", models.HEADS): 2,
        ("ffn", models.NEURONS): 1,
    }
    assert found == {
        (i, *key): n for key, n in each.items() for i in range(models.LAYERS)
    }
    assert symmetry.layers == models.LAYERS
    assert symmetry.shapes == {
        key: tuple(t.shape) for key, t in models.state_of(name).items()
    }
    for group in (group for group in symmetry.groups if group.layer == NO_LAYER):
        odd = group.part == "output" and name.startswith(("bert", "roberta", "xlm-r"))
        assert type(group.action).__name__ == (
            "SignedPermutation" if odd else "Permutation"
        )


@pytest.mark.parametrize("name", MEMBERS)
def test_only_bare_models_fixed_positions_and_alibi_refuse_anything(name: str) -> None:
    symmetry = families.symmetry_for(name)
    stays = MEMBERS[name].bare or name in FIXED
    assert set(symmetry.refused) == (
        {"residual"} if stays else {"heads"} if name in ALIBI else set()
    )
    if name in (*ALIBI, *FIXED):
        why = (
            r"'residual' cannot be moved: .* positions"
            if stays
            else r"heads.* order, .* per head"
        )
        with pytest.raises(fedrot.SymmetryError, match=why):
            fedrot.random_equivalent(
                families.state_of(name), symmetry, 3, fedrot.WHOLE_MODEL
            )


def test_random_elements_are_reproducible_and_differ_by_seed() -> None:
    state, symmetry, _ = model_("bert-classifier")
    one, same, other = (
        fedrot.random_equivalent(state, symmetry, s, FULL) for s in (1, 1, 2)
    )
    assert largest_difference(one, same) == 0
    assert largest_difference(one, other) > 0.1


# Matching


@pytest.mark.parametrize("name", KINDS)
def test_hidden_coordinates_are_recovered(name: str) -> None:
    state, symmetry, _ = model_(name)
    for seed, asked in enumerate((("attention", "ffn"), FULL, fedrot.WHOLE_MODEL), 4):
        parts = movable(symmetry, asked)
        moved = fedrot.random_equivalent(state, symmetry, seed, parts)
        options = fedrot.AlignmentOptions(parts=parts, canonical=False)
        alignment = fedrot.align(moved, state, symmetry, options)
        aligned = alignment.apply(moved)
        assert largest_difference(aligned, state) <= 1e-8
        assert largest_difference(alignment.inverse().apply(aligned), moved) <= 1e-8


@pytest.mark.parametrize(
    ("scale", "asked"), [*zip((0.02, 0.5, None), PARTS, strict=True)]
)
@pytest.mark.parametrize("name", KINDS)
def test_distance_never_grows_and_the_function_is_the_update_s(
    name: str, scale: Any, asked: Any
) -> None:
    anchor, symmetry, compute = model_(name)
    update = families.state_of(name, 1) if scale is None else near(anchor, scale)
    options = replace(EAGER, parts=movable(symmetry, asked), canonical=False)
    alignment = fedrot.align(update, anchor, symmetry, options)
    aligned = alignment.apply(update)
    report = alignment.report
    before, after = (
        models.squared_distance(tensors, anchor) for tensors in (update, aligned)
    )
    assert after <= before * (1 + 1e-12)
    assert report.before - report.after == pytest.approx(
        before - after, abs=1e-9 * before
    )
    expected = compute(update, "eager")
    assert (
        compute(aligned, "eager") - expected
    ).abs().max() <= 1e-9 * expected.abs().max()


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_activations_recover_whole_models(name: str, weight: float) -> None:
    """Beside the weights and alone; what does not show in activations is left to the
    weights.
    """
    state, symmetry, _ = model_(name)
    parts = movable(symmetry, fedrot.WHOLE_MODEL)
    moved = fedrot.random_equivalent(state, symmetry, 6, parts)
    both = model_of(name, state), model_of(name, moved)
    activations = fedrot.collect_activations(*both, [inputs(name, rows=128)], symmetry)
    options = fedrot.AlignmentOptions(
        parts=parts, activation_weight=weight, canonical=False
    )
    alignment = fedrot.align(moved, state, symmetry, options, activations)
    assert (
        largest_difference(alignment.apply(moved), state) <= 1e-4
    )  # moments are float32
    # Experts are no modules of their own, in which hooks could see them.
    hidden = (ExpertPermutation, ExpertNeurons)
    asked = (g for g in symmetry.groups if g.part in ("residual", "attention", "ffn"))
    assert {
        g.name for g in asked if not isinstance(g.action, hidden)
    } <= activations.matrices.keys()


@pytest.mark.parametrize(("share", "accepted"), [(0.5e-12, False), (2e-12, True)])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_turn_inside_heads_must_gain_more_than_rounding(
    name: str, share: float, accepted: bool
) -> None:
    """All heads turn by one angle ``t``, which takes ``2 - 2 cos t`` of the trace:
    about its square.
    """
    anchor, symmetry, _ = model_(name)
    turn = share**0.5
    moves = []
    for group in symmetry.select(("attention",)):
        action = group.action
        assert isinstance(action, HeadRotation | RotaryPhases)
        element = torch.full((action.heads, action.dim // 2), turn).double()
        if isinstance(action, HeadRotation):
            plane = torch.tensor([[0.0, -turn], [turn, 0.0]], dtype=torch.float64)
            element = torch.matrix_exp(torch.kron(torch.eye(action.dim // 2), plane))
            element = element.expand(action.heads, -1, -1)
        moves.append(Move(group, element))
    update = apply_moves(anchor, moves)
    alignment = fedrot.align(
        update, anchor, symmetry, fedrot.AlignmentOptions(parts=("attention",))
    )
    assert len(moves) == 4
    assert len(alignment.moves) == (4 if accepted else 0)


#: The layers of models of two stacks, those of the second after those of the first.
STACKS = {
    "t5": ("encoder.block.{}.", "decoder.block.{}."),
    "bart": ("model.encoder.layers.{}.", "model.decoder.layers.{}."),
    "clip": ("text_model.encoder.layers.{}.", "vision_model.encoder.layers.{}."),
    "albert-groups": tuple(
        f"albert.encoder.albert_layer_groups.{i}.albert_layers.{{}}." for i in range(2)
    ),
}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", {0, 1, 2, 3}), ("first:3", {0, 1, 2}), ("last:1", {3}), ([2], {2})],
)
@pytest.mark.parametrize("name", STACKS)
def test_layers_of_a_second_stack_follow_those_of_the_first(
    name: str, layers: Any, expected: Any
) -> None:
    """In what is moved, and in the rows of the report."""
    anchor, symmetry, _ = model_(name)
    update = families.state_of(name, 1)
    alignment = fedrot.align(update, anchor, symmetry, replace(EAGER, layers=layers))
    places = [stack.format(layer) for stack in STACKS[name] for layer in range(2)]
    moved = changed(alignment.apply(update), update)
    assert {
        i for key in moved for i, place in enumerate(places) if key.startswith(place)
    } == expected
    assert all(key.startswith(tuple(places)) for key in moved)
    rows = alignment.report.rows()
    assert {row["layer"] for row in rows} == expected
    groups = [place.removeprefix("model.").removeprefix("albert.") for place in places]
    assert all(row["group"].startswith(groups[row["layer"]]) for row in rows)


# Degenerate weights: nothing is determined there, and still the function must not move.


QKV = ("query", "key", "value")


def _of(
    state: State, names: Names, modules: Sequence[str], layer: int = 0
) -> list[Tensor]:
    """Return weights and biases of a layer, which may be changed in place."""
    return [
        state[f"{names.of(layer, m)}.{leaf}"]
        for m in modules
        for leaf in ("weight", "bias")
    ]


def _rank_deficient(state: State, names: Names) -> None:
    for layer in range(2):
        for tensor in _of(state, names, QKV, layer):
            tensor[DIM // 2 : DIM] = 0
        state[f"{names.of(layer, 'output')}.weight"][:, 3:] *= 1e-14


def _zero_head_and_query(state: State, names: Names) -> None:
    for tensor in (*_of(state, names, QKV, 1), *_of(state, names, ("query",))):
        tensor[:DIM] = 0
    state[f"{names.of(0, 'query')}.weight"].zero_()


def _equal_heads(state: State, names: Names) -> None:
    for tensor in _of(state, names, QKV):
        tensor.copy_(tensor[:DIM].repeat(models.HEADS, *[1] * (tensor.ndim - 1)))
    weight = state[f"{names.of(0, 'output')}.weight"]
    weight.copy_(weight[:, :DIM].repeat(1, models.HEADS))


def _zero_and_equal_neurons(state: State, names: Names) -> None:
    down = state[f"{names.of(0, 'down')}.weight"].T
    for tensor in (*_of(state, names, ("up",)), down):
        tensor[:10] = 0
        tensor[10:30] = tensor[10].clone()


def _all_zero(state: State, names: Names) -> None:
    for tensor in state.values():
        tensor.zero_()


def _huge_and_tiny(state: State, names: Names) -> None:
    for module, size in (("query", 1e6), ("key", 1e-9), ("up", 1e-12)):
        for tensor in _of(state, names, (module,)):
            tensor *= size


DEGENERATE = [
    _rank_deficient,
    _zero_head_and_query,
    _equal_heads,
    _zero_and_equal_neurons,
    _all_zero,
    _huge_and_tiny,
]
WHERE = [
    ({"client"}, torch.float64, 1e-10),
    ({"anchor"}, torch.float64, 1e-10),
    ({"client", "anchor"}, torch.float64, 1e-10),
    ({"client"}, torch.float32, 1e-4),
]


@pytest.mark.parametrize("turn", range(len(WHERE)))
@pytest.mark.parametrize("degrade", DEGENERATE)
def test_degenerate_weights_keep_the_function(degrade: Any, turn: int) -> None:
    """Each in the client, the anchor or both; and each with all sets of parts in
    turn.
    """
    where, dtype, error = WHERE[turn]
    parts = (
        PARTS[(turn + DEGENERATE.index(degrade)) % 3]
        if dtype == torch.float64
        else PARTS[0]
    )
    name = "bert-classifier"
    anchor = models.state_of(name, dtype=dtype)
    symmetry = models.symmetry_for(name)
    client = near(anchor, 0.3)
    for which in where:
        degrade({"client": client, "anchor": anchor}[which], models.CASES[name].names)
    aligned = fedrot.align(client, anchor, symmetry, replace(EAGER, parts=parts)).apply(
        client
    )
    assert all(bool(torch.isfinite(t).all()) for t in aligned.values())
    assert (logits(name, aligned) - logits(name, client)).abs().max() <= error
    before = models.squared_distance(client, anchor)
    assert models.squared_distance(aligned, anchor) <= before * (
        1 + (1e-12 if error < 1e-9 else 1e-5)
    )
    if len(where) == 2:  # a degenerate client that is its anchor does not move
        alignment = fedrot.align(anchor, anchor, symmetry, replace(EAGER, parts=FULL))
        assert largest_difference(alignment.apply(anchor), anchor) <= 1e-12
        assert alignment.report.after <= 1e-20
