"""Models matched as a whole: residual stream, task head, heads, rotations and neurons together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import fedrot
from fedrot.matching import descent
from tests.fedrot.oracles import Array, seeded
from tests.fedrot.pairs import PAIRS, only
from tests.models import (
    CASES,
    EVERY,
    EVERYTHING,
    FEW,
    WIDTH,
    State,
    largest_difference,
    logits,
    near,
    randomise,
    squared_distance,
    state_of,
    symmetry_for,
)

WHOLE = fedrot.WHOLE_MODEL


def _options(**settings: Any) -> fedrot.AlignmentOptions:
    return fedrot.AlignmentOptions(**({"parts": WHOLE} | settings))


def _let_sweep(monkeypatch: pytest.MonkeyPatch, sweeps: int, tolerance: float = 0.0) -> None:
    monkeypatch.setattr(descent, "SWEEPS", sweeps)
    monkeypatch.setattr(descent, "TOLERANCE", tolerance)


def _touched(symmetry: fedrot.Symmetry, parts: tuple[str, ...] = WHOLE) -> set[str]:
    return {slot.tensor for group in symmetry.select(parts) for slot in group.slots}


# The way back


@pytest.mark.parametrize("parts", [WHOLE, EVERYTHING, ("residual",), ("output",)], ids="-".join)
@pytest.mark.parametrize("name", EVERY)
def test_alignment_undoes_a_random_element_of_the_whole_model(name: str, parts: tuple[str, ...]) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    moved = fedrot.random_equivalent(state, symmetry, 3, parts)
    alignment = fedrot.align(moved, state, symmetry, _options(parts=parts))
    assert largest_difference(alignment.apply(moved), state) <= 1e-8
    assert alignment.report.after <= 1e-9 * alignment.report.before
    assert bool(alignment.moves) == bool(symmetry.select(parts))
    assert largest_difference(alignment.inverse().apply(state), moved) <= 1e-8


@pytest.mark.parametrize("name", CASES)
def test_alignment_undoes_a_random_element_under_noise(name: str) -> None:
    """The client trained on: what alignment leaves is what training did, in the anchor's coordinates."""
    anchor, symmetry = state_of(name), symmetry_for(name)
    trained = near(anchor, 0.1)
    moved = fedrot.random_equivalent(trained, symmetry, 3, WHOLE)
    aligned = fedrot.align(moved, anchor, symmetry, _options()).apply(moved)
    best = squared_distance(fedrot.align(trained, anchor, symmetry, _options()).apply(trained), anchor)
    assert squared_distance(aligned, anchor) <= best * (1 + 1e-6)
    assert best <= squared_distance(trained, anchor)


@pytest.mark.parametrize("name", FEW)
def test_apply_keeps_the_function_and_inverse_undoes_it(name: str) -> None:
    anchor, update, symmetry = state_of(name), state_of(name, 4), symmetry_for(name)
    alignment = fedrot.align(update, anchor, symmetry, _options(parts=EVERYTHING))
    aligned = alignment.apply(update)
    moved = {move.group.part for move in alignment.moves}
    assert moved >= {group.part for group in symmetry.select(EVERYTHING)} - {"heads"}
    assert (logits(name, aligned) - logits(name, update)).abs().max() <= 1e-10
    assert largest_difference(alignment.inverse().apply(aligned), update) <= 1e-12
    assert largest_difference(alignment.inverse().inverse().apply(update), aligned) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FEW)
def test_low_precision_comes_back_as_it_went(name: str, dtype: torch.dtype) -> None:
    anchor, symmetry = state_of(name, dtype=dtype), symmetry_for(name)
    update = fedrot.random_equivalent(anchor, symmetry, 1, WHOLE)
    kept = [{k: v.clone() for k, v in state.items()} for state in (anchor, update)]
    alignment = fedrot.align(update, anchor, symmetry, _options())
    aligned = alignment.apply(update)
    assert {tensor.dtype for tensor in aligned.values()} == {dtype}
    assert largest_difference(aligned, anchor) <= 16 * torch.finfo(dtype).eps
    for before, now in zip(kept, (anchor, update), strict=True):
        assert all(torch.equal(before[key], now[key]) for key in before)
    touched = _touched(symmetry)
    for key in update:
        assert (aligned[key] is update[key]) == (key not in touched)


