"""Activation statistics against slow oracles, and models that are matched by nothing
else.
"""

import numpy as np
import pytest
import torch

from fedrot import (
    WHOLE_MODEL,
    Activations,
    AlignmentOptions,
    Anchor,
    align,
    collect_activations,
    random_equivalent,
    random_inputs,
)
from fedrot.collect.activations import RESIDUAL_SITES, _run, _sites
from fedrot.errors import FedrotError, UpdateError
from fedrot.matching.problem import Problem
from fedrot.symmetry.groups import apply_moves
from tests import families
from tests.fedrot.collect.tiny import batch_of, rows_of
from tests.fedrot.oracles import eye, gap, random_moves
from tests.fedrot.pairs import only
from tests.models import (
    CASES,
    DIM,
    EVERYTHING,
    FEW,
    HEADS,
    LAYERS,
    align_tensors,
    config_of,
    fresh_model,
    largest_difference,
    near,
    same,
    squared_distance,
    state_of,
    symmetry_for,
    tensors_of,
)

BERT = "bert-classifier"


def loaded(name, state):
    model = fresh_model(name)
    model.load_state_dict(state)
    return model


def pair_of(name):
    return fresh_model(name), loaded(name, near(state_of(name), 0.4, 3))


def tokens(name, rows=64):
    """Return random tokens, in the shape that the case's task head takes them in."""
    batches = random_inputs(config_of(name).to_dict(), rows, batch_size=rows // 2)
    if name.endswith("-choice"):
        return [
            {key: value[:, None] for key, value in batch.items()} for batch in batches
        ]
    return list(batches)


PADDED = [batch_of(1, 5, 9, 6), batch_of(2, 3, 7, 2)]


# Moments against a slow oracle


def correlation(a, c):
    """Eq. 1, scaled so that identical models have trace 1."""
    n = a.shape[1]
    return np.corrcoef(a, c, rowvar=False)[:n, n:] / n


def covariance(a, c):
    x = a - a.mean(0)
    y = c - c.mean(0)
    return np.asarray(x.T @ y / np.sqrt((x**2).sum() * (y**2).sum()))


MOMENTS = {
    "correlation": correlation,
    "covariance": covariance,
}


@pytest.mark.parametrize("how", MOMENTS)
@pytest.mark.parametrize("name", FEW)
def test_moments_of_heads_and_units_are_those_of_the_oracle(name, how):
    """Neurons after their activation, hidden units of the head where they are read;
    padding apart.
    """
    names = CASES[name].names
    batches = PADDED + tokens(name, 8)
    models = pair_of(name)
    rows = [rows_of(model, batches) for model in models]
    found = collect_activations(
        *models, batches, symmetry_for(name), "identity", heads=how, units=how
    ).matrices
    prefix = names.stack.split(".", 1)[1]
    sites = {}
    for layer in range(LAYERS):
        query, key, output, down = (
            names.of(layer, module) for module in ("query", "key", "output", "down")
        )
        sites[f"{prefix}.{layer}.qk"] = [(query, True), (key, True)]
        sites[f"{prefix}.{layer}.vo"] = [(output, False)]
        sites[f"{prefix}.{layer}.ffn"] = [(down, False)]
    # Scales and orders of heads move with the heads' own moments.
    assert {key for key in found if prefix in key} == sites.keys()
    if name == BERT:
        sites["pooler"] = [("classifier", False)]
    for group, where in sites.items():
        each = [
            MOMENTS[how](*(r[module][output].numpy() for r in rows))
            for module, output in where
        ]
        assert found[group].dtype == torch.float64
        # Sums in float32 lose more of units that hardly vary, as those of a saturated
        # pooler.
        tolerance = 1e-4 if group == "pooler" else 1e-5
        assert np.abs(found[group].numpy() - np.mean(each, axis=0)).max() <= tolerance


@pytest.mark.parametrize("residual", RESIDUAL_SITES)
@pytest.mark.parametrize("name", FEW)
def test_the_residual_stream_is_seen_where_it_was_asked_for(name, residual):
    """Queries, keys and values read one tensor, which counts once."""
    models = pair_of(name)
    found = collect_activations(*models, PADDED, symmetry_for(name), residual).matrices
    of = CASES[name].names.of
    readers = [of(layer, m) for layer in range(LAYERS) for m in ("query", "up")]
    readers += HEADS_OF[name]
    chosen = {"first": readers[:1], "last": readers[-1:], "all": readers}
    assert ("residual" in found) == (residual in chosen)
    if residual in chosen:
        rows = [rows_of(model, PADDED) for model in models]
        each = [
            correlation(*(r[reader][0].numpy() for r in rows))
            for reader in chosen[residual]
        ]
        expected = np.mean(each, axis=0)
        assert np.abs(found["residual"].numpy() - expected).max() <= 1e-5


@pytest.mark.parametrize("name", ["albert", "deberta-v3"])
def test_activations_of_every_call_count(name):
    """ALBERT's layers run once for each layer; queries of DeBERTa read positions,
    too.
    """
    model = families.model_of(name)
    batch = batch_of(4, 3, 7, 3, families.VOCABULARY)
    groups = families.symmetry_for(name).select(("attention",))
    outputs = [site for g in groups for site in _sites(g, model) if site.output]
    found = _run(model, outputs, batch)
    rows = rows_of(model, [batch])
    assert outputs
    for site in outputs:
        _, expected = rows[site.module]
        assert torch.equal(found[site], site.slice.of(expected, 1))
        assert len(expected) > batch["attention_mask"].sum()


# Errors

OTHER = fresh_model("distilbert-classifier")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batches": []}, "batch"),
        ({"residual": "Last"}, ".*".join(["residual is 'Last'", *RESIDUAL_SITES])),
        ({"heads": "cosine"}, "heads is 'cosine'"),
        ({"units": "cosine"}, "units is 'cosine'"),
        ({"anchor": OTHER}, "is missing"),
        ({"client": OTHER}, "is missing"),
        ({"client": state_of(BERT)}, "not a torch module"),
    ],
)
def test_what_gives_no_activations_is_refused(given, message):
    anchor, client = pair_of(BERT)
    usual = {
        "anchor": anchor,
        "client": client,
        "batches": PADDED,
        "symmetry": symmetry_for(BERT),
    }
    with pytest.raises(FedrotError, match=message):
        collect_activations(**{**usual, **given})


