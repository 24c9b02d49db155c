"""The contract of every model: its parts move, alone and together, and the function
stays.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from fedrot import (
    AlignmentOptions,
    SymmetryError,
    align,
    collect_activations,
    random_equivalent,
    supported,
)
from fedrot.symmetry import NO_LAYER
from fedrot.symmetry.actions import HeadRotation, Permutation
from fedrot.symmetry.describe.mixture import ExpertNeurons, ExpertPermutation
from fedrot.symmetry.groups import Move, apply_moves
from fedrot.symmetry.signs import SignedPermutation
from tests import families, models
from tests.families import ALIBI, FIXED, KINDS, MEMBERS, inputs, model_of, outputs
from tests.fedrot.oracles import eye, gap
from tests.fedrot.pairs import recovered
from tests.models import (
    CASES,
    DIM,
    EAGER,
    EVERY,
    EVERYTHING,
    FEW,
    FULL,
    WIDTH,
    align_tensors,
    changed,
    largest_difference,
    logits,
    movable,
    near,
    same,
    tensors_of,
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


def zoo(name):
    """Return what holds the states and symmetries of a model."""
    return families if name in MEMBERS else models


def model_(name):
    """Return the tensors of a model of either zoo, its symmetry, and what computes its
    outputs.
    """
    compute = outputs if name in MEMBERS else logits
    home = zoo(name)
    return home.state_of(name), home.symmetry_for(name), partial(compute, name)


def agree(found, expected):
    """Return whether outputs differ by no more than rounding."""
    return bool(gap(found, expected) <= 1e-9 * expected.abs().max())


def test_every_family_has_a_member_in_every_attention_that_it_has():
    found = {model_of(name).config.model_type for name in MEMBERS}
    assert found | {"xlm-roberta", "distilbert"} == set(supported())
    for name, member in MEMBERS.items():
        assert ("sdpa" in member.attention) == bool(model_of(name)._supports_sdpa), name


@pytest.mark.parametrize(("name", "attention"), BOTH)
def test_every_tensor_moves_and_every_output_stays(name, attention):
    """All but the tensors whose only axis is one of the outputs."""
    state, symmetry, compute = model_(name)
    before = compute(state, attention)
    parts = movable(symmetry)
    seen = set[str]()
    alone = [(part,) for part in parts] if attention == "eager" else []
    for seed, chosen in enumerate((*alone, parts), 3):
        moved = random_equivalent(state, symmetry, seed, chosen)
        groups = symmetry.select(chosen)
        touched = tensors_of(groups)
        assert changed(moved, state) <= touched
        assert agree(compute(moved, attention), before)
        assert groups or chosen == ("output",)
        seen |= changed(moved, state)
    assert models.squared_distance(moved, state) > 0.1 * models.squared_distance(
        near(state, 1.4), state
    )
    if attention == "eager" and "residual" in parts:
        still = {
            key
            for key, tensor in state.items()
            if tensor.ndim == 1 and len(tensor) in OUTPUTS and "mlp" not in key
        }
        still |= {key for key in state if key.endswith(STAY)}
        assert state.keys() - seen == still


#: Sets of parts whose random elements are undone: three with every kind of family; of
#: encoders one model with every set, the others with everything, or one in turn.
SETS = (FULL, ("attention", "ffn"), ("heads", "ffn"), ("residual",), ("output",))


UNDONE = [
    *product(KINDS, (SETS[1], FULL, EVERYTHING)),
    *product(["bert-classifier"], (EVERYTHING, *SETS)),
    *(
        (name, SETS[i // 2 % len(SETS)] if i % 2 else EVERYTHING)
        for i, name in enumerate(EVERY)
    ),
]


@pytest.mark.parametrize("name", models.EVERY)
def test_encoders_have_a_group_of_each_kind_in_each_layer(name):
    """Signs are free where a tanh is odd, and BERT's and RoBERTa's task heads have
    one.
    """
    state, symmetry, _ = model_(name)
    across = [group for group in symmetry.groups if group.layer == NO_LAYER]
    found = Counter((g.layer, g.part, g.action.units) for g in symmetry.groups)
    found -= Counter((NO_LAYER, g.part, g.action.units) for g in across)
    assert found == {
        (layer, part, units): 2 if part == "attention" else 1
        for layer in range(models.LAYERS)
        for part, units in zip(
            FULL, (models.HEADS,) * 2 + (models.NEURONS,), strict=True
        )
    }
    assert symmetry.layers == models.LAYERS
    assert symmetry.shapes == {key: tuple(t.shape) for key, t in state.items()}
    for group in across:
        odd = group.part == "output" and name.startswith(("bert", "roberta", "xlm-r"))
        assert type(group.action) is (SignedPermutation if odd else Permutation)


@pytest.mark.parametrize("name", MEMBERS)
def test_only_bare_models_fixed_positions_and_alibi_refuse_anything(name):
    state, symmetry, _ = model_(name)
    fixed = name in FIXED
    refused = "residual" if MEMBERS[name].bare or fixed else "heads"
    assert set(symmetry.refused) == (
        {refused} if refused == "residual" or name in ALIBI else set()
    )
    if name in (*ALIBI, *FIXED):
        why = "'residual' .* positions" if fixed else "heads.* order, .* per head"
        with pytest.raises(SymmetryError, match=why):
            random_equivalent(state, symmetry, 3, EVERYTHING)


def test_random_elements_are_reproducible_and_differ_by_seed():
    state, symmetry, _ = model_("bert-classifier")
    one, again, other = (random_equivalent(state, symmetry, s, FULL) for s in (1, 1, 2))
    assert same(one, again)
    assert largest_difference(one, other) > 0.1


# Matching


@pytest.mark.parametrize(("name", "asked"), UNDONE)
def test_hidden_coordinates_are_recovered(name, asked):
    state, symmetry, _ = model_(name)
    parts = movable(symmetry, asked)
    moved = random_equivalent(state, symmetry, 4, parts)
    options = AlignmentOptions(parts=parts, canonical=False)
    alignment = recovered(moved, state, symmetry, options)
    apart = alignment.report.before > 1
    assert bool(alignment.moves) == apart == bool(symmetry.select(parts))


@pytest.mark.parametrize(
    ("scale", "asked"), [*zip((0.02, 0.5, None), PARTS, strict=True)]
)
@pytest.mark.parametrize("name", [*KINDS, *CASES])
def test_distance_never_grows_the_function_stays_and_the_way_leads_back(
    name, scale, asked
):
    anchor, symmetry, compute = model_(name)
    update = zoo(name).state_of(name, 1) if scale is None else near(anchor, scale)
    options = replace(EAGER, parts=movable(symmetry, asked), canonical=False)
    alignment = align(update, anchor, symmetry, options)
    aligned = alignment.apply(update)
    report = alignment.report
    before, after = (
        models.squared_distance(tensors, anchor) for tensors in (update, aligned)
    )
    assert after <= before * (1 + 1e-12)
    assert report.before - report.after == pytest.approx(
        before - after, abs=1e-9 * before
    )
    assert agree(compute(aligned), compute(update))
    back = alignment.inverse()
    assert largest_difference(back.apply(aligned), update) <= 1e-11
    assert largest_difference(back.inverse().apply(update), aligned) <= 1e-11
    if scale is None:
        parts = {group.part for group in symmetry.select(options.parts)}
        assert {move.group.part for move in alignment.moves} >= parts - {"heads"}
        assert largest_difference(aligned, update) > 0.1


def _each(change):
    """Return what changes every tensor of a state."""

    def degrade(state, names):
        for name, tensor in state.items():
            change(name, tensor)

    return degrade


def _equal_units_of_the_stream(name, tensor):
    if tensor.ndim == 2 and tensor.shape[1] == WIDTH:
        tensor[:, 4:20] = tensor[:, 4:5]
    elif WIDTH in tensor.shape[:1]:
        tensor[4:20] = tensor[4:5].clone()


def _zero(*words):
    return _each(lambda name, t: t.mul_(not any(word in name for word in words)))


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_activations_recover_whole_models(name, weight):
    """Beside the weights and alone; what does not show in activations is left to the
    weights.
    """
    state, symmetry, _ = model_(name)
    parts = movable(symmetry)
    moved = random_equivalent(state, symmetry, 6, parts)
    both = model_of(name, state), model_of(name, moved)
    activations = collect_activations(*both, [inputs(name, rows=128)], symmetry)
    options = AlignmentOptions(parts, activation_weight=weight, canonical=False)
    found = align_tensors(moved, state, symmetry, options, activations)
    assert largest_difference(found, state) <= 1e-4  # moments are float32
    # Experts are no modules of their own, in which hooks could see them.
    shown = {
        group.name
        for group in symmetry.select(("residual", "attention", "ffn"))
        if not isinstance(group.action, ExpertPermutation | ExpertNeurons)
    }
    assert shown <= activations.matrices.keys()


@pytest.mark.parametrize(("share", "accepted"), [(0.5e-12, False), (2e-12, True)])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_turn_inside_heads_must_gain_more_than_rounding(name, share, accepted):
    """All heads turn by one angle ``t``, which takes ``2 - 2 cos t`` of the trace:
    about its square.
    """
    anchor, symmetry, _ = model_(name)
    turn = share**0.5
    moves = []
    for group in symmetry.select(("attention",)):
        heads, half = group.action.heads, group.action.dim // 2
        element = torch.full((heads, half), turn).double()
        if isinstance(group.action, HeadRotation):
            plane = torch.tensor([[0.0, -turn], [turn, 0.0]]).double()
            element = torch.matrix_exp(torch.kron(eye(half), plane))
            element = element.expand(heads, -1, -1)
        moves.append(Move(group, element))
    options = AlignmentOptions(parts=("attention",))
    alignment = align(apply_moves(anchor, moves), anchor, symmetry, options)
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
def test_layers_of_a_second_stack_follow_those_of_the_first(name, layers, expected):
    """In what is moved, and in the rows of the report."""
    anchor, symmetry, _ = model_(name)
    update = families.state_of(name, 1)
    alignment = align(update, anchor, symmetry, replace(EAGER, layers=layers))
    places = [stack.format(layer) for stack in STACKS[name] for layer in range(2)]
    moved = changed(alignment.apply(update), update)
    layer_of = {
        key: [key.startswith(place) for place in places].index(True) for key in moved
    }
    assert {*layer_of.values()} == expected
    rows = alignment.report.rows()
    assert {row["layer"] for row in rows} == expected
    for row in rows:
        place = places[row["layer"]]
        assert row["group"].startswith(
            place.removeprefix("model.").removeprefix("albert.")
        )


# Degenerate weights: nothing is determined there, and still the function must not move.


QKV = ("query", "key", "value")


def _of(state, names, modules, layer=0):
    """Return weights and biases of a layer, which may be changed in place."""
    return [
        state[f"{names.of(layer, m)}.{leaf}"]
        for m in modules
        for leaf in ("weight", "bias")
    ]


def _rank_deficient(state, names):
    for layer in range(2):
        for tensor in _of(state, names, QKV, layer):
            tensor[DIM // 2 : DIM] = 0
        state[f"{names.of(layer, 'output')}.weight"][:, 3:] *= 1e-14


def _zero_head_and_query(state, names):
    for tensor in (*_of(state, names, QKV, 1), *_of(state, names, ("query",))):
        tensor[:DIM] = 0
    state[f"{names.of(0, 'query')}.weight"].zero_()


def _equal_heads(state, names):
    for tensor in _of(state, names, QKV):
        tensor.copy_(tensor[:DIM].repeat(models.HEADS, *[1] * (tensor.ndim - 1)))
    weight = state[f"{names.of(0, 'output')}.weight"]
    weight.copy_(weight[:, :DIM].repeat(1, models.HEADS))


def _zero_and_equal_neurons(state, names):
    down = state[f"{names.of(0, 'down')}.weight"].T
    for tensor in (*_of(state, names, ("up",)), down):
        tensor[:10] = 0
        tensor[10:30] = tensor[10].clone()


def _huge_and_tiny(state, names):
    for module, size in (("query", 1e6), ("key", 1e-9), ("up", 1e-12)):
        for tensor in _of(state, names, (module,)):
            tensor *= size


DEGENERATE = {
    "rank": _rank_deficient,
    "zero heads": _zero_head_and_query,
    "equal heads": _equal_heads,
    "equal neurons": _zero_and_equal_neurons,
    "huge and tiny": _huge_and_tiny,
    "zero embeddings": _zero("embeddings"),
    "zero stream": _zero("LayerNorm", "layer_norm", "embeddings"),
    "equal units": _each(_equal_units_of_the_stream),
    "constant columns": _each(lambda name, t: t.view(len(t), -1)[:, ::2].fill_(0.5)),
    "all zero": _zero(""),
    "all equal": _each(lambda name, t: t.fill_(0.25)),
}
#: The model, what is degenerate, the dtype, and the parts that move.
WHERE = [
    (FEW[0], {"client"}, torch.float64, FULL),
    (FEW[0], {"anchor"}, torch.float64, EVERYTHING),
    (FEW[0], {"client", "anchor"}, torch.float64, EVERYTHING),
    (FEW[0], {"client"}, torch.float32, ("attention", "ffn")),
    (FEW[1], {"client"}, torch.float64, EVERYTHING),
    (FEW[1], {"client", "anchor"}, torch.float64, FULL),
]


@pytest.mark.parametrize(("name", "where", "dtype", "parts"), WHERE)
@pytest.mark.parametrize("degrade", DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_weights_keep_the_function(
    degrade,
    name,
    where,
    dtype,
    parts,
):
    """Each in the client, the anchor or both."""
    wide = dtype == torch.float64
    anchor = models.state_of(name, dtype=dtype)
    symmetry = models.symmetry_for(name)
    client = near(anchor, 0.3)
    for which in where:
        degrade({"client": client, "anchor": anchor}[which], CASES[name].names)
    options = replace(EAGER, parts=parts)
    before = models.squared_distance(client, anchor)
    for each in (options, replace(options, within_heads="permutation", chance=1.5)):
        aligned = align_tensors(client, anchor, symmetry, each)
        assert all(bool(torch.isfinite(t).all()) for t in aligned.values())
        error = gap(logits(name, aligned), logits(name, client))
        assert error <= (1e-9 if wide else 1e-4)
        most = before * (1 + (1e-12 if wide else 1e-5))
        assert models.squared_distance(aligned, anchor) <= most
    # A degenerate client that is its anchor does not move.
    if "anchor" in where:
        alignment = align(anchor, anchor, symmetry, options)
        assert largest_difference(alignment.apply(anchor), anchor) <= 1e-12
        assert alignment.report.after <= 1e-20
