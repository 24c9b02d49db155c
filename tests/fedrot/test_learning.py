"""Learned rotations: the function stays, the loss falls, other parts keep their elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.learning import LearningOptions, learn_alignment, loss_of
from tests.models import (
    VOCABULARY,
    State,
    fresh_model,
    largest_difference,
    logits,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"


def _batches(count: int = 2) -> list[dict[str, Tensor]]:
    found = []
    for seed in range(count):
        drawn = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, VOCABULARY, (16, 7), generator=drawn)
        labels = torch.randint(3, (16,), generator=drawn)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def _learn(anchor: State, update: State, batches: Any = None, **given: Any) -> Any:
    model = fresh_model(NAME)
    model.load_state_dict(anchor)
    start = fedrot.align(update, anchor, symmetry_for(NAME))
    options = LearningOptions(**given)
    batches = _batches() if batches is None else batches
    loss = loss_of(model.eval())
    return learn_alignment(loss, batches, update, anchor, symmetry_for(NAME), start, options), start


def test_the_function_stays_and_the_loss_falls() -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    found, start = _learn(anchor, update, _batches(1), steps=60)
    moved = found.alignment.apply(update)
    assert (logits(NAME, moved) - logits(NAME, update)).abs().max() <= 1e-5
    assert largest_difference(moved, start.apply(update)) > 1e-3
    assert len(found.losses) == 60
    assert sum(found.losses[-10:]) < sum(found.losses[:10])


def test_what_has_no_gradient_keeps_its_elements() -> None:
    """Here the residual stream is permuted, as the neurons are."""
    anchor, update = state_of(NAME), state_of(NAME, 4)
    found, start = _learn(anchor, update)
    before, after = ({m.group.name: m for m in a.moves} for a in (start, found.alignment))
    assert {m.group.part for n, m in after.items() if n not in before} <= {"attention"}
    for name, move in before.items():
        assert torch.equal(after[name].element, move.element) == (move.group.part != "attention")


def test_without_steps_the_start_is_returned() -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    found, start = _learn(anchor, update, [], steps=0)
    assert found.losses == ()
    assert largest_difference(found.alignment.apply(update), start.apply(update)) <= 1e-12


def test_what_cannot_be_learned_is_refused() -> None:
    for given in ({"parts": ("ffn",)}, {"parts": ("attention", "heads")}, {"steps": -1}):
        with pytest.raises(fedrot.FedrotError):
            LearningOptions(**given)  # type: ignore[arg-type]
    anchor, update = state_of(NAME), state_of(NAME, 4)
    with pytest.raises(fedrot.FedrotError, match="No batches"):
        _learn(anchor, update, [])
    with pytest.raises(fedrot.FedrotError, match="label"):
        _learn(anchor, update, [{k: v for k, v in b.items() if k != "labels"} for b in _batches()])
    broken = {name: torch.full_like(t, torch.nan) for name, t in anchor.items()}
    start = fedrot.align(update, anchor, symmetry_for(NAME))
    model = fresh_model(NAME)
    with pytest.raises(fedrot.FedrotError, match="at step 1"):
        learn_alignment(loss_of(model), _batches(), update, broken, symmetry_for(NAME), start)
