"""Optimal-transport fusion: its hard limit is the permutation, and soft plans are
plans.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import fedrot
from fedrot.aggregation import Mean
from reproductions.optimal_transport import OptimalTransport
from tests.models import (
    CASES,
    NEURONS,
    largest_difference,
    logits,
    near,
    state_of,
    symmetry_for,
)
from tests.simulations.tensors import equal

NAME = "bert-classifier"


def _near(name, seed):
    torch.manual_seed(seed)
    return near(state_of(name), 0.05)


def _turned(state, seed, name=NAME):
    parts = ("heads", "ffn")
    return fedrot.random_equivalent(state, symmetry_for(name), seed, parts)


@pytest.mark.parametrize("name", [NAME, "distilbert-mlm"])
def test_the_hard_limit_finds_the_permutation(name):
    update = _near(name, 1)
    moved = _turned(update, 3, name)
    transport = OptimalTransport(symmetry_for(name), 0.0, anchor=state_of(name))
    back = transport.transported(moved)
    assert largest_difference(back, update) <= 1e-12
    assert (logits(name, back) - logits(name, moved)).abs().max() <= 1e-9


def _oracle(name, anchor, update, regularisation):
    """Mix the neurons of every layer by hand, with plain Sinkhorn iterations in
    numpy.
    """
    found = dict(update)
    for layer in range(2):
        up, down = (CASES[name].names.of(layer, module) for module in ("up", "down"))

        rows, bias, columns = f"{up}.weight", f"{up}.bias", f"{down}.weight"
        ours, theirs = (
            torch.cat((state[rows], state[bias][:, None], state[columns].T), 1).numpy()
            for state in (anchor, update)
        )
        cost = ((ours[:, None] - theirs[None]) ** 2).sum(-1)
        kernel = np.exp(-cost / cost.max() / regularisation)
        right = np.ones(NEURONS)
        for _ in range(4000):
            left = 1 / (kernel @ right)
            right = 1 / (kernel.T @ left)
        plan = torch.from_numpy(left[:, None] * kernel * right)
        found[rows] = plan @ update[rows]
        found[bias] = plan @ update[bias]
        found[columns] = update[columns] @ plan.T
    return found


@pytest.mark.parametrize("regularisation", [0.3, 1.0])
def test_soft_plans_are_those_of_sinkhorn(regularisation):
    anchor = state_of(NAME)
    update = state_of(NAME, 1)
    expected = _oracle(NAME, anchor, update, regularisation)
    symmetry = symmetry_for(NAME)
    found = OptimalTransport(symmetry, regularisation, ("ffn",), anchor).transported(
        update
    )
    assert largest_difference(found, expected) <= 1e-6
    assert (logits(NAME, found) - logits(NAME, update)).abs().max() > 1e-3


def test_the_first_update_is_the_anchor_and_the_result_their_mean():
    fused = OptimalTransport(symmetry_for(NAME), 0.0)
    mean = Mean()
    first = _near(NAME, 1)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    fused.add(first, 1.0)
    mean.add(kept, 1.0)
    for weight in (2.0, 3.0):
        update = _near(NAME, int(weight))
        fused.add(_turned(update, int(weight)), weight)
        mean.add(update, weight)
    assert largest_difference(fused.result(), mean.result()) <= 1e-12
    assert equal(first, kept)


def test_bad_input_is_refused(monkeypatch):
    symmetry = symmetry_for(NAME)
    with pytest.raises(fedrot.FedrotError, match="'attention' cannot be mixed"):
        OptimalTransport(symmetry, parts=("attention",))
    for wrong in (-1.0, float("inf")):
        with pytest.raises(fedrot.FedrotError, match="regularisation"):
            OptimalTransport(symmetry, wrong)
    fused = OptimalTransport(symmetry)
    with pytest.raises(fedrot.UpdateError, match="weight"):
        fused.add(state_of(NAME), -1.0)
    with pytest.raises(fedrot.UpdateError, match="Nothing was added"):
        fused.result()
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(fedrot.FedrotError, match="POT"):
        OptimalTransport(symmetry)
