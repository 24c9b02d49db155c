"""Learned matching: the loss of the average falls, the function stays, gradients are the true ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot import learning
from fedrot.learning import Learned, loss_of, turned
from fedrot.symmetry.actions import HeadRotation, Permutation
from fedrot.symmetry.groups import Group, Slice, Slot
from fedrot.symmetry.moves import Move
from reproductions.learning import (
    HeadLinear,
    LearningOptions,
    _matrix,
    _multiplied,
    initial,
    learn_alignment,
)
from tests import families
from tests.fedrot.oracles import along, dense, seeded
from tests.models import (
    DIM,
    EAGER,
    FEW,
    HEADS,
    VOCABULARY,
    State,
    config_of,
    fresh_model,
    largest_difference,
    logits,
    near,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"
ALL = ("attention", "ffn", "residual")
Batch = dict[str, Tensor]


def _model(tensors: State, name: str = NAME) -> Any:
    model = fresh_model(name)
    model.load_state_dict(tensors)
    return model.eval()


def _batches(name: str = NAME, count: int = 2, labels: Any = None) -> list[Batch]:
    """Return labelled batches; a classifier's labels are what this model answers."""
    found = []
    for seed in range(count):
        ids = torch.randint(4, VOCABULARY, (16, 7), generator=seeded(seed))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if labels is not None:
            with torch.no_grad():
                batch["labels"] = labels(**batch).logits.argmax(-1)
        else:
            shape = ids.shape if name.endswith("mlm") else ids.shape[:1]
            batch["labels"] = torch.randint(3, shape, generator=seeded(9 + seed))
        found.append(batch)
    return found


def _learn(
    anchor: State, update: State, name: str = NAME, batches: Any = None, **settings: Any
) -> Learned:
    start = settings.pop("start", None)
    options = LearningOptions(**{"steps": 5, **settings})
    loss = loss_of(_model(anchor, name))
    given = _batches(name) if batches is None else batches
    return learn_alignment(loss, given, update, anchor, symmetry_for(name), start, options)


def _in_gl(state: State, seed: int, spread: float = 1.0) -> State:
    """Return the same function after a random element of GL(d_h) in every head."""
    out = dict(state)
    for group in symmetry_for(NAME).select(("attention",)):
        kind = HeadLinear(group.kind.heads, group.kind.dim)  # type: ignore[attr-defined]
        skew = spread * torch.randn(HEADS, DIM, DIM, generator=seeded(seed)).double() / DIM**0.5
        move = Move(replace(group, kind=kind), torch.matrix_exp(skew))
        for slot in group.slots:
            out[slot.tensor] = move.on(out[slot.tensor], slot)
    return out


# What is found


@pytest.mark.parametrize("general", [True, False])
@pytest.mark.parametrize("parts", [("attention",), ("ffn", "residual"), ALL], ids="-".join)
@pytest.mark.parametrize("name", FEW)
def test_the_function_is_preserved(name: str, parts: tuple[str, ...], general: bool) -> None:
    anchor, update = state_of(name), state_of(name, 4)
    found = _learn(anchor, update, name, parts=parts, general=general, lr=0.05, permutation_lr=0.5)
    moved = found.alignment.apply(update)
    assert (logits(name, moved) - logits(name, update)).abs().max() <= 1e-5
    start = fedrot.align(update, anchor, symmetry_for(name)).apply(update)
    assert largest_difference(moved, start) > 1e-3
    assert len(found.losses) == 5
    assert found.seconds > 0
    assert largest_difference(found.alignment.inverse().apply(moved), update) <= 1e-8


@pytest.mark.parametrize("name", FEW)
def test_the_function_is_preserved_in_float32(name: str) -> None:
    anchor, update = (state_of(name, seed, torch.float32) for seed in (0, 4))
    symmetry = symmetry_for(name)
    start = fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL))
    model = _model(state_of(name), name).float()
    found = learn_alignment(
        loss_of(model), _batches(name), update, anchor, symmetry, start, LearningOptions(steps=3)
    )
    moved = found.alignment.apply(update)
    assert {tensor.dtype for tensor in moved.values()} == {torch.float32}
    assert (logits(name, moved) - logits(name, update)).abs().max() <= 1e-3
    assert {move.group.part for move in found.alignment.moves} >= {"residual", "attention", "ffn"}


