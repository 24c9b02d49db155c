"""Activation statistics against slow oracles, and models that are matched by nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedrot
from fedrot.collect.activations import RESIDUAL_SITES
from fedrot.matching.problem import Problem
from tests.fedrot.oracles import Array, random_moves
from tests.models import (
    CASES,
    DIM,
    EVERY,
    EVERYTHING,
    FEW,
    HEADS,
    LAYERS,
    NEURONS,
    VOCABULARY,
    State,
    config_of,
    fresh_model,
    inputs,
    largest_difference,
    near,
    squared_distance,
    state_of,
    symmetry_for,
)

WHOLE = fedrot.WHOLE_MODEL
Batch = dict[str, Tensor]


def _model(name: str, state: State) -> Any:
    model = fresh_model(name)
    model.load_state_dict(state)
    return model


def _tokens(name: str, rows: int = 64) -> list[Batch]:
    """Return random tokens, in the shape that the case's task head takes them in."""
    batches = fedrot.random_inputs(config_of(name).to_dict(), rows, batch_size=rows // 2)
    if name.endswith("-choice"):
        return [{key: value[:, None] for key, value in batch.items()} for batch in batches]
    return list(batches)


def _padded(seed: int = 0) -> list[Batch]:
    """Return two batches of different sizes in which most rows end in padding."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for rows, length in ((5, 9), (3, 7)):
        ids = torch.randint(4, VOCABULARY, (rows, length), generator=rng)
        lengths = torch.randint(1, length + 1, (rows,), generator=rng)
        mask = (torch.arange(length) < lengths[:, None]).long()
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


# Moments against a slow oracle


def _seen(model: nn.Module, batches: list[Batch], module: str, output: bool) -> Array:
    """Return a module's inputs or outputs at the tokens that count, row by row, ``[tokens, units]``."""
    rows: list[Array] = []
    mask: Tensor

    def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        tensor = out if output else args[0]
        for example in range(len(tensor)):
            if tensor.ndim == 2:
                rows.append(tensor[example].numpy())
                continue
            for token in range(tensor.shape[1]):
                if mask[example, token]:
                    rows.append(tensor[example, token].numpy())

    handle = model.get_submodule(module).register_forward_hook(hook)
    with torch.no_grad():
        for batch in batches:
            mask = batch["attention_mask"]
            model(**batch)
    handle.remove()
    return np.stack(rows)


def _centred(x: Array) -> Array:
    return x - x.mean(0)


def _correlation(a: Array, c: Array) -> Array:
    """Eq. 1, unit by unit, scaled so that identical models have trace 1."""
    n = a.shape[1]
    found = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            x, y = _centred(a[:, i : i + 1])[:, 0], _centred(c[:, j : j + 1])[:, 0]
            found[i, j] = (x @ y) / np.sqrt((x @ x) * (y @ y)) / n
    return found


def _covariance(a: Array, c: Array) -> Array:
    x, y = _centred(a), _centred(c)
    return np.asarray(x.T @ y / np.sqrt((x**2).sum() * (y**2).sum()))


MOMENTS: dict[str, Callable[[Array, Array], Array]] = {
    "correlation": _correlation,
    "covariance": _covariance,
}


def _pair(name: str) -> tuple[Any, Any]:
    return fresh_model(name), _model(name, near(state_of(name), 0.4, 3))


def _apart(one: fedrot.Activations, other: fedrot.Activations) -> float:
    """Return the largest difference of the moments of two, which are of the same groups."""
    return largest_difference(one.matrices, other.matrices)


@pytest.mark.parametrize("heads", MOMENTS)
@pytest.mark.parametrize("name", FEW)
def test_moments_of_heads_are_those_of_the_oracle(name: str, heads: Any) -> None:
    names, batches = CASES[name].names, _padded() + _tokens(name)
    anchor, client = _pair(name)
    found = fedrot.collect_activations(anchor, client, batches, symmetry_for(name), heads=heads)
    prefix = names.stack.split(".", 1)[1]
    for layer in range(LAYERS):
        sites = {
            "qk": [(names.of(layer, "query"), True), (names.of(layer, "key"), True)],
            "vo": [(names.of(layer, "output"), False)],
        }
        for group, where in sites.items():
            expected = np.mean(
                [
                    MOMENTS[heads](*(_seen(m, batches, *site) for m in (anchor, client)))
                    for site in where
                ],
                axis=0,
            )
            matrix = found.matrices[f"{prefix}.{layer}.{group}"]
            assert matrix.dtype == torch.float64
            assert np.abs(matrix.numpy() - expected).max() <= 1e-5


@pytest.mark.parametrize("units", ["correlation", "covariance"])
@pytest.mark.parametrize("name", FEW)
def test_moments_of_units_are_those_of_the_oracle(name: str, units: Any) -> None:
    """Neurons after their activation, hidden units of the head where they are read; padding apart."""
    names, batches = CASES[name].names, _padded()
    anchor, client = _pair(name)
    found = fedrot.collect_activations(anchor, client, batches, symmetry_for(name), units=units)
    prefix = names.stack.split(".", 1)[1]
    sites = {f"{prefix}.{layer}.ffn": names.of(layer, "down") for layer in range(LAYERS)}
    if name == "bert-classifier":
        sites["pooler"] = "classifier"
    for group, module in sites.items():
        expected = MOMENTS[units](*(_seen(m, batches, module, False) for m in (anchor, client)))
        # Sums in float32 lose more of units that hardly vary, as those of a saturated pooler.
        tolerance = 1e-4 if group == "pooler" else 1e-5
        assert np.abs(found.matrices[group].numpy() - expected).max() <= tolerance
    assert {key for key in found.matrices if key.endswith("ffn")} == {
        key for key in sites if key.endswith("ffn")
    }
    assert not any("scale" in key or key.endswith("heads") for key in found.matrices)


def _readers(name: str) -> list[str]:
    """Return the modules that read the residual stream, in order; Q, K and V read one tensor."""
    names = CASES[name].names
    inside = [names.of(layer, m) for layer in range(LAYERS) for m in ("query", "up")]
    heads = {
        "bert-classifier": ["bert.pooler.dense"],
        "distilbert-mlm": ["vocab_transform", "vocab_projector"],
    }
    return [*inside, *heads[name]]


@pytest.mark.parametrize("residual", ["first", "last", "all"])
@pytest.mark.parametrize("name", FEW)
def test_the_residual_stream_is_seen_where_it_was_asked_for(name: str, residual: str) -> None:
    batches, (anchor, client) = _padded(), _pair(name)
    found = fedrot.collect_activations(anchor, client, batches, symmetry_for(name), residual)
    readers = _readers(name)
    chosen = {"first": readers[:1], "last": readers[-1:], "all": readers}[residual]
    each = [_correlation(*(_seen(m, batches, r, False) for m in (anchor, client))) for r in chosen]
    assert np.abs(found.matrices["residual"].numpy() - np.mean(each, axis=0)).max() <= 1e-5


@pytest.mark.parametrize("name", FEW)
def test_identity_leaves_the_residual_stream_out(name: str) -> None:
    anchor, client = _pair(name)
    symmetry = symmetry_for(name)
    found = fedrot.collect_activations(anchor, client, _padded(), symmetry, "identity")
    others = fedrot.collect_activations(anchor, client, _padded(), symmetry, "all")
    assert "residual" in others.matrices
    assert found.matrices.keys() == others.matrices.keys() - {"residual"}
    assert all(torch.equal(found.matrices[key], others.matrices[key]) for key in found.matrices)


@pytest.mark.parametrize("name", FEW)
def test_a_model_is_itself_up_to_trace_one(name: str) -> None:
    model = fresh_model(name)
    found = fedrot.collect_activations(model, model, _tokens(name), symmetry_for(name))
    for key, matrix in found.matrices.items():
        assert float(matrix.trace()) == pytest.approx(1, abs=1e-5), key
    assert found.matrices["residual"].shape == (HEADS * DIM, HEADS * DIM)
    assert {m.shape[0] for k, m in found.matrices.items() if k.endswith("ffn")} == {NEURONS}


def test_padding_is_ignored() -> None:
    """More padding, other padding: the same moments."""
    name = "bert-classifier"
    anchor, client = _pair(name)
    symmetry, batches = symmetry_for(name), _padded()
    found = fedrot.collect_activations(anchor, client, batches, symmetry)
    longer = []
    for batch in batches:
        extra = torch.full((len(batch["input_ids"]), 4), 7)
        ids = torch.where(batch["attention_mask"].bool(), batch["input_ids"], 9)
        longer.append(
            {
                "input_ids": torch.cat([ids, extra], 1),
                "attention_mask": torch.cat([batch["attention_mask"], torch.zeros_like(extra)], 1),
            }
        )
    again = fedrot.collect_activations(anchor, client, longer, symmetry)
    assert _apart(again, found) <= 1e-5
    # What is not padding counts.
    counted = [{**batch, "attention_mask": torch.ones_like(batch["attention_mask"])} for batch in longer]
    other = fedrot.collect_activations(anchor, client, counted, symmetry)
    assert (other.matrices["residual"] - found.matrices["residual"]).abs().max() > 1e-3


def test_padding_of_multiple_choices_is_ignored() -> None:
    """There the mask is ``[rows, choices, tokens]``, and the model flattens it."""
    name = "bert-choice"
    anchor, client = fresh_model(name), _model(name, near(state_of(name), 0.4, 3))
    symmetry = symmetry_for(name)
    batch = inputs(name)
    other = {**batch, "input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 9)}
    assert not torch.equal(other["input_ids"], batch["input_ids"])
    one, two = (
        fedrot.collect_activations(anchor, client, [b], symmetry, heads="covariance")
        for b in (batch, other)
    )
    assert _apart(two, one) <= 1e-5


def test_batches_add_up() -> None:
    name = "distilbert-mlm"
    anchor, client = _pair(name)
    whole = _tokens(name, 32)
    halves = [{k: v[i : i + 4] for k, v in batch.items()} for batch in whole for i in range(0, 16, 4)]
    one, two = (
        fedrot.collect_activations(anchor, client, iter(b), symmetry_for(name)) for b in (whole, halves)
    )
    assert _apart(two, one) <= 1e-5


def test_batches_need_no_mask() -> None:
    name = "bert-classifier"
    anchor, client = _pair(name)
    batches = _tokens(name)
    bare = [{"input_ids": batch["input_ids"]} for batch in batches]
    one, two = (
        fedrot.collect_activations(anchor, client, b, symmetry_for(name)) for b in (batches, bare)
    )
    assert _apart(two, one) <= 1e-6


# Models are left as they were


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
def test_models_are_left_as_they_were(mode: str) -> None:
    """Modes, hooks, weights and gradients; dropout is off while activations are seen."""
    name = "bert-classifier"
    anchor, client = _pair(name)
    expected = fedrot.collect_activations(anchor, client, _padded(), symmetry_for(name))
    for model in (anchor, client):
        model.train(mode != "eval")
        if mode == "mixed":
            model.bert.embeddings.eval()
    kept = [(_modes(m), copy.deepcopy(m.state_dict())) for m in (anchor, client)]
    found = fedrot.collect_activations(anchor, client, _padded(), symmetry_for(name))
    for model, (modes, state) in zip((anchor, client), kept, strict=True):
        assert _modes(model) == modes
        assert _hooks(model) == 0
        assert largest_difference(model.state_dict(), state) == 0
        assert all(parameter.grad is None for parameter in model.parameters())
    assert _apart(found, expected) == 0
    assert not any(matrix.requires_grad for matrix in found.matrices.values())


def test_models_are_left_as_they_were_when_a_batch_fails() -> None:
    name = "bert-classifier"
    anchor, client = _pair(name)
    anchor.train()
    with pytest.raises(IndexError):
        fedrot.collect_activations(
            anchor, client, [{"input_ids": torch.tensor([[10**6]])}], symmetry_for(name)
        )
    assert all(_modes(anchor))
    assert not any(_modes(client))
    assert _hooks(anchor) == _hooks(client) == 0


# Errors


def test_no_batches_are_refused() -> None:
    name = "bert-classifier"
    with pytest.raises(fedrot.FedrotError, match="batch"):
        fedrot.collect_activations(*_pair(name), [], symmetry_for(name))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"residual": "middle"}, "middle"),
        ({"heads": "cosine"}, "cosine"),
        ({"units": "cosine"}, "cosine"),
    ],
)
def test_unknown_choices_are_refused(settings: dict[str, Any], message: str) -> None:
    name = "bert-classifier"
    with pytest.raises(fedrot.FedrotError, match=message):
        fedrot.collect_activations(*_pair(name), _padded(), symmetry_for(name), **settings)


