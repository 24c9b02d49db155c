"""Encoders of the laboratory of heads beside whole models of transformers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel

from reproductions.heads.arms import ARMS
from reproductions.heads.cell import Cell
from reproductions.heads.federation import Federation
from reproductions.heads.rounds import play
from tests.reproductions.bert import BERT, SIZES

torch.manual_seed(1)
CONFIG = LlamaConfig(**SIZES, num_hidden_layers=4, initializer_range=0.3)
ENCODERS = {"bert": BERT, "llama": LlamaModel(CONFIG).eval()}
LAYERS = {"last": [4], "all": [1, 2, 3, 4], "3,1": [1, 3]}
ROWS = np.arange(20, 50)


def federation_of(name, pooling="mean", layers=2, read="last"):
    """Return a federation of three clients whose padding is a token like others."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 60)
    ids = np.where(np.arange(8) < lengths[:, None], rng.integers(0, 40, (60, 8)), 5)
    cell = Cell(ids, lengths, ids[:, 0] % 3, np.arange(40) % 3, 5)
    encoder = copy.deepcopy(ENCODERS[name])
    return Federation(cell, encoder, layers, pooling, read=read)


def whole(encoder, federation, row, pooling, read):
    """Return the features of a row without its padding, by the model as a whole."""
    ids = torch.from_numpy(federation.cell.ids[row, : federation.cell.lengths[row]])
    states = encoder(ids[None], output_hidden_states=True).hidden_states
    of_layers = [states[number][0] for number in LAYERS[read]]
    pooled = [x[-1] if pooling == "last" else x.mean(0) for x in of_layers]
    return torch.cat(pooled)


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("read", LAYERS)
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_a_head_reads_the_hidden_states_of_a_whole_model(name, pooling, read, layers):
    federation = federation_of(name, pooling, layers, read)
    found = federation.features(federation.start, ROWS)
    encoder = ENCODERS[name]
    wanted = [whole(encoder, federation, row, pooling, read) for row in ROWS]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_gradient_is_that_of_a_whole_model(name):
    federation = federation_of(name, read="all")
    head = federation.start[-federation.size :]
    weight, bias = head.tensor_split([-3])
    encoder = copy.deepcopy(ENCODERS[name])
    features = [whole(encoder, federation, row, "mean", "all") for row in ROWS]
    logits = torch.stack(features) @ weight.view(3, -1).T + bias
    functional.cross_entropy(logits, federation.labels[ROWS]).backward()
    stack = encoder.encoder.layer if name == "bert" else encoder.layers
    trained = [*stack[2:].parameters()]
    if name == "llama":
        trained.append(encoder.norm.weight)
    flat = federation.start.requires_grad_()
    (found,) = torch.autograd.grad(federation.loss(flat, ROWS), flat)
    wanted = torch.cat([part.grad.flatten() for part in trained])
    body = found[: -federation.size]
    torch.testing.assert_close(body, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("pooling", "layers", "read", "says"),
    [
        ("pooler", 2, "all", "last"),
        ("mean", 2, "4,5", "1 to 4"),
        ("mean", 0, "last", "1 to 4"),
        ("mean", 5, "last", "1 to 4"),
    ],
)
def test_layers_that_do_not_exist_are_refused(pooling, layers, read, says):
    with pytest.raises(ValueError, match=says):
        federation_of("bert", pooling, layers, read)


def test_arms_that_differ_in_a_last_head_share_their_rounds(monkeypatch):
    alone = list(play(federation_of("llama"), ARMS["ccvr"], 2))
    federation = federation_of("llama")
    list(play(federation, ARMS["fedavg"], 2))
    monkeypatch.setattr("reproductions.heads.rounds.average", None)
    assert list(play(federation, ARMS["ccvr"], 2)) == alone
    with pytest.raises(TypeError):
        list(play(federation, ARMS["fedlc"], 2))