def test_the_loss_of_the_average_falls_where_rotations_cannot_help() -> None:
    """The client is the anchor in coordinates of GL(d_h): Procrustes leaves what learning removes."""
    anchor = state_of(NAME)
    update = _in_gl(anchor, 1)
    assert (logits(NAME, update) - logits(NAME, anchor)).abs().max() <= 1e-8
    batches = _batches(count=1, labels=_model(anchor))
    losses = {}
    for general in (True, False):
        found = _learn(anchor, update, batches=batches, steps=80, lr=3e-2, general=general)
        losses[general] = found.losses
        average = {k: (anchor[k] + v) / 2 for k, v in found.alignment.apply(update).items()}
        with torch.no_grad():
            last = float(_model(average)(**batches[0]).loss)
        assert last <= found.losses[0]
    assert losses[True][0] == pytest.approx(losses[False][0])
    assert min(losses[True][-5:]) < 0.7 * losses[True][0]
    assert min(losses[True][-5:]) < min(losses[False][-5:])


def test_permutations_are_learned_back() -> None:
    """From a wrong order of a few neurons, the loss of the average leads to the right one."""
    anchor = state_of(NAME)
    symmetry = symmetry_for(NAME)
    update = near(anchor, 0.01)
    (first, *_) = symmetry.select(("ffn",))
    order = torch.arange(first.kind.units)
    order[:6] = order[:6].roll(1)
    move = Move(first, order)
    swapped = dict(update)
    for slot in first.slots:
        swapped[slot.tensor] = move.on(swapped[slot.tensor], slot)
    start = fedrot.alignment.alignment_of((), swapped, anchor, symmetry)
    batches = _batches(count=2, labels=_model(anchor))
    found = _learn(
        anchor, swapped, batches=batches, start=start, parts=("ffn",), steps=60, permutation_lr=0.1
    )
    assert min(found.losses[-5:]) < found.losses[0]


@pytest.mark.parametrize("steps", [1, 7])
def test_permutations_stay_permutations(steps: int) -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    found = _learn(anchor, update, parts=("ffn", "residual"), steps=steps, permutation_lr=1.0)
    moves = {move.group.name: move for move in found.alignment.moves}
    for group in symmetry_for(NAME).select(("ffn", "residual")):
        move = moves[group.name]
        assert isinstance(move.group.kind, Permutation)
        assert move.group.kind.contains(move.element)
    stream = [m for m in found.alignment.moves if m.group.part == "residual"]
    assert stream[0].group.kind.moved(stream[0].element).any()


@pytest.mark.parametrize("general", [True, False])
def test_heads_move_by_rotations_unless_in_general(general: bool) -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    begun = fedrot.align(update, anchor, symmetry_for(NAME), EAGER)
    found = _learn(anchor, update, general=general, lr=0.1, start=begun)
    eye = torch.eye(DIM, dtype=torch.float64)
    moves = [m for m in found.alignment.moves if m.group.part == "attention"]
    assert len(moves) == len(symmetry_for(NAME).select(("attention",)))
    for move in moves:
        off = (move.element @ move.element.mT - eye).abs().max()
        assert move.group.kind.contains(move.element)
        assert (off > 1e-2) if general else (off <= 1e-10)
        assert isinstance(move.group.kind, HeadLinear) is general
        start = next(m.element for m in begun.moves if m.group.name == move.group.name)
        assert (move.element - start).abs().max() > 1e-3


def test_the_neurons_of_experts_stay_in_the_order_that_was_found() -> None:
    anchor, update = (families.state_of("mixtral", seed) for seed in (0, 1))
    symmetry, options = families.symmetry_for("mixtral"), LearningOptions(parts=ALL, steps=2)
    model = families.model_of("mixtral", anchor)
    batch = families.inputs("mixtral")
    batch["labels"] = batch["input_ids"]
    start = fedrot.align(update, anchor, symmetry, EAGER)
    found = learn_alignment(loss_of(model), [batch], update, anchor, symmetry, start, options)
    before, after = ({m.group.name: m for m in a.moves} for a in (start, found.alignment))
    for layer in range(2):
        neurons, order = f"layers.{layer}.ffn", after[f"layers.{layer}.experts"]
        first = before.get(order.group.name)
        undone = torch.arange(3) if first is None else order.group.kind.inverse(first.element)
        moved = order.group.kind.compose(order.element, undone)
        carried = order.group.kind.act(moved, before[neurons].element, 0)
        assert torch.equal(after[neurons].element, carried)
    expected = families.outputs("mixtral", update)
    aligned = families.outputs("mixtral", found.alignment.apply(update))
    assert (aligned - expected).abs().max() <= 1e-9 * expected.abs().max()