def test_known_choices_are_named() -> None:
    assert set(RESIDUAL_SITES) == {"first", "last", "all", "identity"}
    name = "bert-classifier"
    with pytest.raises(fedrot.FedrotError) as caught:
        fedrot.collect_activations(*_pair(name), _padded(), symmetry_for(name), "Last")
    assert all(choice in str(caught.value) for choice in RESIDUAL_SITES)


@pytest.mark.parametrize("which", ["anchor", "client", "both"])
def test_models_of_another_family_are_refused(which: str) -> None:
    name, other = "bert-classifier", fresh_model("distilbert-classifier")
    anchor, client = _pair(name)
    models = (
        other if which in ("anchor", "both") else anchor,
        other if which in ("client", "both") else client,
    )
    with pytest.raises(fedrot.FedrotError, match=r"model"):
        fedrot.collect_activations(*models, _padded(), symmetry_for(name))


# Matching by activations


def _alive(name: str) -> State:
    """Return a state all of whose units do something: a dead ReLU says nothing about its place."""
    state = state_of(name)
    if "pre_classifier.bias" in state:
        state["pre_classifier.bias"] += 4
    return state


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize("name", EVERY)
def test_activations_bring_a_random_element_back(name: str, weight: float) -> None:
    """With weight 1 they do it alone: the weights have no say."""
    state, symmetry = _alive(name), symmetry_for(name)
    moved = fedrot.random_equivalent(state, symmetry, 3, WHOLE)
    seen = fedrot.collect_activations(
        _model(name, state), _model(name, moved), _tokens(name, 256), symmetry
    )
    options = fedrot.AlignmentOptions(parts=WHOLE, activation_weight=weight)
    alignment = fedrot.align(moved, state, symmetry, options, seen)
    # Rotations are fitted to sums in float32; one unit out of place would be off by 0.1 and more.
    assert largest_difference(alignment.apply(moved), state) <= 1e-4
    assert alignment.report.after <= 1e-9 * alignment.report.before