@pytest.mark.parametrize("name", FEW)
def test_clients_aligned_to_one_anchor_are_cycle_consistent(name: str) -> None:
    """The maps from client to client that the anchor induces lead around a circle to the start."""
    symmetry, anchor = symmetry_for(name), state_of(name)
    clients = [state_of(name, 11), near(anchor, 0.3), state_of(name, 12)]
    maps = [fedrot.align(client, anchor, symmetry, _options(parts=EVERYTHING)) for client in clients]
    assert all(alignment.moves for alignment in maps)
    travelled: State = dict(clients[0])
    for i, j in ((0, 1), (1, 2), (2, 0)):
        before = travelled
        travelled = maps[j].inverse().apply(maps[i].apply(before))
        assert largest_difference(travelled, before) > 0.1
        assert (logits(name, travelled) - logits(name, clients[0])).abs().max() <= 1e-10
    assert largest_difference(travelled, clients[0]) <= 1e-10


# Distances


def _check_report(
    name: str, update: State, anchor: State, options: fedrot.AlignmentOptions
) -> tuple[float, float]:
    """Check the report's totals and shares against the tensors; return the distances."""
    symmetry = symmetry_for(name)
    alignment = fedrot.align(update, anchor, symmetry, options)
    aligned, report = alignment.apply(update), alignment.report
    touched = _touched(symmetry, options.parts)
    assert {key for key in update if not torch.equal(aligned[key], update[key])} <= touched
    before, after = (squared_distance(only(state, touched), anchor) for state in (update, aligned))
    slack = 1e-11 * (before + squared_distance(anchor, {n: torch.zeros(()) for n in anchor}))
    assert after <= before + slack
    assert report.before == pytest.approx(before, rel=1e-9, abs=1e-20)
    assert report.after == pytest.approx(after, rel=1e-9, abs=slack)
    removed = sum(row["before"] - row["after"] for row in report.rows())
    assert removed == pytest.approx(before - after, rel=1e-6, abs=slack)
    assert report.share() * report.before == pytest.approx(before - after, rel=1e-6, abs=slack)
    return before, after


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", FEW)
def test_distance_of_whole_models_never_grows_and_is_reported(name: str, pair: str) -> None:
    anchor = state_of(name)
    update = PAIRS[pair](anchor, CASES[name].names)
    for parts in (WHOLE, EVERYTHING, ("residual", "ffn"), ("output", "attention")):
        _check_report(name, update, anchor, _options(parts=parts))


@pytest.mark.parametrize("name", CASES)
def test_every_sweep_brings_unrelated_models_closer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (5, 6):
        anchor, update = state_of(name), state_of(name, seed)
        distances = []
        for sweeps in (1, 2, 3, 4, 8):
            _let_sweep(monkeypatch, sweeps)
            distances.append(_check_report(name, update, anchor, _options()))
        found = [distances[0][0], *(after for _, after in distances)]
        for earlier, later in itertools.pairwise(found):
            assert later <= earlier * (1 + 1e-12)
        assert found[0] > found[1] >= found[-1]


def test_sweeps_stop_where_nothing_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), state_of(name, 5), symmetry_for(name)

    def found(sweeps: int, tolerance: float = 0.0) -> fedrot.Alignment:
        _let_sweep(monkeypatch, sweeps, tolerance)
        return fedrot.align(update, anchor, symmetry, _options())

    long, longer = found(40).apply(update), found(60).apply(update)
    assert largest_difference(long, longer) <= 1e-8
    assert found(20, 0.5).report.after == pytest.approx(found(1).report.after)


def _disagreeing(state: State, key: str, other: int) -> State:
    """Return a client part of which lies in another order of the residual stream."""
    order = torch.randperm(WIDTH, generator=seeded(other))
    out = near(state, 0.05, other)
    for name, tensor in state.items():
        if key in name:
            for axis in range(tensor.ndim):
                if tensor.shape[axis] == WIDTH:
                    out[name] = out[name].index_select(axis, order)
    return out


@pytest.mark.parametrize(
    "key", ["embeddings", "LayerNorm", "transform", "pooler", "vocab", "classifier"]
)
@pytest.mark.parametrize("name", [*FEW, "bert-mlm-untied"])
def test_distance_never_grows_where_a_model_disagrees_with_itself(name: str, key: str) -> None:
    """No single order of the stream serves embeddings, layers and task head."""
    anchor = state_of(name)
    for seed in range(2):
        update = _disagreeing(anchor, key, seed)
        _check_report(name, update, anchor, _options())