@pytest.mark.parametrize(("place", "which"), [(0, "anchor"), (1, "client")])
def test_activations_that_overflow_are_refused(place, which):
    models = pair_of(BERT)
    with torch.no_grad():
        models[place].bert.encoder.layer[0].intermediate.dense.weight.mul_(1e30)
    with pytest.raises(
        UpdateError, match=f"The {which}'s activations of '.*ffn' are not finite"
    ):
        collect_activations(*models, PADDED, symmetry_for(BERT))


def test_a_rotated_stream_needs_canonical_tensors():
    name = "llama"
    model = families.model_of(name)
    symmetry = families.symmetry_for(name)
    with pytest.raises(UpdateError, match="gain other than 1"):
        collect_activations(model, model, [families.inputs(name)], symmetry.rotated)


# Matching by activations


def seen_of(name, anchor, client, rows=256):
    models = (loaded(name, state) for state in (anchor, client))
    return collect_activations(*models, tokens(name, rows), symmetry_for(name))


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize(
    "name",
    [
        BERT,
        "distilbert-classifier",
        "roberta-choice",
        "electra-mlm",
        "electra-wide-tokens",
    ],
)
def test_activations_bring_a_random_element_back(name, weight):
    """With weight 1 they do it alone: the client's weights are noise."""
    state = state_of(name)
    symmetry = symmetry_for(name)
    if "pre_classifier.bias" in state:
        # A dead ReLU says nothing about its place.
        state["pre_classifier.bias"] += 4
    moved = random_equivalent(state, symmetry, 3, WHOLE_MODEL)
    options = AlignmentOptions(WHOLE_MODEL, activation_weight=weight)
    client = moved if weight < 1 else state_of(name, 9)
    alignment = align(client, state, symmetry, options, seen_of(name, state, moved))
    # Rotations are fitted to sums in float32; one unit out of place would be off by 0.1
    # and more.
    assert largest_difference(alignment.apply(moved), state) <= 1e-4
    assert weight == 1 or alignment.report.after <= 1e-9 * alignment.report.before