def test_other_parts_stay_as_they_were_found() -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    options = fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)
    start = fedrot.align(update, anchor, symmetry_for(NAME), options)
    found = _learn(anchor, update, start=start, parts=("attention",))
    before, after = ({m.group.name: m for m in a.moves} for a in (start, found.alignment))
    assert after.keys() == before.keys()
    others = {name: move for name, move in after.items() if move.group.part != "attention"}
    assert {move.group.part for move in others.values()} == {"residual", "output", "heads", "ffn"}
    for name, move in others.items():
        assert torch.equal(move.element, before[name].element)


def test_without_steps_the_start_is_returned() -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    start = fedrot.align(
        update, anchor, symmetry_for(NAME), fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)
    )

    def unread() -> Iterator[Batch]:
        raise AssertionError("no batch is needed")
        yield {}

    for given, expected in (
        (start, start),
        (None, fedrot.align(update, anchor, symmetry_for(NAME))),
    ):
        found = _learn(anchor, update, batches=unread(), steps=0, start=given, parts=ALL)
        assert found.losses == ()
        assert largest_difference(found.alignment.apply(update), expected.apply(update)) <= 1e-12
    found = _learn(anchor, update, batches=unread(), steps=0, start=start, parts=ALL)
    assert found.alignment.report.after == pytest.approx(start.report.after, rel=1e-6)


def test_the_first_loss_is_that_of_the_start() -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    batches = _batches(count=1)
    start = fedrot.align(update, anchor, symmetry_for(NAME))
    average = {k: (anchor[k] + v) / 2 for k, v in start.apply(update).items()}
    with torch.no_grad():
        expected = float(_model(average)(**batches[0]).loss)
    for parts in (("attention",), ALL):
        found = _learn(anchor, update, batches=batches, steps=1, parts=parts)
        assert found.losses[0] == pytest.approx(expected, rel=1e-6)


def test_batches_are_gone_through_again_and_only_once_if_a_generator() -> None:
    anchor, update = state_of(NAME), near(state_of(NAME), 0.1)
    first, second = _batches(count=2)
    listed = _learn(anchor, update, batches=[first, second], steps=5)
    streamed = _learn(anchor, update, batches=(b for b in (first, second)), steps=5)
    assert len(listed.losses) == 5
    assert listed.losses == streamed.losses


def test_rotations_are_learned_as_fedrot_learns_them() -> None:
    symmetry = symmetry_for(NAME)
    anchor, update = state_of(NAME), state_of(NAME, 4)
    start = fedrot.align(update, anchor, symmetry)
    given: Any = (loss_of(_model(anchor)), _batches(), update, anchor, symmetry, start)
    ours = learning.learn_alignment(*given, learning.LearningOptions(("attention",), steps=4))
    options = LearningOptions(("attention",), steps=4, lr=learning.LR, points=learning.POINTS)
    theirs = learn_alignment(*given, options)
    assert ours.losses == theirs.losses
    for one, other in zip(ours.alignment.moves, theirs.alignment.moves, strict=True):
        assert torch.equal(one.element, other.element)


# What is left alone