@pytest.mark.parametrize(
    ("name", "key"),
    [("bert-mlm", "transform"), ("bert-mlm", "dense"), ("distilbert-mlm", "vocab")],
)
def test_distance_never_grows_where_a_matrix_has_both_axes_in_the_stream(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A language model's transform depends on the order twice: what helps each axis may harm both."""
    symmetry, anchor = symmetry_for(name), state_of(name)
    twice = {"bert-mlm": "cls.predictions.transform.dense", "distilbert-mlm": "vocab_transform"}[name]
    anchor[f"{twice}.weight"] *= 5
    for seed, parts in itertools.product(range(3), (("residual",), WHOLE)):
        update = _disagreeing(anchor, key, seed)
        distances = [squared_distance(update, anchor)]
        for sweeps in (1, 2, 3):
            _let_sweep(monkeypatch, sweeps)
            aligned = fedrot.align(update, anchor, symmetry, _options(parts=parts)).apply(update)
            distances.append(squared_distance(aligned, anchor))
        assert max(distances) <= distances[0] * (1 + 1e-12), (seed, parts)
        assert distances[1:] == pytest.approx(sorted(distances[1:], reverse=True), rel=1e-12)


# Values that determine nothing, and values that are none


def _zero_embeddings(state: State) -> None:
    for name, tensor in state.items():
        if "embeddings" in name:
            tensor.zero_()


def _zero_stream(state: State) -> None:
    for name, tensor in state.items():
        if "LayerNorm" in name or "embeddings" in name or "layer_norm" in name:
            tensor.zero_()


def _equal_units_of_the_stream(state: State) -> None:
    for tensor in state.values():
        if tensor.ndim == 2 and tensor.shape[1] == WIDTH:
            tensor[:, 4:20] = tensor[:, 4:5]
        elif WIDTH in tensor.shape[:1]:
            tensor[4:20] = tensor[4:5].clone()


def _constant_columns(state: State) -> None:
    for tensor in state.values():
        if tensor.ndim == 2:
            tensor[:, ::2] = 0.5


def _all_zero(state: State) -> None:
    for tensor in state.values():
        tensor.zero_()


def _all_equal(state: State) -> None:
    for tensor in state.values():
        tensor.fill_(0.25)


@pytest.mark.parametrize("where", ["client", "anchor", "both"])
@pytest.mark.parametrize(
    "degrade",
    [
        _zero_embeddings,
        _zero_stream,
        _equal_units_of_the_stream,
        _constant_columns,
        _all_zero,
        _all_equal,
    ],
)
@pytest.mark.parametrize("name", FEW)
def test_degenerate_streams_keep_the_function(
    name: str, degrade: Callable[[State], None], where: str
) -> None:
    anchor = state_of(name)
    client = near(anchor, 0.3)
    for which, state in (("client", client), ("anchor", anchor)):
        if where in (which, "both"):
            degrade(state)
    for options in (_options(parts=EVERYTHING), _options(within_heads="permutation")):
        aligned = fedrot.align(client, anchor, symmetry_for(name), options).apply(client)
        assert all(bool(torch.isfinite(t).all()) for t in aligned.values())
        assert (logits(name, aligned) - logits(name, client)).abs().max() <= 1e-9
        assert squared_distance(aligned, anchor) <= squared_distance(client, anchor) * (1 + 1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("residual", "bert.embeddings.word_embeddings.weight"),
        ("residual", "bert.encoder.layer.1.output.LayerNorm.bias"),
        ("residual", "bert.encoder.layer.0.attention.self.key.weight"),
        ("output", "classifier.weight"),
        ("output", "bert.pooler.dense.bias"),
    ],
)
def test_values_that_are_not_finite_are_refused(part: str, key: str, value: float) -> None:
    name = "bert-classifier"
    for parts, damaged in itertools.product(((part,), WHOLE), ("client", "anchor")):
        anchor, client = state_of(name), near(state_of(name), 0.1)
        state = client if damaged == "client" else anchor
        state[key].view(-1)[5] = value
        with pytest.raises(fedrot.UpdateError, match=r"NaN or Inf|overflow") as caught:
            fedrot.align(client, anchor, symmetry_for(name), _options(parts=parts))
        assert f"'{key}'" in str(caught.value)


# Against brute force, on a model that is small enough for it


def _tiny(seed: int) -> tuple[Any, State]:
    config = BertConfig(
        vocab_size=7,
        hidden_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=3,
        max_position_embeddings=5,
        num_labels=3,
    )
    model = randomise(BertForSequenceClassification(config).double(), seed)
    return config, {k: v.detach().clone() for k, v in model.state_dict().items()}