@pytest.mark.parametrize(("weight", "times"), [(0.2, 0.25), (0.5, 1.0), (0.8, 4.0)])
def test_activations_count_in_proportion_to_the_weights(weight: float, times: float) -> None:
    """``w / (1 - w)`` times the weights' similarity, whose size is that of the two models' blocks."""
    name = "bert-classifier"
    state, client, symmetry = state_of(name), state_of(name, 9), symmetry_for(name)
    group = symmetry.select(("attention",))[0]
    size = HEADS * DIM
    seen = fedrot.Activations({group.name: torch.eye(size, dtype=torch.float64)}, {group.name: ""})
    options = fedrot.AlignmentOptions(activation_weight=weight)
    problem = Problem(fedrot.Anchor(state), client, symmetry, options, seen)
    factor, addition = problem.evidence(group, problem.pairs(group))
    norms = [
        sum(float(model[slot.tensor].square().sum()) for slot in group.slots) ** 0.5
        for model in (state, client)
    ]
    assert factor == 1
    assert addition is not None
    assert torch.allclose(addition, times * norms[0] * norms[1] * seen.matrices[group.name])


@pytest.mark.parametrize("weight", [0.5, 0.9, 1.0])
def test_rotations_found_with_activations_report_the_weights_distance(weight: float) -> None:
    """What activations gain is not distance: a rotation may even lead away from the anchor's weights."""
    name = "bert-classifier"
    state, client, symmetry = state_of(name), state_of(name, 9), symmetry_for(name)
    seen = fedrot.collect_activations(
        _model(name, state), _model(name, client), _tokens(name, 256), symmetry
    )
    options = fedrot.AlignmentOptions(parts=("attention",), activation_weight=weight)
    alignment = fedrot.align(client, state, symmetry, options, seen)
    aligned = alignment.apply(client)
    found = {row.group: (row.before, row.after) for row in alignment.report.groups}
    assert len(found) == 4
    for group in symmetry.select(("attention",)):
        tensors = [slot.tensor for slot in group.slots]
        before, after = (
            squared_distance({n: model[n] for n in tensors}, state) for model in (client, aligned)
        )
        assert found[group.name] == pytest.approx((before, after), rel=1e-9)


