"""Models matched as a whole: residual stream, task head, heads, rotations and neurons
together.
"""

import itertools

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from fedrot import WHOLE_MODEL, AlignmentOptions, align, symmetry_of
from fedrot.matching import descent
from tests.fedrot.oracles import seeded
from tests.fedrot.pairs import checked_report
from tests.models import (
    WIDTH,
    align_tensors,
    largest_difference,
    near,
    randomise,
    squared_distance,
    state_of,
    symmetry_for,
)


def _options(**settings):
    return AlignmentOptions(**({"parts": WHOLE_MODEL} | settings))


def _let_sweep(monkeypatch, sweeps, tolerance=0.0):
    monkeypatch.setattr(descent, "SWEEPS", sweeps)
    monkeypatch.setattr(descent, "TOLERANCE", tolerance)


@pytest.mark.parametrize("name", ["bert-classifier", "electra-mlm", "distilbert-mlm"])
def test_every_sweep_brings_unrelated_models_closer(name, monkeypatch):
    anchor = state_of(name)
    update = state_of(name, 5)
    distances = []
    for sweeps in (1, 2, 3, 8):
        _let_sweep(monkeypatch, sweeps)
        distances.append(checked_report(name, update, anchor, _options()))
    found = [distances[0][0], *(after for _, after in distances)]
    for earlier, later in itertools.pairwise(found):
        assert later <= earlier * (1 + 1e-12)
    assert found[0] > found[1] >= found[-1]


def test_sweeps_stop_where_nothing_is_gained(monkeypatch):
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), state_of(name, 5), symmetry_for(name)

    def found(sweeps, tolerance=0.0):
        _let_sweep(monkeypatch, sweeps, tolerance)
        return align(update, anchor, symmetry, _options())

    long = found(40).apply(update)
    longer = found(60).apply(update)
    assert largest_difference(long, longer) <= 1e-8
    assert found(20, 0.5).report.after == pytest.approx(found(1).report.after)


def _disagreeing(state, key, other):
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
    ("name", "key"),
    [("bert-mlm", "transform"), ("bert-mlm", "dense"), ("distilbert-mlm", "vocab")],
)
def test_distance_never_grows_where_a_matrix_has_both_axes_in_the_stream(
    name, key, monkeypatch
):
    """A language model's transform depends on the order twice: what helps each axis may
    harm both.
    """
    symmetry = symmetry_for(name)
    anchor = state_of(name)
    twice = {
        "bert-mlm": "cls.predictions.transform.dense",
        "distilbert-mlm": "vocab_transform",
    }[name]
    anchor[f"{twice}.weight"] *= 5
    for seed, parts in ((0, ("residual",)), (1, ("residual",)), (2, WHOLE_MODEL)):
        update = _disagreeing(anchor, key, seed)
        distances = [squared_distance(update, anchor)]
        for sweeps in (1, 2, 3):
            _let_sweep(monkeypatch, sweeps)
            aligned = align_tensors(update, anchor, symmetry, _options(parts=parts))
            distances.append(squared_distance(aligned, anchor))
        assert max(distances) <= distances[0] * (1 + 1e-12), (seed, parts)
        assert distances[1:] == pytest.approx(
            sorted(distances[1:], reverse=True), rel=1e-12
        )


# Against brute force, on a model that is small enough for it


def _tiny(seed):
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


def _stream_moved(state, order):
    """Return the model with its residual stream in another order, written out name by
    name.
    """
    out = dict(state)
    for name, tensor in state.items():
        reads = any(
            m in name
            for m in ("query", "key", "value", "intermediate", "pooler", "embeddings")
        )
        if name.startswith("classifier"):
            continue
        if "LayerNorm" in name or (".output.dense" in name):
            out[name] = tensor[order]
        elif reads and tensor.ndim == 2:
            out[name] = tensor[:, order]
    return out


@pytest.mark.parametrize("seed", [0, 1])
def test_coordinate_descent_ends_in_the_best_for_its_order_of_a_tiny_stream(
    seed, monkeypatch
):
    """All 24 orders of the stream, each with the exact best of everything else."""
    config, anchor = _tiny(100)
    _, update = _tiny(seed)
    symmetry = symmetry_of(config, anchor)
    inside = _options(parts=[part for part in WHOLE_MODEL if part != "residual"])

    def closest(order):
        """Return the least distance that all parts but the stream reach: each has one
        best element.
        """
        moved = _stream_moved(update, list(order))
        return squared_distance(align_tensors(moved, anchor, symmetry, inside), anchor)

    every = {order: closest(order) for order in itertools.permutations(range(4))}
    best = min(every.values())
    start = squared_distance(update, anchor)
    _let_sweep(monkeypatch, 20, 1e-9)
    found = align(update, anchor, symmetry, _options())
    reached = squared_distance(found.apply(update), anchor)
    assert best - 1e-9 <= reached < start
    # Wherever descent stops, the parts inside are the exact best for its order of the
    # stream.
    stream = [
        move.element.tolist() for move in found.moves if move.group.part == "residual"
    ]
    order = tuple(stream[0]) if stream else tuple(range(4))
    assert reached == pytest.approx(every[order], rel=1e-9)
