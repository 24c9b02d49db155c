"""Learned rotations: the function stays, the loss falls, other parts keep their
elements.
"""

import pytest
import torch

from fedrot import FedrotError, align
from fedrot.alignment.learning import LearningOptions, learn_alignment, loss_of
from tests.fedrot.oracles import gap, seeded
from tests.models import (
    VOCABULARY,
    fresh_model,
    largest_difference,
    logits,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"


def batches_of(name=NAME, count=2, labels=None):
    """Return labelled batches; a classifier's labels are what this model answers."""
    found = []
    for seed in range(count):
        ids = torch.randint(4, VOCABULARY, (16, 7), generator=seeded(seed))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        shape = ids.shape if name.endswith("mlm") else ids.shape[:1]
        batch["labels"] = torch.randint(3, shape, generator=seeded(9 + seed))
        if labels is not None:
            with torch.no_grad():
                batch["labels"] = labels(**batch).logits.argmax(-1)
        found.append(batch)
    return found


def _learn(batches=None, factor=1.0, **given):
    """Return what is learned of two unrelated models, and the start; a factor spoils
    the anchor.
    """
    anchor, update, symmetry = state_of(NAME), state_of(NAME, 4), symmetry_for(NAME)
    start = align(update, anchor, symmetry)
    spoilt = {name: factor * tensor for name, tensor in anchor.items()}
    batches = batches_of() if batches is None else batches
    options = LearningOptions(**given)
    loss = loss_of(fresh_model(NAME).eval())
    return learn_alignment(
        loss, batches, update, spoilt, symmetry, start, options
    ), start


def test_the_function_stays_and_the_loss_falls():
    update = state_of(NAME, 4)
    found, start = _learn(batches_of(count=1), steps=40)
    moved = found.alignment.apply(update)
    assert gap(logits(NAME, moved), logits(NAME, update)) <= 1e-5
    assert largest_difference(moved, start.apply(update)) > 1e-3
    assert len(found.losses) == 40
    assert sum(found.losses[-10:]) < sum(found.losses[:10])


def test_what_has_no_gradient_keeps_its_elements():
    """Here the residual stream is permuted, as the neurons are."""
    found, start = _learn()
    before, after = (
        {m.group.name: m for m in a.moves} for a in (start, found.alignment)
    )
    assert {m.group.part for n, m in after.items() if n not in before} <= {"attention"}
    for name, move in before.items():
        assert torch.equal(after[name].element, move.element) == (
            move.group.part != "attention"
        )


def test_without_steps_the_start_is_returned():
    update = state_of(NAME, 4)
    found, start = _learn([], steps=0)
    assert found.losses == ()
    assert (
        largest_difference(found.alignment.apply(update), start.apply(update)) <= 1e-12
    )


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"parts": ("ffn",)}, "'ffn' cannot be learned"),
        ({"parts": ("attention", "heads")}, "'heads' cannot be learned"),
        ({"steps": -1}, "steps is -1"),
        ({"batches": []}, "No batches"),
        ({"batches": [{"input_ids": torch.tensor([[5, 6]])}]}, "label"),
        ({"factor": float("nan")}, "at step 1"),
    ],
)
def test_what_cannot_be_learned_is_refused(given, word):
    with pytest.raises(FedrotError, match=word):
        _learn(**given)