def test_weights_have_no_say_where_activations_are_all_that_counts() -> None:
    """The client's weights are noise; its activations come from a model that is the anchor's equal."""
    name = "bert-classifier"
    state, symmetry = state_of(name), symmetry_for(name)
    moved = fedrot.random_equivalent(state, symmetry, 3, WHOLE)
    seen = fedrot.collect_activations(
        _model(name, state), _model(name, moved), _tokens(name, 256), symmetry
    )
    noise = state_of(name, 9)
    options = fedrot.AlignmentOptions(parts=WHOLE, activation_weight=1)
    alignment = fedrot.align(noise, state, symmetry, options, seen)
    assert largest_difference(alignment.apply(moved), state) <= 1e-4


@pytest.mark.parametrize("name", FEW)
def test_a_weight_of_zero_is_no_activations_at_all(name: str) -> None:
    anchor, update, symmetry = state_of(name), state_of(name, 5), symmetry_for(name)
    seen = fedrot.collect_activations(
        _model(name, anchor), _model(name, update), _tokens(name), symmetry
    )
    for parts in (("attention", "ffn"), EVERYTHING):
        options = fedrot.AlignmentOptions(parts=parts, activation_weight=0, chance=0)
        one = fedrot.align(update, anchor, symmetry, options, seen)
        two = fedrot.align(update, anchor, symmetry, options)
        assert [m.group for m in one.moves] == [m.group for m in two.moves]
        pairs = zip(one.moves, two.moves, strict=True)
        assert all(torch.equal(m.element, n.element) for m, n in pairs)
        assert one.report.rows() == two.report.rows()
    mixed = fedrot.AlignmentOptions(parts=WHOLE, activation_weight=0.5)
    other = fedrot.align(update, anchor, symmetry, mixed, seen).apply(update)
    alone = fedrot.align(update, anchor, symmetry, mixed).apply(update)
    assert largest_difference(other, alone) > 0.1
    # Whatever evidence decides, the distances that are reported are those of the weights.
    report = fedrot.align(update, anchor, symmetry, mixed, seen).report
    touched = {slot.tensor for group in symmetry.select(WHOLE) for slot in group.slots}
    for state, reported in ((update, report.before), (other, report.after)):
        distance = squared_distance({key: state[key] for key in touched}, anchor)
        assert reported == pytest.approx(distance, rel=1e-9)