@pytest.mark.parametrize("parts", [("attention",), ALL], ids="-".join)
def test_models_inputs_and_batches_are_not_changed(parts: tuple[str, ...]) -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    batches = _batches()
    model = _model(state_of(NAME, 6))
    given = [anchor, update, dict(model.state_dict()), *batches]
    kept = [{k: v.clone() for k, v in tensors.items()} for tensors in given]
    learn_alignment(
        loss_of(model),
        batches,
        update,
        anchor,
        symmetry_for(NAME),
        options=LearningOptions(parts=parts, steps=3),
    )
    for before, now in zip(kept, given, strict=True):
        assert all(torch.equal(before[k], now[k]) for k in before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(t.requires_grad for t in (*anchor.values(), *update.values()))


def test_the_result_is_free_of_gradients() -> None:
    anchor = {k: v.requires_grad_() for k, v in state_of(NAME).items()}
    update = {k: v.requires_grad_() for k, v in state_of(NAME, 4).items()}
    found = _learn({k: v.detach() for k, v in anchor.items()}, update, parts=ALL, steps=2)
    assert not any(move.element.requires_grad for move in found.alignment.moves)
    assert all(tensor.grad is None for tensor in update.values())


def test_learning_is_deterministic() -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    torch.manual_seed(1)
    one = _learn(anchor, update, parts=ALL, steps=4)
    torch.manual_seed(2)
    two = _learn(anchor, update, parts=ALL, steps=4)
    assert one.losses == two.losses
    assert {move.group.part for move in one.alignment.moves} == set(ALL)
    for left, right in zip(one.alignment.moves, two.alignment.moves, strict=True):
        assert torch.equal(left.element, right.element)


def test_loss_of_is_the_models_own_and_differentiable() -> None:
    model, other = _model(state_of(NAME)), state_of(NAME, 4)
    (batch,) = _batches(count=1)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    leaf = other[name].clone().requires_grad_()
    value = loss_of(model)({**other, name: leaf}, batch)
    value.backward()
    theirs = _model(other)
    expected = theirs(**batch).loss
    expected.backward()
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    gradient = theirs.get_parameter(name).grad
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, gradient, atol=1e-12)


# Gradients against finite differences, and values against the group's own action


def _groups() -> dict[str, tuple[Group, Slot, tuple[int, ...]]]:
    found = {}
    kinds: dict[str, Any] = {
        "rotation": HeadRotation(2, 3),
        "linear": HeadLinear(2, 3),
        "permutation": Permutation(6),
    }
    for kind_name, kind in kinds.items():
        for axis, (start, stop) in ((0, (0, 6)), (1, (0, 6)), (0, (2, 8)), (1, (3, 9))):
            for contravariant in (False, True) if kind_name == "linear" else (False,):
                shape = [4, 4]
                shape[axis] = 10 if start else 6
                slot = Slot("w", axis, Slice(start, stop), contravariant)
                label = f"{kind_name}-{axis}-{start}{'-contra' if contravariant else ''}"
                found[label] = (Group("g", 0, "attention", kind, (slot,)), slot, tuple(shape))
        slot = Slot("w", 0, Slice(0, 6))
        found[f"{kind_name}-bias"] = (Group("g", 0, "attention", kind, (slot,)), slot, (6,))
    return found


GROUPS = _groups()


def _as_matrix(group: Group, element: Tensor) -> Tensor:
    return element if isinstance(group.kind, HeadRotation) else dense(group.kind, element, 6)


