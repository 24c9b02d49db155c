"""Learned matching: the loss of the average falls, the function stays, gradients are
the true ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedrot
from fedrot.alignment import learning
from fedrot.alignment.learning import Learnable, learn_alignment, loss_of
from fedrot.symmetry.actions import HeadRotation, Permutation
from fedrot.symmetry.groups import Group, Move, Slice, Slot
from reproductions.learning import HeadLinear, LearningOptions, SoftPermutation
from tests.fedrot.alignment.test_learning import batches_of
from tests.fedrot.oracles import along, dense, seeded
from tests.models import (
    DIM,
    FEW,
    HEADS,
    fresh_model,
    largest_difference,
    logits,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"
ALL = ("attention", "ffn", "residual")


def _model(tensors, name=NAME):
    model = fresh_model(name)
    model.load_state_dict(tensors)
    return model.eval()


def _learn(anchor, update, name=NAME, batches=None, **settings):
    start = settings.pop("start", None)
    options = LearningOptions(**{"steps": 5, **settings})
    loss = loss_of(_model(anchor, name))
    given = batches_of(name) if batches is None else batches
    return learn_alignment(
        loss, given, update, anchor, symmetry_for(name), start, options
    )


def _in_gl(state, seed, spread=1.0):
    """Return the same function after a random element of GL(d_h) in every head."""
    out = dict(state)
    for group in symmetry_for(NAME).select(("attention",)):
        action = HeadLinear(group.action.heads, group.action.dim)  # type: ignore[attr-defined]
        skew = (
            spread
            * torch.randn(HEADS, DIM, DIM, generator=seeded(seed)).double()
            / DIM**0.5
        )
        move = Move(replace(group, action=action), torch.matrix_exp(skew))
        for slot in group.slots:
            out[slot.tensor] = move.on(out[slot.tensor], slot)
    return out


@pytest.mark.parametrize("general", [True, False])
@pytest.mark.parametrize("name", FEW)
def test_the_function_is_preserved_and_permutations_stay_permutations(name, general):
    anchor = state_of(name)
    update = state_of(name, 4)
    found = _learn(
        anchor, update, name, parts=ALL, general=general, lr=0.05, permutation_lr=1.0
    )
    moved = found.alignment.apply(update)
    assert (logits(name, moved) - logits(name, update)).abs().max() <= 1e-5
    assert len(found.losses) == 5
    assert found.seconds > 0
    assert largest_difference(found.alignment.inverse().apply(moved), update) <= 1e-8
    moves = {move.group.name: move for move in found.alignment.moves}
    for group in symmetry_for(name).select(("ffn", "residual")):
        assert group.action.contains(moves[group.name].element)
    (stream,) = (m for m in found.alignment.moves if m.group.part == "residual")
    assert stream.group.action.moved(stream.element).any()
    for group in symmetry_for(name).select(("attention",)):
        move = moves[group.name]
        assert move.group.action.contains(move.element)
        assert isinstance(move.group.action, HeadLinear) == general
        off = (move.element @ move.element.mT - torch.eye(DIM)).abs().max()
        assert (off > 1e-2) if general else (off <= 1e-10)


def test_the_loss_of_the_average_falls_where_rotations_cannot_help():
    """The client is the anchor in coordinates of GL(d_h): Procrustes leaves what
    learning removes.
    """
    anchor = state_of(NAME)
    update = _in_gl(anchor, 1)
    assert (logits(NAME, update) - logits(NAME, anchor)).abs().max() <= 1e-8
    batches = batches_of(count=1, labels=_model(anchor))
    losses = []
    for general in (True, False):
        options = {"batches": batches, "steps": 50, "lr": 3e-2, "general": general}
        found = _learn(anchor, update, **options)
        losses.append(found.losses)
        moved = found.alignment.apply(update)
        average = {name: (anchor[name] + moved[name]) / 2 for name in moved}
        with torch.no_grad():
            last = float(_model(average)(**batches[0]).loss)
        assert last <= found.losses[0]
    linear, turned = losses
    assert linear[0] == pytest.approx(turned[0])
    assert min(linear[-5:]) < min(0.7 * linear[0], *turned[-5:])


def test_without_steps_or_parts_the_start_is_returned_and_no_batch_is_read():
    anchor = state_of(NAME)
    update = state_of(NAME, 4)
    options = fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)
    start = fedrot.align(update, anchor, symmetry_for(NAME), options)
    plain = fedrot.align(update, anchor, symmetry_for(NAME))
    for settings, expected in (
        ({"start": start, "steps": 0, "parts": ALL}, start),
        ({"steps": 0, "parts": ALL}, plain),
        ({"parts": ()}, plain),
    ):
        found = _learn(anchor, update, batches=[], **settings)
        assert found.losses == ()
        moved = found.alignment.apply(update)
        assert largest_difference(moved, expected.apply(update)) <= 1e-12
        if expected is start:
            after = start.report.after
            assert found.alignment.report.after == pytest.approx(after, rel=1e-6)
    with pytest.raises(fedrot.FedrotError, match="No batches"):
        _learn(anchor, update, batches=[])


def test_rotations_are_learned_as_fedrot_learns_them():
    symmetry = symmetry_for(NAME)
    anchor = state_of(NAME)
    update = state_of(NAME, 4)
    start = fedrot.align(update, anchor, symmetry)
    given = (loss_of(_model(anchor)), batches_of(), update, anchor, symmetry, start)
    ours = learning.learn_alignment(
        *given, learning.LearningOptions(("attention",), steps=4)
    )
    options = LearningOptions(
        ("attention",), steps=4, lr=learning.LR, points=learning.POINTS
    )
    theirs = learn_alignment(*given, options)
    assert ours.losses == theirs.losses
    elements, expected = (
        [move.element for move in learned.alignment.moves] for learned in (ours, theirs)
    )
    assert all(map(torch.equal, elements, expected))


@pytest.mark.parametrize("contravariant", [True, False])
@pytest.mark.parametrize(("axis", "start"), [(0, 0), (1, 3)])
@pytest.mark.parametrize(
    "action", [HeadRotation(2, 3), HeadLinear(2, 3), Permutation(6)], ids=str
)
def test_a_slot_moves_as_by_the_groups_own_action_with_true_gradients(
    action, axis, start, contravariant
):
    slot = Slot(
        "w",
        axis,
        Slice(start, start + 6),
        contravariant and isinstance(action, HeadLinear),
    )
    group = Group("g", 0, "attention", action, (slot,))
    shape = (10, 4) if axis == 0 else (4, 10)
    tensor = torch.randn(shape, generator=seeded(1), dtype=torch.float64)
    element = action.random(seeded(2))
    on = dense(action, element, 6)
    soft = isinstance(action, Permutation)
    matrix = on if soft else element
    learned = (SoftPermutation if soft else Learnable)(group, torch.empty(0))
    moved = learned.multiplied(tensor, slot, matrix)
    assert (moved - Move(group, element).on(tensor, slot)).abs().max() <= 1e-12
    expected = tensor.clone()
    on = torch.linalg.inv(on).mT if slot.contravariant else on
    slot.of(expected).copy_(along(on, slot.of(tensor), axis))
    assert (moved - expected).abs().max() <= 1e-12
    variables = (tensor.requires_grad_(), matrix.double().requires_grad_())
    assert torch.autograd.gradcheck(
        lambda t, m: learned.multiplied(t, slot, m), variables
    )


def test_a_permutation_acts_hard_and_learns_softly():
    group = Group("g", 0, "ffn", Permutation(6), ())
    options = LearningOptions()
    learned = options.learnable(group)
    assert isinstance(learned, SoftPermutation)
    parameter = learned.parameter
    assert (learned.element(parameter) - torch.eye(6)).abs().max() <= 1e-6
    scores = torch.randn(
        6, 6, generator=seeded(1), dtype=torch.float64
    ).requires_grad_()
    hard = learned.element(scores)
    rounded = hard.detach().round()
    assert (hard.detach() - rounded).abs().max() <= 1e-6
    assert rounded.sum(0).tolist() == rounded.sum(1).tolist() == [1.0] * 6
    towards = torch.randn(6, 6, generator=seeded(2), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((hard * towards).sum(), scores)

    def soft(p):
        """The oracle: rows and columns are divided by their sums in turn."""
        out = (p / options.temperature).exp()
        for _ in range(10):
            out = out / out.sum(1, keepdim=True)
            out = out / out.sum(0, keepdim=True)
        return (out * towards).sum()

    (expected,) = torch.autograd.grad(soft(scores), scores)
    assert torch.allclose(gradient, expected, atol=1e-10)
    assert gradient.abs().max() > 1e-3