def _stream_moved(state: State, order: list[int]) -> State:
    """Return the model with its residual stream in another order, written out name by name."""
    out = dict(state)
    for name, tensor in state.items():
        reads = any(m in name for m in ("query", "key", "value", "intermediate", "pooler", "embeddings"))
        if name.startswith("classifier"):
            continue
        if "LayerNorm" in name or (".output.dense" in name):
            out[name] = tensor[order]
        elif reads and tensor.ndim == 2:
            out[name] = tensor[:, order]
    return out


def _rows(state: State, *names: str) -> Array:
    """Return tensors side by side, one row per unit; those named with a ``T`` are transposed."""
    columns = []
    for name in names:
        tensor = state[name.removesuffix(".T")]
        tensor = tensor.T if name.endswith(".T") else tensor
        columns.append(tensor.reshape(len(tensor), -1).numpy())
    return np.concatenate(columns, axis=1)


def _least(cost: Array) -> float:
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].sum())


def _between_heads(blocks: list[tuple[Array, Array]]) -> Array:
    """Return the least squared distance of every pair of heads, after the best rotations."""
    heads = np.zeros((2, 2))
    for (i, j), (a, c) in itertools.product(itertools.product(range(2), repeat=2), blocks):
        ours, theirs = a[2 * i : 2 * i + 2], c[2 * j : 2 * j + 2]
        nuclear = np.linalg.svd(ours @ theirs.T, compute_uv=False).sum()
        heads[i, j] += (ours**2).sum() + (theirs**2).sum() - 2 * nuclear
    return heads


def _closest(anchor: State, client: State) -> float:
    """Return the least squared distance that all parts but the residual stream can reach.

    Given the stream, heads, neurons and the pooler's units are separate problems.
    """
    total, seen = 0.0, set[str]()
    for layer in range(2):
        at = f"bert.encoder.layer.{layer}."
        own = [f"{at}attention.self.{m}.{leaf}" for m in _QKV for leaf in ("weight", "bias")]
        both = (*own[:4],), (*own[4:], f"{at}attention.output.dense.weight.T")
        total += _least(_between_heads([(_rows(anchor, *b), _rows(client, *b)) for b in both]))
        up = (f"{at}intermediate.dense.weight", f"{at}intermediate.dense.bias")
        neurons = (*up, f"{at}output.dense.weight.T")
        a, c = _rows(anchor, *neurons), _rows(client, *neurons)
        total += _least(((a[:, None] - c) ** 2).sum(-1))
        seen |= {name.removesuffix(".T") for name in (*both[0], *both[1], *neurons)}
    units = ("bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight.T")
    a, c = _rows(anchor, *units), _rows(client, *units)
    signs = [((a[:, None] - sign * c) ** 2).sum(-1) for sign in (1, -1)]
    total += _least(np.minimum(*signs))
    seen |= {name.removesuffix(".T") for name in units}
    return total + squared_distance({n: t for n, t in client.items() if n not in seen}, anchor)


_QKV = ("query", "key", "value")


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_coordinate_descent_ends_in_the_best_for_its_order_of_a_tiny_stream(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 24 orders of the stream, each with the exact best of everything else."""
    config, anchor = _tiny(100)
    _, update = _tiny(seed)
    symmetry = fedrot.symmetry_of(config, anchor)
    every = {
        order: _closest(anchor, _stream_moved(update, list(order)))
        for order in itertools.permutations(range(4))
    }
    best, start = min(every.values()), squared_distance(update, anchor)
    _let_sweep(monkeypatch, 20, 1e-9)
    found = fedrot.align(update, anchor, symmetry, _options())
    reached = squared_distance(found.apply(update), anchor)
    assert best - 1e-9 <= reached < start
    # Wherever descent stops, the parts inside are the exact best for its order of the stream.
    stream = [move.element.tolist() for move in found.moves if move.group.part == "residual"]
    order = tuple(stream[0]) if stream else tuple(range(4))
    assert reached == pytest.approx(every[order], rel=1e-9)


def test_the_oracle_moves_the_stream_as_the_model_does() -> None:
    """Otherwise the brute force above would compare other functions."""
    config, state = _tiny(0)
    model = BertForSequenceClassification(config).double().eval()
    ids = torch.tensor([[1, 2, 3, 4]])

    def outputs(tensors: State) -> Tensor:
        model.load_state_dict(tensors)
        with torch.no_grad():
            return model(ids).logits

    expected = outputs(state)
    assert (outputs(_stream_moved(state, [2, 0, 3, 1])) - expected).abs().max() <= 1e-12