@pytest.mark.parametrize("case", GROUPS)
def test_a_slot_moves_as_by_the_groups_own_action(case: str) -> None:
    group, slot, shape = GROUPS[case]
    tensor = torch.randn(shape, generator=seeded(1), dtype=torch.float64)
    element = group.kind.random(seeded(2))
    moved = _multiplied(tensor, slot, group, _as_matrix(group, element))
    assert (moved - Move(group, element).on(tensor, slot)).abs().max() <= 1e-12
    matrix = dense(group.kind, element, 6)
    expected = tensor.clone()
    on = torch.linalg.inv(matrix).mT if slot.contravariant else matrix
    slot.of(expected).copy_(along(on, slot.of(tensor), slot.axis))
    assert (moved - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("case", GROUPS)
def test_gradients_of_a_moved_slot_are_finite_differences(case: str) -> None:
    group, slot, shape = GROUPS[case]
    tensor = torch.randn(shape, generator=seeded(1), dtype=torch.float64)
    matrix = _as_matrix(group, group.kind.random(seeded(2))).clone().double()
    towards = torch.randn(shape, generator=seeded(3), dtype=torch.float64)

    def value(m: Tensor, t: Tensor) -> Tensor:
        return (_multiplied(t, slot, group, m) * towards).sum()

    m, t = matrix.requires_grad_(), tensor.requires_grad_()
    by_autograd = torch.autograd.grad(value(m, t), (m, t))
    for index, gradient in enumerate(by_autograd):
        assert gradient.abs().max() > 0
        for entry in range(gradient.numel()):
            ends = []
            for sign in (1, -1):
                point = [m.detach().clone(), t.detach().clone()]
                point = [p.contiguous() for p in point]
                point[index].view(-1)[entry] += sign * 1e-6
                ends.append(float(value(point[0], point[1])))
            slope = (ends[0] - ends[1]) / 2e-6
            assert slope == pytest.approx(float(gradient.reshape(-1)[entry]), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("kind", [HeadRotation(2, 3), HeadLinear(2, 3)], ids=["rotation", "linear"])
def test_the_heads_matrix_is_in_its_group_and_its_gradient_true(kind: HeadRotation) -> None:
    group = Group("g", 0, "attention", kind, ())
    assert (turned(group.kind, initial(group.kind)) - torch.eye(3)).abs().max() == 0
    parameter = torch.randn(2, 3, 3, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    assert kind.contains(turned(group.kind, parameter).detach())
    assert torch.autograd.gradcheck(lambda p: turned(group.kind, p), parameter)


def test_a_permutation_acts_hard_and_learns_softly() -> None:
    group = Group("g", 0, "ffn", Permutation(6), ())
    options = LearningOptions()
    parameter = initial(group.kind)
    assert (_matrix(group, parameter, options) - torch.eye(6)).abs().max() <= 1e-6
    scores = torch.randn(6, 6, generator=seeded(1), dtype=torch.float64).requires_grad_()
    hard = _matrix(group, scores, options)
    rounded = hard.detach().round()
    assert (hard.detach() - rounded).abs().max() <= 1e-6
    assert rounded.sum(0).tolist() == rounded.sum(1).tolist() == [1.0] * 6
    towards = torch.randn(6, 6, generator=seeded(2), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((hard * towards).sum(), scores)

    def soft(p: Tensor) -> Tensor:
        """The oracle: rows and columns are divided by their sums in turn."""
        out = (p / options.temperature).exp()
        for _ in range(10):
            out = out / out.sum(1, keepdim=True)
            out = out / out.sum(0, keepdim=True)
        return (out * towards).sum()

    (expected,) = torch.autograd.grad(soft(scores), scores)
    assert torch.allclose(gradient, expected, atol=1e-10)
    assert gradient.abs().max() > 1e-3


# Errors


def test_no_batches_are_refused() -> None:
    anchor = state_of(NAME)
    with pytest.raises(fedrot.FedrotError, match="No batches"):
        _learn(anchor, near(anchor, 0.1), batches=[])


def test_nothing_to_learn_needs_no_batches() -> None:
    anchor, update = state_of(NAME), state_of(NAME, 4)
    found = _learn(anchor, update, batches=[], parts=())
    expected = fedrot.align(update, anchor, symmetry_for(NAME)).apply(update)
    assert largest_difference(found.alignment.apply(update), expected) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(value: float) -> None:
    anchor = state_of(NAME)
    model_loss = loss_of(_model(anchor))
    seen = []

    def loss(tensors: Any, batch: Any) -> Tensor:
        seen.append(0)
        return model_loss(tensors, batch) * (value if len(seen) == 3 else 1.0)

    with pytest.raises(fedrot.FedrotError, match="at step 3"):
        learn_alignment(
            loss,
            _batches(),
            near(anchor, 0.1),
            anchor,
            symmetry_for(NAME),
            options=LearningOptions(steps=5),
        )


def test_batches_without_labels_are_refused() -> None:
    anchor = state_of(NAME)
    batches = [{k: v for k, v in b.items() if k != "labels"} for b in _batches()]
    with pytest.raises(fedrot.FedrotError, match="label"):
        _learn(anchor, near(anchor, 0.1), batches=batches)


BAD: list[dict[str, Any]] = [
    {"parts": ("output",)},
    {"parts": ("attention", "heads")},
    {"parts": ("rescale",)},
    {"steps": -1},
    {"lr": 0.0},
    {"permutation_lr": -1e-3},
    {"temperature": 0.0},
    {"lr": float("nan")},
    {"permutation_lr": float("nan")},
    {"temperature": float("nan")},
]


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_bad_options_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(fedrot.FedrotError):
        LearningOptions(**settings)


def test_a_part_that_the_model_refuses_is_refused() -> None:
    name = "bert-bare"
    anchor = state_of(name)
    with pytest.raises(fedrot.SymmetryError, match="residual"):
        learn_alignment(
            lambda tensors, batch: torch.zeros(()),
            [{}],
            anchor,
            anchor,
            fedrot.symmetry_of(config_of(name), anchor),
            options=LearningOptions(parts=("residual",), steps=1),
        )
