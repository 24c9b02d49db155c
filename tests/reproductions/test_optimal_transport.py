"""Optimal-transport fusion: its hard limit is the permutation, and soft plans are
plans.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

import fedrot
from fedrot.aggregation import Mean
from reproductions.optimal_transport import OptimalTransport
from tests.models import (
    CASES,
    NEURONS,
    State,
    logits,
    near,
    state_of,
    symmetry_for,
)

NAMES = ("bert-classifier", "distilbert-mlm")


def _near(name: str, seed: int) -> State:
    torch.manual_seed(seed)
    return near(state_of(name), 0.05)


@pytest.mark.parametrize("name", NAMES)
def test_the_hard_limit_finds_the_permutation(name: str) -> None:
    anchor = state_of(name)
    symmetry = symmetry_for(name)
    update = _near(name, 1)
    moved = fedrot.random_equivalent(update, symmetry, seed=3, parts=("heads", "ffn"))
    back = OptimalTransport(symmetry, 0.0, anchor=anchor).transported(moved)
    for tensor in update:
        assert (back[tensor] - update[tensor]).abs().max() <= 1e-12, tensor
    assert (logits(name, back) - logits(name, moved)).abs().max() <= 1e-9


def _oracle(name: str, anchor: State, update: State, regularisation: float) -> State:
    """Mix the neurons of every layer by hand, with plain Sinkhorn iterations in
    numpy.
    """
    found = dict(update)
    for layer in range(2):
        up, down = (CASES[name].names.of(layer, module) for module in ("up", "down"))

        def units(state: State, up: str = up, down: str = down) -> Any:
            parts = (
                state[f"{up}.weight"],
                state[f"{up}.bias"][:, None],
                state[f"{down}.weight"].T,
            )
            return torch.cat(parts, 1).numpy()

        ours = units(anchor)
        theirs = units(update)
        cost = ((ours[:, None] - theirs[None]) ** 2).sum(-1)
        kernel = np.exp(-cost / cost.max() / regularisation)
        columns = np.ones(NEURONS)
        for _ in range(4000):
            rows = 1 / (kernel @ columns)
            columns = 1 / (kernel.T @ rows)
        plan = torch.from_numpy(rows[:, None] * kernel * columns)
        found[f"{up}.weight"] = plan @ update[f"{up}.weight"]
        found[f"{up}.bias"] = plan @ update[f"{up}.bias"]
        found[f"{down}.weight"] = update[f"{down}.weight"] @ plan.T
    return found


@pytest.mark.parametrize("regularisation", [0.3, 1.0])
def test_soft_plans_are_those_of_sinkhorn(regularisation: float) -> None:
    name = "bert-classifier"
    anchor = state_of(name)
    update = state_of(name, 1)
    expected = _oracle(name, anchor, update, regularisation)
    symmetry = symmetry_for(name)
    found = OptimalTransport(symmetry, regularisation, ("ffn",), anchor).transported(
        update
    )
    for tensor in expected:
        assert (found[tensor] - expected[tensor]).abs().max() <= 1e-6, tensor
    assert (logits(name, found) - logits(name, update)).abs().max() > 1e-3


def test_the_first_update_is_the_anchor_and_the_result_their_mean() -> None:
    name = "bert-classifier"
    symmetry = symmetry_for(name)
    updates = [_near(name, seed) for seed in (1, 2, 3)]
    kept = [{k: v.clone() for k, v in update.items()} for update in updates]
    moved = [updates[0]] + [
        fedrot.random_equivalent(u, symmetry, seed=i, parts=("heads", "ffn"))
        for i, u in enumerate(updates[1:])
    ]
    fused = OptimalTransport(symmetry, 0.0)
    mean = Mean()
    for update, scrambled, weight in zip(updates, moved, (1.0, 2.0, 3.0), strict=True):
        fused.add(scrambled, weight)
        mean.add(update, weight)
    expected = mean.result()
    assert all(
        (t - expected[name]).abs().max() <= 1e-12 for name, t in fused.result().items()
    )
    assert all(
        torch.equal(a[k], b[k]) for a, b in zip(kept, updates, strict=True) for k in a
    )


def test_bad_input_is_refused(monkeypatch: Any) -> None:
    symmetry = symmetry_for("bert-classifier")
    with pytest.raises(fedrot.FedrotError, match="'attention' cannot be mixed"):
        OptimalTransport(symmetry, parts=("attention",))
    for wrong in (-1.0, float("inf")):
        with pytest.raises(fedrot.FedrotError, match="regularisation"):
            OptimalTransport(symmetry, wrong)
    fused = OptimalTransport(symmetry)
    with pytest.raises(fedrot.UpdateError, match="weight"):
        fused.add(state_of("bert-classifier"), -1.0)
    with pytest.raises(fedrot.UpdateError, match="Nothing was added"):
        fused.result()
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(fedrot.FedrotError, match="POT"):
        OptimalTransport(symmetry)