@pytest.mark.parametrize(("weight", "times"), [(0.2, 0.25), (0.5, 1.0), (0.8, 4.0)])
def test_activations_count_in_proportion_to_the_weights(weight, times):
    """``w / (1 - w)`` times the weights' similarity, whose size is that of the two
    models' blocks.
    """
    state, client, symmetry = state_of(BERT), state_of(BERT, 9), symmetry_for(BERT)
    group = symmetry.select(("attention",))[0]
    unit = eye(HEADS * DIM)
    seen = Activations({group.name: unit}, {group.name: ""})
    options = AlignmentOptions(activation_weight=weight)
    problem = Problem(Anchor(state), client, symmetry, options, seen)
    factor, addition = problem.evidence(group, problem.pairs(group))
    blocks = {slot.tensor: torch.zeros(()) for slot in group.slots}
    norms = [squared_distance(blocks, model) ** 0.5 for model in (state, client)]
    assert factor == 1
    assert addition is not None
    assert torch.allclose(addition, times * norms[0] * norms[1] * unit)


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_rotations_found_with_activations_report_the_weights_distance(
    weight,
):
    """What activations gain is not distance: a rotation may even lead away from the
    anchor's weights.
    """
    state, client, symmetry = state_of(BERT), state_of(BERT, 9), symmetry_for(BERT)
    options = AlignmentOptions(parts=("attention",), activation_weight=weight)
    alignment = align(client, state, symmetry, options, seen_of(BERT, state, client))
    aligned = alignment.apply(client)
    groups = symmetry.select(options.parts)
    assert len(groups) == 4
    for group, row in zip(groups, alignment.report.groups, strict=True):
        before, after = (
            squared_distance(only(model, tensors_of([group])), state)
            for model in (client, aligned)
        )
        assert (row.before, row.after) == pytest.approx((before, after), rel=1e-9)


@pytest.mark.parametrize("name", FEW)
def test_a_weight_of_zero_is_no_activations_at_all(name):
    anchor, update, symmetry = state_of(name), state_of(name, 5), symmetry_for(name)
    seen = seen_of(name, anchor, update, 64)
    options = AlignmentOptions(activation_weight=0, parts=EVERYTHING, chance=0)
    with_them, without = (
        align(update, anchor, symmetry, options, *each) for each in ([seen], [])
    )
    assert with_them.report.rows() == without.report.rows()
    assert same(with_them.apply(update), without.apply(update))
    options = AlignmentOptions(WHOLE_MODEL, activation_weight=0.5)
    other, alone = (
        align_tensors(update, anchor, symmetry, options, *each) for each in ([seen], [])
    )
    assert largest_difference(other, alone) > 0.1


@pytest.mark.parametrize(
    ("name", "heads", "parts"),
    [
        (BERT, "covariance", WHOLE_MODEL),
        ("distilbert-mlm", "covariance", ("attention",)),
        ("distilbert-mlm", "correlation", ("heads",)),
        (BERT, "correlation", ("output", "residual", "ffn")),
    ],
)
def test_moments_move_with_the_client(name, heads, parts):
    """Moments after the move are the moved moments; correlations are not rotated."""
    symmetry = symmetry_for(name)
    anchor, client = pair_of(name)
    moves = random_moves(symmetry, 5, parts)
    other = loaded(name, apply_moves(client.state_dict(), moves))
    seen, expected = (
        collect_activations(anchor, model, tokens(name, 128), symmetry, heads=heads)
        for model in (client, other)
    )
    moved = seen.moved(moves)
    back = moved.moved([move.inverse for move in reversed(moves)])
    assert largest_difference(back.matrices, seen.matrices) <= 1e-12
    assert largest_difference(moved.matrices, expected.matrices) <= 1e-5
    names = {move.group.name for move in moves}
    touched = {key for key in expected.matrices if names & {key, expected.within[key]}}
    assert touched
    for key in touched:
        assert gap(seen.matrices[key], expected.matrices[key]) > 1e-3, key


HEADS_OF = {
    BERT: ["bert.pooler.dense"],
    "distilbert-mlm": ["vocab_transform", "vocab_projector"],
}