@pytest.mark.parametrize(
    "parts", [("residual",), ("output",), ("heads",), ("attention",), ("ffn",), WHOLE]
)
@pytest.mark.parametrize("heads", MOMENTS)
@pytest.mark.parametrize("name", FEW)
def test_moments_move_with_the_client(name: str, heads: Any, parts: tuple[str, ...]) -> None:
    """Seen after the move they are what they became by moving them."""
    symmetry = symmetry_for(name)
    anchor, client = _pair(name)
    batches = _tokens(name, 128)
    moves = random_moves(symmetry, 5, parts)
    alignment = fedrot.Alignment(symmetry, moves, fedrot.AlignmentReport((), 0, 0, 0))
    after = _model(name, alignment.apply(client.state_dict()))
    seen, expected = (
        fedrot.collect_activations(anchor, model, batches, symmetry, heads=heads)
        for model in (client, after)
    )
    moved = seen.moved(moves)
    back = moved.moved([move.inverse for move in reversed(moves)])
    assert _apart(back, seen) <= 1e-12
    if heads == "correlation" and "attention" in parts:
        # Correlations of rotated units are not rotated correlations.
        expected = _without_rotations(expected, symmetry)
        moved, seen = (_without_rotations(found, symmetry) for found in (moved, seen))
    assert _apart(moved, expected) <= 1e-5
    names = {move.group.name for move in moves}
    changed = {key for key in expected.matrices if names & {key, expected.within[key]}}
    assert changed or not moves or (heads, parts) == ("correlation", ("attention",))
    for key in changed:
        assert (seen.matrices[key] - expected.matrices[key]).abs().max() > 1e-3, key


def _without_rotations(seen: fedrot.Activations, symmetry: fedrot.Symmetry) -> fedrot.Activations:
    rotated = {group.name for group in symmetry.groups if group.part == "attention"}
    kept = {key: matrix for key, matrix in seen.matrices.items() if key not in rotated}
    return fedrot.Activations(kept, {key: seen.within[key] for key in kept})


# Random text


def test_random_inputs_is_reproducible_and_fits_the_model() -> None:
    config = {"vocab_size": 11, "max_position_embeddings": 8}
    one, same, other = (
        list(fedrot.random_inputs(config, 10, 16, batch_size=4, seed=seed)) for seed in (1, 1, 2)
    )
    assert [len(batch["input_ids"]) for batch in one] == [4, 4, 2]
    for left, right in zip(one, same, strict=True):
        assert torch.equal(left["input_ids"], right["input_ids"])
        assert left["input_ids"].shape == left["attention_mask"].shape
        assert left["input_ids"].shape[1] == 6
        assert left["input_ids"].dtype == torch.int64
        assert bool((left["attention_mask"] == 1).all())
    assert not torch.equal(one[0]["input_ids"], other[0]["input_ids"])
    many = torch.cat([b["input_ids"] for b in fedrot.random_inputs(config, 2000, 16)])
    counts = torch.bincount(many.flatten(), minlength=11)
    assert len(counts) == 11
    assert float(counts.min()) > 0.9 * float(counts.max()) * 0.9
    assert next(iter(fedrot.random_inputs({"vocab_size": 5}, 3, 16)))["input_ids"].shape == (3, 16)
